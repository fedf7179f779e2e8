"""How embeddings get from an encoder to stage 0. Two ends; what lies between them is hidden."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

Place = tuple[tuple[int, int], ...]
"""Where an item's rows go in the arena: (first row, number of rows) pieces, in order."""

Payload = Any
"""A buffer that travels with the message that reports an item, as a frame of its own; None: nothing has to."""


class Receiver(Protocol):
    """Stage 0's end; it owns the memory. Calls come from the driver's loop, except `read` (the stage's thread)."""

    def allocate(self, num_tokens: int) -> Place:
        """Room for the rows of one item. Raises ValueError when there is none: the core counts, so there is."""
        ...

    def free(self, place: Place) -> None:
        """The rows are not needed, and nobody writes them any more."""
        ...

    def deliver(self, place: Place, payload: Payload) -> None:
        """What `Sender.write` returned for the item at `place` has arrived. Raises ValueError when it does not fit."""
        ...

    def read(self, place: Place, start: int, out: torch.Tensor) -> None:
        """Copy rows `start .. start + len(out) - 1` of the item at `place` into out [n, hidden]."""
        ...

    def close(self) -> None: ...


class Sender(Protocol):
    """An encoder's end."""

    def write(self, place: Place, rows: torch.Tensor) -> Payload:
        """Put rows [num_tokens, hidden] of one item at `place`: done when it returns, or when what it returns has been
        delivered. Raises ValueError when they are not as many as the place takes."""
        ...

    def close(self) -> None: ...
