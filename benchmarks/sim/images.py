"""From an image's size to its patches and tokens, by the rule of Qwen2-VL's image processor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.sim.model_spec import ModelSpec, VisionSpec


@dataclass(frozen=True, slots=True)
class Image:
    """Width and height in pixels, as the client sends it."""

    width: int
    height: int


# What the paper calls 1K .. 8K; [I] the usual 16:9 sizes of these names (2K as 2560x1440, as in SGLang's benchmark).
RESOLUTIONS = {
    "1K": Image(1920, 1080),
    "2K": Image(2560, 1440),
    "4K": Image(3840, 2160),
    "8K": Image(7680, 4320),
}


def grid_of(image: Image, model: ModelSpec, limit: bool = True) -> tuple[int, int, int]:
    """(t, h, w) in patches: both sides rounded to multiples of 28 pixels, and scaled where the area passes the
    processor's limits (transformers, Qwen2VLImageProcessor). limit=False: without the upper limit."""
    factor = model.vision.patch_size * model.vision.spatial_merge_size
    height, width = _round(image.height, factor), _round(image.width, factor)
    area = image.height * image.width
    if limit and height * width > model.max_pixels:
        scale = math.sqrt(area / model.max_pixels)
        height = max(factor, math.floor(image.height / scale / factor) * factor)
        width = max(factor, math.floor(image.width / scale / factor) * factor)
    elif height * width < model.min_pixels:
        scale = math.sqrt(model.min_pixels / area)
        height = math.ceil(image.height * scale / factor) * factor
        width = math.ceil(image.width * scale / factor) * factor
    return 1, height // model.vision.patch_size, width // model.vision.patch_size


def num_patches(grid: tuple[int, int, int]) -> int:
    return grid[0] * grid[1] * grid[2]


def num_pixels(grid: tuple[int, int, int], vision: VisionSpec) -> int:
    """Pixels after resizing."""
    return num_patches(grid) * vision.patch_size**2


def _round(side: int, factor: int) -> int:
    return max(factor, round(side / factor) * factor)
