"""What is busy in the simulated machine room: pipeline stages, encoders, links, and the API's preprocessing pool.

Each holds its queue and its books; what happens next is decided by events and by the core.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gllm.core.batch import Batch, EncodeBatch, ItemRef
from gllm.core.eventlog import Record, batch_span, encode_span

SpanSink = Callable[[Record], None]


@dataclass(slots=True)
class Worker:
    """A device group that does one thing at a time. Its busy spans go to `sink` when there is one."""

    name: str
    sink: SpanSink | None
    is_busy: bool = False
    busy: dict[str, float] = field(default_factory=dict)  # seconds by kind of work

    def encodes(self, batch_id: int, refs: Sequence[ItemRef], start: float, seconds: float) -> None:
        self.busy["encode"] = self.busy.get("encode", 0.0) + seconds
        if self.sink is not None and seconds > 0:
            self.sink(encode_span(self.name, batch_id, refs, start, start + seconds))

    def runs(self, batch: Batch, start: float, seconds: float) -> None:
        self.busy["prefill"] = self.busy.get("prefill", 0.0) + seconds
        if self.sink is not None and seconds > 0:
            self.sink(batch_span(self.name, batch, start, start + seconds))


@dataclass(slots=True)
class Stage:
    """One pipeline stage: `num_layers` layers on a group of TP devices; micro-batches in order."""

    worker: Worker
    index: int
    num_layers: int
    is_last: bool
    queue: deque[Batch] = field(default_factory=deque)


@dataclass(slots=True)
class Encoder:
    """One encoder device and its link to stage 0: at most one message at a time on it."""

    worker: Worker
    encoder_id: int
    queue: deque[EncodeBatch] = field(default_factory=deque)
    link_free_at: float = 0.0

    def send(self, now: float, seconds: float) -> float:
        """When a message that is ready now has arrived."""
        self.link_free_at = max(now, self.link_free_at) + seconds
        return self.link_free_at


class PreprocessPool:
    """The API process's workers: fetch, decode and resize images, in order of arrival."""

    def __init__(self, num_workers: int, seconds_per_megapixel: float) -> None:
        self._free_at = [0.0] * num_workers
        self._seconds_per_megapixel = seconds_per_megapixel

    def done_at(self, now: float, num_pixels: int) -> float:
        if not self._seconds_per_megapixel:
            return now
        start = max(now, heapq.heappop(self._free_at))
        end = start + num_pixels / 1e6 * self._seconds_per_megapixel
        heapq.heappush(self._free_at, end)
        return end
