"""What the load client sends: shapes of requests (seeded), and their HTTP bodies, built before the first one is sent.

Shapes are those of `benchmarks.workloads`; here stands the mix that two CPU cores can serve, and how a shape becomes a
chat completion with images of its own.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from PIL import Image as Picture

from benchmarks.sim.images import Image
from benchmarks.workloads import Part, Shape

# Words that the tokenizers in use know as one token each, so that a text has about as many tokens as words.
WORDS = ("what", "colour", "shape", "digit", "picture", "is", "the", "in", "which", "shows", "a", "does", "red", "blue")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Random requests: ranges, both ends included. images: a request; side: pixels of an image; text: words."""

    images: tuple[int, int] = (1, 8)
    side: tuple[int, int] = (84, 336)
    text: tuple[int, int] = (30, 250)

    def __post_init__(self) -> None:
        for name, least in (("images", 0), ("side", 28), ("text", 1)):
            low, high = getattr(self, name)
            if not least <= low <= high:
                raise ValueError(f"{name}: {low} to {high} is not a range from {least} on")

    def parts(self, rng: Random) -> tuple[Part, ...]:
        """Images in a row, with text before, between and after them in random places."""
        parts: list[Part] = [
            Image(rng.randint(*self.side), rng.randint(*self.side)) for _ in range(rng.randint(*self.images))
        ]
        words = rng.randint(*self.text)
        cuts = sorted(rng.randrange(words) for _ in range(2))
        for length in (cuts[0], cuts[1] - cuts[0]):
            if length:
                parts.insert(rng.randint(0, len(parts)), length)
        return (*parts, words - cuts[1])

    def shapes(self, arrivals: Iterable[float], seed: int, max_tokens: int) -> list[Shape]:
        """The same seed gives the same requests at any rate."""
        rng = Random(f"mix {seed}")
        return [Shape(arrival, self.parts(rng), max_tokens) for arrival in arrivals]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to be sent. arrival: seconds after the start. sizes: (width, height) of its images, in pixels."""

    arrival: float
    body: bytes
    sizes: tuple[tuple[int, int], ...] = ()


def messages(shape: Shape, rng: np.random.Generator) -> list[dict[str, Any]]:
    """The shape as a chat: every image random, so that nothing can be found in a cache."""
    content: list[dict[str, Any]] = []
    for part in shape.parts:
        if isinstance(part, Image):
            content.append({"type": "image_url", "image_url": {"url": data_url(random_picture(rng, part))}})
        else:
            content.append({"type": "text", "text": " ".join(WORDS[i] for i in rng.integers(len(WORDS), size=part))})
    return [{"role": "user", "content": content}]


def prepare(shapes: Sequence[Shape], model: str, seed: int, *, logprobs: bool = False) -> list[Prepared]:
    """Bodies of streaming, greedy chat completions of fixed output length.

    logprobs: ask for them, so that every token is seen even if it has no text (random weights).
    """
    prepared = []
    for number, shape in enumerate(shapes):
        rng = np.random.default_rng([seed, number])
        body: dict[str, Any] = {
            "model": model,
            "messages": messages(shape, rng),
            "max_tokens": shape.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if logprobs:
            body["logprobs"] = True
        sizes = tuple((image.width, image.height) for image in shape.images)
        prepared.append(Prepared(shape.arrival, json.dumps(body).encode(), sizes))
    return prepared


def random_picture(rng: np.random.Generator, size: Image) -> Picture.Image:
    """Noise, smooth enough to compress as photographs do."""
    small = rng.integers(0, 256, (max(1, size.height // 8), max(1, size.width // 8), 3), dtype=np.uint8)
    return Picture.fromarray(small).resize((size.width, size.height), Picture.Resampling.BICUBIC)


def data_url(picture: Picture.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
