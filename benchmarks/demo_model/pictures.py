"""Draws the demo's pictures: one coloured shape with a digit on it in the middle of a quiet grey ground.

Only numpy and Pillow are needed, so that tests and load generators can draw without torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (225, 35, 40),
    "orange": (250, 140, 10),
    "yellow": (250, 228, 50),
    "green": (40, 170, 60),
    "cyan": (30, 210, 220),
    "blue": (60, 105, 245),
    "purple": (160, 60, 215),
    "pink": (250, 140, 200),
}
DIGITS: tuple[str, ...] = tuple("0123456789")
MIN_SIDE, MAX_SIDE = 56, 224
MIN_SPAN, MAX_SPAN = 50, 58  # pixels across the shape
MAX_SHIFT = 4  # pixels from the middle
INK = 10.0  # grey level of every digit
_MASTER = 192  # pixels on a side of the masks from which every shape and digit is scaled down


@dataclass(frozen=True)
class Content:
    """What one picture shows."""

    shape: str
    colour: str
    digit: str

    @property
    def is_held_out(self) -> bool:
        """Whether this combination (one in ten) is kept from training and seen in held-out questions only."""
        number = list(SHAPES).index(self.shape) + 3 * list(COLOURS).index(self.colour) + int(self.digit)
        return number % 10 == 0


def _ring(radii: list[float], turn: float = -90.0) -> list[tuple[float, float]]:
    """Corners at equal angles around (0, 0), the first at `turn` degrees; y points down."""
    angles = [math.radians(turn + 360.0 * corner / len(radii)) for corner in range(len(radii))]
    return [(radius * math.cos(angle), radius * math.sin(angle)) for radius, angle in zip(radii, angles, strict=True)]


def _around(quarter: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Corners of a quarter, and the same turned by 90, 180 and 270 degrees."""
    corners = list(quarter)
    for _ in range(3):
        corners += [(-y, x) for x, y in corners[-len(quarter) :]]
    return corners


def _heart() -> list[tuple[float, float]]:
    """The classic heart curve, scaled into the unit square."""
    turns = np.linspace(0.0, 2.0 * math.pi, 90, endpoint=False)
    across = 16.0 * np.sin(turns) ** 3
    down = -(13.0 * np.cos(turns) - 5.0 * np.cos(2 * turns) - 2.0 * np.cos(3 * turns) - np.cos(4 * turns))
    return [(float(x) / 17.0, float(y - 2.5) / 17.0) for x, y in zip(across, down, strict=True)]


# Corners in [-1, 1]; the digit's centre below the shape's centre and its height, in the same unit.
SHAPES: dict[str, tuple[list[tuple[float, float]], float, float]] = {
    "circle": (_ring([0.97] * 72), 0.0, 1.0),
    "square": ([(-0.86, -0.86), (0.86, -0.86), (0.86, 0.86), (-0.86, 0.86)], 0.0, 1.0),
    "triangle": ([(0.0, -0.98), (1.0, 0.85), (-1.0, 0.85)], 0.3, 0.85),
    "star": (_ring([1.0, 0.58] * 5), 0.04, 0.8),
    "heart": (_heart(), -0.12, 0.9),
    "diamond": ([(0.0, -1.0), (0.76, 0.0), (0.0, 1.0), (-0.76, 0.0)], 0.0, 0.85),
    "cross": (_around([(-0.4, -0.97), (0.4, -0.97), (0.4, -0.4)]), 0.0, 0.9),
    "arrow": (
        [(0.0, -1.0), (0.95, -0.02), (0.5, -0.02), (0.5, 0.97), (-0.5, 0.97), (-0.5, -0.02), (-0.95, -0.02)],
        0.12,
        0.95,
    ),
}
CONTENTS: tuple[Content, ...] = tuple(
    Content(shape, colour, digit) for shape in SHAPES for colour in COLOURS for digit in DIGITS
)


@cache
def _shape_mask(shape: str) -> Image.Image:
    """Coverage of the shape, mode L, _MASTER pixels on a side."""
    mask = Image.new("L", (_MASTER, _MASTER))
    corners = [((x + 1.0) * _MASTER / 2, (y + 1.0) * _MASTER / 2) for x, y in SHAPES[shape][0]]
    ImageDraw.Draw(mask).polygon(corners, fill=255)
    return mask


