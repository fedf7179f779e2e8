"""Where stage 0 gets the rows of item tokens from. Co-located: kept here, from encoding until they are prefilled."""

from __future__ import annotations

from typing import Protocol

import torch


class EmbeddingSource(Protocol):
    """Embeddings of items, by request and index. A row is asked for once, items in any order, rows left to right."""

    def gather(self, request_id: int, index: int, start: int, num_tokens: int, out: torch.Tensor) -> None:
        """Copy rows `start .. start + num_tokens - 1` of item `index` into out [num_tokens, hidden].

        Raises LookupError when they are not there.
        """
        ...

    def drop(self, request_id: int) -> None:
        """Forget what is left of a request (finished, aborted or preempted); unknown ids are fine."""
        ...


class PixelSource(Protocol):
    """Pixels of items, for an encoder in the same process."""

    def pixels(self, request_id: int, index: int) -> torch.Tensor:
        """uint8 [height, width, 3], already resized to the item's grid. Raises LookupError when not there."""
        ...


class LocalEmbeddings:
    """An `EmbeddingSource` filled by the encoder of the same process. An item is released with its last row."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[int, torch.Tensor]] = {}

    def put(self, request_id: int, index: int, rows: torch.Tensor) -> None:
        """rows: [num_tokens, hidden] of item `index`."""
        self._rows.setdefault(request_id, {})[index] = rows

    def gather(self, request_id: int, index: int, start: int, num_tokens: int, out: torch.Tensor) -> None:
        items = self._rows.get(request_id, {})
        if index not in items:
            raise LookupError(f"request {request_id}: item {index} has not been encoded")
        rows = items[index]
        out.copy_(rows[start : start + num_tokens])
        if start + num_tokens == len(rows):
            del items[index]
            if not items:
                del self._rows[request_id]

    def drop(self, request_id: int) -> None:
        self._rows.pop(request_id, None)

    @property
    def num_tokens(self) -> int:
        """Rows held now."""
        return sum(len(rows) for items in self._rows.values() for rows in items.values())
