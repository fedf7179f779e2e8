"""Embeddings that encoders have put into stage 0's memory: gathered for a chunk, freed when the core says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rserve.transport.base import Place, Receiver

if TYPE_CHECKING:
    import torch


class ReceivedEmbeddings:
    """An `EmbeddingSource` for the stage's thread. `bind` and `release` are called by the driver's loop; an item is
    bound before the chunk that gathers it is sent, and released after that chunk was fed."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._places: dict[tuple[int, int], Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def bind(self, request_id: int, index: int, place: Place) -> None:
        """The rows of an item are at `place`."""
        self._places[request_id, index] = place

    def release(self, request_id: int, index: int) -> None:
        self._receiver.free(self._places.pop((request_id, index)))

    def gather(self, request_id: int, index: int, start: int, num_tokens: int, out: torch.Tensor) -> None:
        place = self._places.get((request_id, index))
        if place is None:
            raise LookupError(f"request {request_id}: item {index} has not been encoded")
        self._receiver.read(place, start, out)

    def drop(self, request_id: int) -> None:
        """Nothing: the core names each item that is released."""
