"""What the model's image processor does to one image, up to the resized uint8 pixels.

Normalisation and patches are left to the encoder's device; reading bytes is `image`'s.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from gllm.errors import BadRequest, StartupError

Grid = tuple[int, int, int]

MAX_ASPECT_RATIO = 200
_DEFAULT_MIN_PIXELS = 56 * 56
_DEFAULT_MAX_PIXELS = 28 * 28 * 1280


class ImageProcessor:
    """Sizes and resizing of Qwen2-VL's image processor, from a checkpoint's preprocessor_config.json.

    overrides: `min_pixels` and `max_pixels` of the command line. Raises StartupError when the settings make no sense.
    """

    def __init__(self, checkpoint: Path, overrides: dict[str, Any] | None = None) -> None:
        settings = _read_settings(checkpoint)
        size = settings.get("size") or {}
        overrides = overrides or {}
        self.patch_size = int(settings.get("patch_size", 14))
        self.merge_size = int(settings.get("merge_size", 2))
        self.min_pixels = _first(overrides, settings, size, ("min_pixels", "shortest_edge"), _DEFAULT_MIN_PIXELS)
        self.max_pixels = _first(overrides, settings, size, ("max_pixels", "longest_edge"), _DEFAULT_MAX_PIXELS)
        self.resample = Image.Resampling(int(settings.get("resample", Image.Resampling.BICUBIC)))
        self.factor = self.patch_size * self.merge_size
        if not (isinstance(self.min_pixels, int) and isinstance(self.max_pixels, int)):
            raise StartupError("min_pixels and max_pixels of the image processor must be whole numbers")
        if not 1 <= self.min_pixels <= self.max_pixels:
            raise StartupError(
                f"image processor: 1 <= min_pixels ({self.min_pixels}) <= max_pixels ({self.max_pixels})"
            )

    @property
    def fingerprint(self) -> str:
        """Every setting that the pixels depend on: part of a cache key."""
        return f"{self.patch_size},{self.merge_size},{self.min_pixels},{self.max_pixels},{int(self.resample)}"

    def grid(self, width: int, height: int) -> Grid:
        """(t, h, w) in patches for an image of width x height pixels. Raises BadRequest for too long a strip."""
        ratio = max(width, height) / min(width, height)
        if ratio > MAX_ASPECT_RATIO:
            raise BadRequest(
                f"{width}x{height} has an aspect ratio of {ratio:.1f}; at most {MAX_ASPECT_RATIO} is supported",
                code="invalid_image",
            )
        resized_height, resized_width = self._resized(height, width)
        return 1, resized_height // self.patch_size, resized_width // self.patch_size

    def num_tokens(self, grid: Grid) -> int:
        """Item tokens: patches after the merge of merge_size x merge_size of them."""
        return math.prod(grid) // self.merge_size**2

    def pixels(self, image: Image.Image) -> np.ndarray:
        """An upright RGB image -> uint8 [H, W, 3], H and W multiples of patch_size * merge_size."""
        _, rows, columns = self.grid(*image.size)
        target = (columns * self.patch_size, rows * self.patch_size)
        return np.array(image if image.size == target else image.resize(target, self.resample))

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Both sides to multiples of `factor`, near the same ratio, within min_pixels and max_pixels: bit for bit the
        rule that Qwen2-VL was trained with, hence the order of operations and Python's rounding of halves to even."""
        factor = self.factor
        rounded = round(height / factor) * factor, round(width / factor) * factor
        if math.prod(rounded) > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            down = [max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)]
            return down[0], down[1]
        if math.prod(rounded) < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            up = [math.ceil(side * grow / factor) * factor for side in (height, width)]
            return up[0], up[1]
        return rounded


def _read_settings(checkpoint: Path) -> dict[str, Any]:
    """transformers' order: the `image_processor` part of processor_config.json, else preprocessor_config.json."""
    for name, part in (("processor_config.json", "image_processor"), ("preprocessor_config.json", None)):
        path = checkpoint / name
        if path.is_file():
            try:
                settings: Any = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise StartupError(f"{name} of the checkpoint is not JSON: {error}") from None
            settings = settings.get(part) if part else settings
            if settings is not None:
                return dict(settings)
    return {}


def _first(
    overrides: dict[str, Any], settings: dict[str, Any], size: dict[str, Any], names: tuple[str, str], default: int
) -> Any:
    """`names`: the older key, then its name inside `size`."""
    old, new = names
    for value in (overrides.get(old), settings.get(old), size.get(new), size.get(old)):
        if value is not None:
            return value
    return default
