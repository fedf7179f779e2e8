"""A request of a workload as the simulator takes it: when it arrives, and its laid-out prompt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from benchmarks.sim.images import num_patches
from benchmarks.sim.model_spec import VisionSpec
from gllm.core.request import Item, Request

Segment = int | tuple[int, int, int]  # so many text tokens, or the grid of an image


@dataclass(frozen=True, slots=True)
class Job:
    """arrival: seconds of virtual time at which all headers are known and the prompt is laid out."""

    arrival: float
    request: Request


def lay_out(request_id: int, segments: Iterable[Segment], vision: VisionSpec, max_tokens: int) -> Request:
    """The request with these segments in order. An image stands between two marker tokens, as in Qwen2.5-VL's chat
    template. Token ids carry no meaning here."""
    position = 0
    items = []
    for segment in segments:
        if isinstance(segment, int):
            position += segment
        else:
            num_tokens = num_patches(segment) // vision.patches_per_token
            items.append(Item(position + 1, num_tokens, segment))
            position += num_tokens + 2
    return Request(request_id, _blank(position), tuple(items), max_tokens)


@lru_cache(maxsize=256)
def _blank(num_tokens: int) -> tuple[int, ...]:
    return (0,) * num_tokens
