"""Pixels of items, as the API process leaves them: a file of the run directory for each item."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class PixelFile:
    """uint8 [height, width, 3] in a file, by its name in the run directory."""

    file: str
    height: int
    width: int


def read_pixels(run_dir: Path, source: PixelFile) -> torch.Tensor:
    """uint8 [height, width, 3], mapped, not copied. Raises LookupError when the file is gone (its request is over) or
    not of that size."""
    path, num_bytes = run_dir / source.file, source.height * source.width * 3
    try:
        if path.stat().st_size != num_bytes:
            raise LookupError(f"the pixel file of the item does not hold {num_bytes} bytes")
        flat = torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise LookupError("the pixels of the item are gone") from error
    return flat.view(source.height, source.width, 3)


class PixelFiles:
    """A `PixelSource` for an encoder in the driver's process. Filled by the loop, read by the stage's thread."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files: dict[int, dict[int, PixelFile]] = {}

    def put(self, request_id: int, index: int, source: PixelFile) -> None:
        self._files.setdefault(request_id, {})[index] = source

    def file(self, request_id: int, index: int) -> PixelFile:
        return self._files[request_id][index]

    def drop(self, request_id: int) -> None:
        self._files.pop(request_id, None)

    def pixels(self, request_id: int, index: int) -> torch.Tensor:
        source = self._files.get(request_id, {}).get(index)
        if source is None:
            raise LookupError(f"request {request_id}: item {index} has no pixels")
        return read_pixels(self._run_dir, source)
