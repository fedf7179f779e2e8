"""The vision encoder as a worker uses it: resized uint8 images in, rows for the language model out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from gllm.layers.packed import compile_products, pack_weights
from gllm.layers.parallel import SINGLE, Parallel
from gllm.models.config import read_json
from gllm.models.loader import load_vision_model, resolve_dtype

Grid = tuple[int, int, int]

# Qwen2-VL's defaults (CLIP's), used when the folder has no preprocessor_config.json.
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def patchify(image: torch.Tensor, patch: int, merge: int) -> torch.Tensor:
    """uint8 [H, W, 3] -> uint8 [patches, 3 * patch * patch]; the merge x merge patches of one token are neighbours."""
    height, width, channels = image.shape
    unit = patch * merge
    parts = image.view(height // unit, merge, patch, width // unit, merge, patch, channels)
    return parts.permute(0, 3, 1, 4, 6, 2, 5).reshape(-1, channels * patch * patch)


class VisionEncoder:
    """Encodes batches of images; holds the vision encoder's weights and nothing else."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        dtype: str = "auto",
        device: torch.device | str = "cpu",
        load_format: str = "auto",
        seed: int = 0,
        parallel: Parallel = SINGLE,
        max_patches: int | None = None,
    ) -> None:
        """max_patches: most patches that go through the model at once (memory); a larger image goes alone."""
        self.device = torch.device(device)
        self.dtype = resolve_dtype(checkpoint, dtype)
        where = {"dtype": self.dtype, "device": self.device, "load_format": load_format, "seed": seed}
        self.model = load_vision_model(checkpoint, parallel, **where)
        pack_weights(self.model)
        compile_products(self.model)
        self.config = self.model.config
        self.max_patches = max_patches or (8192 if self.device.type == "cpu" else 65536)
        settings = read_json(checkpoint, "preprocessor_config.json", required=False)
        area = self.config.patch_size**2
        mean = torch.tensor(settings.get("image_mean") or MEAN, dtype=torch.float32)
        std = torch.tensor(settings.get("image_std") or STD, dtype=torch.float32)
        rescale = float(settings.get("rescale_factor") or 1 / 255)
        self.scale = (rescale / std).repeat_interleave(area).to(self.device)
        self.shift = (-mean / std).repeat_interleave(area).to(self.device)

    def num_tokens(self, grid: Grid) -> int:
        return grid[0] * grid[1] * grid[2] // self.config.merge_unit

    def grid_of(self, image: torch.Tensor) -> Grid:
        """The grid of a still image [H, W, 3]."""
        return (1, image.shape[0] // self.config.patch_size, image.shape[1] // self.config.patch_size)

    def check(self, image: torch.Tensor, grid: Grid, num_tokens: int | None = None) -> None:
        """Raises ValueError when the pixels are not those of the grid, or the grid does not give `num_tokens`."""
        patch, merge = self.config.patch_size, self.config.merge_size
        frames, height, width = grid
        if frames != 1 or height < merge or width < merge or height % merge or width % merge:
            raise ValueError(f"grid {grid} is not a still image of {merge}x{merge} patches")
        shape = (height * patch, width * patch, self.config.in_channels)
        if image.dtype != torch.uint8 or tuple(image.shape) != shape:
            raise ValueError(f"pixels are {image.dtype} {list(image.shape)}, grid {grid} needs uint8 {list(shape)}")
        if num_tokens is not None and num_tokens != self.num_tokens(grid):
            raise ValueError(f"grid {grid} gives {self.num_tokens(grid)} tokens, the prompt has {num_tokens}")

    def patches(self, images: Sequence[torch.Tensor]) -> torch.Tensor:
        """float32 [patches, channels * patch**2]: rescaled and normalised, as the reference image processor does, but
        one frame instead of a pair of equal ones."""
        patch, merge = self.config.patch_size, self.config.merge_size
        raw = torch.cat([patchify(image.to(self.device, non_blocking=True), patch, merge) for image in images])
        return torch.addcmul(self.shift, raw.float(), self.scale)

    @torch.inference_mode()
    def encode(self, images: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
        """uint8 [14 h, 14 w, 3] and (1, h, w) for each image -> rows [h * w / 4, hidden] for each, in order.

        Raises ValueError for pixels that do not fit their grid, before anything is computed.
        """
        for image, grid in zip(images, grids, strict=True):
            self.check(image, grid)
        rows: list[torch.Tensor] = []
        for part in self._parts(grids):
            patches = self.patches(images[part]).to(self.dtype)
            out = self.model(patches, grids[part])
            rows += out.split([self.num_tokens(grid) for grid in grids[part]])
        return rows

    def _parts(self, grids: Sequence[Grid]) -> list[slice]:
        """Consecutive images that go through the model together."""
        parts, start, patches = [], 0, 0
        for index, (frames, height, width) in enumerate(grids):
            size = frames * height * width
            if patches and patches + size > self.max_patches:
                parts.append(slice(start, index))
                start, patches = index, 0
            patches += size
        if len(grids) > start:
            parts.append(slice(start, len(grids)))
        return parts
