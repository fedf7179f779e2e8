"""Requests and their arrivals, seeded: the paper's image workloads, the fixed pairs of figure 16, random image mixes.

A workload says what a client sends (text tokens, images in pixels, output tokens, when). `jobs` makes simulator jobs of
it; a load client makes HTTP requests of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from benchmarks.sim.catalog import UnknownName
from benchmarks.sim.images import RESOLUTIONS, Image, grid_of
from benchmarks.sim.job import Job, Segment, lay_out
from benchmarks.sim.model_spec import ModelSpec

Part = int | Image  # so many text tokens, or one image

# paper, section 4 [N]: prompts of about 8K / 12K tokens, of which about 5K / 9K are image tokens; [I] two images of
# 1920x1080 / 2560x1440 and 3K tokens of text. SGLang's image benchmark puts the images first, then the text.
TEXT_TOKENS = 3000
NUM_IMAGES = 2
# paper, section 5.3 (figure 16): 2K of text and 20 items; 896x896 pixels are 1,024 tokens, 224x112 are 32.
FIXED_TEXT = 2048
FIXED_ITEMS = 20


@dataclass(frozen=True, slots=True)
class Shape:
    """One request as its client sends it: arrival in seconds after the start, parts in order, output tokens."""

    arrival: float
    parts: tuple[Part, ...]
    max_tokens: int = 1

    @property
    def images(self) -> tuple[Image, ...]:
        return tuple(part for part in self.parts if isinstance(part, Image))


# ---- arrivals -------------------------------------------------------------------------------------------------------


def poisson(rate: float, count: int, seed: int) -> Iterator[float]:
    """Arrival times of a Poisson process of `rate` requests a second, from 0."""
    rng = Random(f"arrivals {seed}")
    now = 0.0
    for _ in range(count):
        yield now
        now += rng.expovariate(rate)


def at_once(count: int) -> Iterator[float]:
    return iter([0.0] * count)


def trace(times: Iterable[float]) -> Iterator[float]:
    """Recorded arrival times, in seconds, moved so that the first is 0."""
    ordered = sorted(times)
    return (time - ordered[0] for time in ordered)


# ---- what requests look like --------------------------------------------------------------------------------------


def images_first(rng: Random, resolution: str) -> tuple[Part, ...]:
    return (*[RESOLUTIONS[resolution]] * NUM_IMAGES, TEXT_TOKENS)


def interleaved(rng: Random, resolution: str) -> tuple[Part, ...]:
    """Text before every image: case 0 of the paper's figure 9."""
    return (TEXT_TOKENS // NUM_IMAGES, RESOLUTIONS[resolution]) * NUM_IMAGES


def fixed_items(rng: Random, size: Image) -> tuple[Part, ...]:
    return (FIXED_TEXT, *[size] * FIXED_ITEMS)


def mixed(rng: Random, max_images: int) -> tuple[Part, ...]:
    """1 to `max_images` images, 224 pixels a side to 2K; up to 3K tokens of text in random places."""
    parts: list[Part] = [
        Image(28 * rng.randint(8, 91), 28 * rng.randint(8, 51)) for _ in range(rng.randint(1, max_images))
    ]
    for _ in range(rng.randint(1, 3)):
        parts.insert(rng.randint(0, len(parts)), rng.randint(1, 1000))
    return tuple(parts)


def many_images(rng: Random, count: int) -> tuple[Part, ...]:
    """`count` images of 1K resolution, and a short question."""
    return (*[RESOLUTIONS["1K"]] * count, 500)


WORKLOADS: dict[str, Callable[[Random], tuple[Part, ...]]] = {
    **{name: partial(images_first, resolution=name) for name in RESOLUTIONS},
    **{f"{name}-interleaved": partial(interleaved, resolution=name) for name in ("1K", "2K")},
    "items-1024": partial(fixed_items, size=Image(896, 896)),
    "items-32": partial(fixed_items, size=Image(224, 112)),
    "mix": partial(mixed, max_images=8),
    **{f"images-{count}": partial(many_images, count=count) for count in (1, 2, 4, 8, 16)},
}


def shapes(workload: str, arrivals: Iterable[float], seed: int, max_tokens: int = 1) -> list[Shape]:
    """The requests of a workload. The same seed gives the same requests at any rate. Raises UnknownName."""
    if workload not in WORKLOADS:
        raise UnknownName(f"unknown workload {workload!r}; known: {', '.join(WORKLOADS)}")
    rng = Random(f"shapes {seed}")
    return [Shape(arrival, WORKLOADS[workload](rng), max_tokens) for arrival in arrivals]


def jobs(requests: Sequence[Shape], model: ModelSpec, limit_pixels: bool = True) -> list[Job]:
    """The requests as the simulator takes them, numbered in order."""

    def segment(part: Part) -> Segment:
        return grid_of(part, model, limit_pixels) if isinstance(part, Image) else part

    return [
        Job(shape.arrival, lay_out(number, map(segment, shape.parts), model.vision, shape.max_tokens))
        for number, shape in enumerate(requests)
    ]
