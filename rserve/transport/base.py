"""How embeddings get from an encoder to stage 0. Two ends; what lies between them is hidden."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

Place = tuple[tuple[int, int], ...]
"""Where an item's rows go, in terms of the transport: here (first row, number of rows) pieces, in order."""


class Receiver(Protocol):
    """Stage 0's end; it owns the memory. Calls come from the driver's loop, except `read` (the stage's thread)."""

    def allocate(self, num_tokens: int) -> Place:
        """Room for the rows of one item. Raises ValueError when there is none: the core counts, so there is."""
        ...

    def free(self, place: Place) -> None:
        """The rows are not needed, and nobody writes them any more."""
        ...

    def read(self, place: Place, start: int, out: torch.Tensor) -> None:
        """Copy rows `start .. start + len(out) - 1` of the item at `place` into out [n, hidden]."""
        ...

    def close(self) -> None: ...


class Sender(Protocol):
    """An encoder's end."""

    def write(self, place: Place, rows: torch.Tensor) -> None:
        """Put rows [num_tokens, hidden] of one item at `place`; done when it returns."""
        ...

    def close(self) -> None: ...