@cache
def _digit_mask(shape: str, digit: str) -> Image.Image:
    """Coverage of the digit where this shape has its middle, mode L, _MASTER pixels on a side."""
    _, below, height = SHAPES[shape]
    mask = Image.new("L", (_MASTER, _MASTER))
    draw = ImageDraw.Draw(mask)
    font = ImageFont.load_default(size=height * _MASTER * 0.8)
    left, top, right, bottom = draw.textbbox((0, 0), digit, font=font)
    centre = (1.0 + below) * _MASTER / 2
    draw.text(
        (_MASTER / 2 - (left + right) / 2, centre - (top + bottom) / 2), digit, fill=255, font=font, stroke_width=3
    )
    return mask


@lru_cache(maxsize=8192)
def _scaled_mask(shape: str, digit: str | None, span: int) -> Image.Image:
    """The mask of the shape, or of the digit in its middle, `span` pixels on a side."""
    mask = _shape_mask(shape) if digit is None else _digit_mask(shape, digit)
    return mask.resize((span, span), Image.Resampling.BILINEAR)


@cache
def _grain() -> np.ndarray:
    """Fixed noise from which every picture's grain is cut; float32 [2 * MAX_SIDE, 2 * MAX_SIDE, 1]."""
    return np.random.default_rng(0).standard_normal((2 * MAX_SIDE, 2 * MAX_SIDE, 1), dtype=np.float32)


def _ground(rng: np.random.Generator, width: int, height: int) -> np.ndarray:
    """A light or dark grey ground with a slope and grain; float32 [height, width, 3] in 0..255."""
    level = rng.uniform(170, 250) if rng.random() < 0.7 else rng.uniform(10, 60)
    tint = rng.uniform(-6, 6, size=3)
    slopes = rng.uniform(-14, 14, size=2).astype(np.float32)
    across = slopes[0] * np.linspace(-1, 1, width, dtype=np.float32)[None, :, None]
    down = slopes[1] * np.linspace(-1, 1, height, dtype=np.float32)[:, None, None]
    top, left = (int(rng.integers(0, 2 * MAX_SIDE - side + 1)) for side in (height, width))
    grain = _grain()[top : top + height, left : left + width] * np.float32(rng.uniform(0, 6))
    ground: np.ndarray = across + down + grain + (level + tint).astype(np.float32)
    return ground


def draw(rng: np.random.Generator, content: Content, width: int, height: int) -> Image.Image:
    """Draws `content` into an RGB picture of `width` x `height` pixels; place, size, turn and shade come from `rng`.

    Both sides must lie between MIN_SIDE and 2 * MAX_SIDE.
    """
    span = 2 * int(rng.uniform(MIN_SPAN, min(0.96 * min(width, height), MAX_SPAN)) / 2)
    left, top = (
        int(np.clip((room - span) // 2 + rng.integers(-MAX_SHIFT, MAX_SHIFT + 1), 0, room - span))
        for room in (width, height)
    )
    angle = float(rng.uniform(-6, 6))
    colour = np.asarray(COLOURS[content.colour], dtype=np.float32) + rng.uniform(-12, 12, size=3).astype(np.float32)
    canvas = _ground(rng, width, height)
    patch = canvas[top : top + span, left : left + span]
    for digit, fill in ((None, colour), (content.digit, np.float32(INK))):
        mask = _scaled_mask(content.shape, digit, span).rotate(angle, Image.Resampling.BILINEAR)
        cover = np.asarray(mask, dtype=np.float32)[:, :, None] / np.float32(255.0)
        patch += cover * (fill - patch)
    return Image.fromarray(np.clip(canvas, 0, 255).astype(np.uint8))


def draw_sides(rng: np.random.Generator, least: int = MIN_SIDE, most: int = MAX_SIDE) -> tuple[int, int]:
    """A width and a height between `least` and `most` pixels: small ones more often, any shape the two allow.

    Half the time both are multiples of 28 pixels, which a processor leaves as they are, where the limits allow it.
    """
    sides = np.exp(rng.uniform(math.log(least), math.log(most + 1), size=2))
    if rng.random() < 0.5:
        sides = np.round(sides / 28) * 28
    width, height = np.clip(sides, least, most)
    return int(width), int(height)
