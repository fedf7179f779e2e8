"""Which tokens of a request may be prefilled now: the first seam of the scheduler, and its co-located answer."""

from __future__ import annotations

from typing import Protocol

from gllm.core.batch import ItemRef
from gllm.core.embeddings import EmbeddingPool, EmbeddingStats
from gllm.core.request import Request


class NeverFits(ValueError):
    """A request that could not finish even alone on an empty engine."""


class Readiness(Protocol):
    """Knows the items of every live request. Positions are token positions of the request."""

    def add(self, request: Request, seq: int) -> None:
        """A request was admitted as number `seq` in the line. Raises NeverFits when an item is larger than all of the
        embedding memory."""
        ...

    def pixels_ready(self, request_id: int, index: int) -> None:
        """The pixels of an item of a live request are there."""
        ...

    def ready_end(self, request_id: int, num_tokens: int) -> int:
        """The first position whose data is not there yet; `num_tokens` when all of it is. Changes only with an event
        about this request."""
        ...

    def is_coming(self, request_id: int) -> bool:
        """More of the request gets ready by itself: an item of it is at an encoder."""
        ...

    def waits_for_pixels(self, request_id: int) -> bool:
        """The first position that is not ready belongs to an item whose pixels have still to come."""
        ...

    def room_end(self, request_id: int, end: int) -> int:
        """`end` or the first position before it for which there is no room at this moment."""
        ...

    def take(self, request_id: int, start: int, end: int) -> tuple[ItemRef, ...]:
        """The tokens `start .. end - 1` are scheduled: claim what they need. Returns items that stage 0 encodes."""
        ...

    def fed(self, request_id: int, end: int) -> None:
        """Stage 0 has gathered all embeddings before `end`: they are released."""
        ...

    def reset(self, request_id: int) -> None:
        """The request was preempted and starts again at position 0."""
        ...

    def remove(self, request_id: int) -> None:
        """The request is gone: whatever it holds is released."""
        ...

    def stats(self) -> EmbeddingStats: ...


class _Items:
    """Progress of one request's items, left to right: pixels there for `is_there`, encoded up to `num_encoded`,
    released up to `num_released`."""

    __slots__ = ("is_there", "num_encoded", "num_missing", "num_released", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.is_there = [False] * len(request.items)
        self.num_missing = len(request.items)
        self.num_encoded = 0
        self.num_released = 0


class ColocatedEncoder:
    """The encoder shares stage 0: a request is ready when the pixels of all its items are there, and its items are
    encoded in the micro-batch of its first chunk, as many as the embedding pool has room for; the rest follow when
    room is made."""

    def __init__(self, pool: EmbeddingPool) -> None:
        self.pool = pool
        self._requests: dict[int, _Items] = {}

    def add(self, request: Request, seq: int) -> None:
        check_items_fit(request, self.pool.capacity)
        self._requests[request.request_id] = _Items(request)

    def pixels_ready(self, request_id: int, index: int) -> None:
        items = self._requests[request_id]
        if not items.is_there[index]:
            items.is_there[index] = True
            items.num_missing -= 1

    def ready_end(self, request_id: int, num_tokens: int) -> int:
        items = self._requests[request_id]
        return 0 if items.num_missing else num_tokens

    def is_coming(self, request_id: int) -> bool:
        return False  # items are encoded in the micro-batch that needs them

    def waits_for_pixels(self, request_id: int) -> bool:
        return self._requests[request_id].num_missing > 0

    def room_end(self, request_id: int, end: int) -> int:
        items = self._requests[request_id]
        room = self.pool.capacity - self.pool.used
        for item in items.request.items[items.num_encoded :]:
            room -= item.num_tokens
            if room < 0 or item.offset >= end:
                return min(item.offset, end)
        return end

    def take(self, request_id: int, start: int, end: int) -> tuple[ItemRef, ...]:
        items = self._requests[request_id]
        taken = []
        for index in range(items.num_encoded, len(items.request.items)):
            num_tokens = items.request.items[index].num_tokens
            if not self.pool.fits(num_tokens):
                break
            self.pool.reserve(num_tokens)
            items.num_encoded = index + 1
            taken.append(ItemRef(request_id, index, num_tokens))
        return tuple(taken)

    def fed(self, request_id: int, end: int) -> None:
        items = self._requests[request_id]
        while items.num_released < items.num_encoded:
            item = items.request.items[items.num_released]
            if item.end > end:
                break
            self.pool.release(item.num_tokens)
            items.num_released += 1

    def reset(self, request_id: int) -> None:
        items = self._requests[request_id]
        for item in items.request.items[items.num_released : items.num_encoded]:
            self.pool.release(item.num_tokens)
        items.num_encoded = items.num_released = 0

    def remove(self, request_id: int) -> None:
        self.reset(request_id)
        del self._requests[request_id]

    def stats(self) -> EmbeddingStats:
        return EmbeddingStats(self.pool.used, self.pool.peak, 0, self.pool.capacity)


def check_items_fit(request: Request, capacity: int) -> None:
    """Raises NeverFits, naming both numbers, when an item can never be held."""
    for index, item in enumerate(request.items):
        if item.num_tokens > capacity:
            raise NeverFits(
                f"image {index + 1} has {item.num_tokens} tokens, more than the embedding capacity of {capacity} tokens"
            )
