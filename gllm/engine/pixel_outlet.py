"""How pixels leave the API process: as files of the run directory on one host, as frames of a message between hosts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

import numpy as np

from gllm.engine.messages import ItemPixels


class PixelOutlet(Protocol):
    """num_bytes: what is held or on loan for requests that are not dropped."""

    num_bytes: int

    async def put(self, request_id: int, index: int, pixels: np.ndarray) -> tuple[ItemPixels, tuple[np.ndarray, ...]]:
        """The message about pixels [height, width, 3], uint8, and the frames that travel with it. Raises OSError when
        there is no room."""
        ...

    def drop(self, request_id: int) -> None:
        """The request is over; unknown ids are fine."""
        ...


class FileOutlet:
    """A file for each item, read by whoever encodes it."""

    def __init__(self, run_dir: Path) -> None:
        self.num_bytes = 0
        self._run_dir = run_dir
        self._files: dict[int, dict[Path, int]] = {}

    async def put(self, request_id: int, index: int, pixels: np.ndarray) -> tuple[ItemPixels, tuple[np.ndarray, ...]]:
        path = self._run_dir / f"pixels-{request_id}-{index}"
        await asyncio.to_thread(_write, path, pixels)
        self._files.setdefault(request_id, {})[path] = pixels.nbytes
        self.num_bytes += pixels.nbytes
        height, width, _ = pixels.shape
        return ItemPixels(request_id, index, path.name, height, width), ()

    def drop(self, request_id: int) -> None:
        for path, num_bytes in self._files.pop(request_id, {}).items():
            path.unlink(missing_ok=True)
            self.num_bytes -= num_bytes


class FrameOutlet:
    """The driver holds the pixels; here they are only counted."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._sent: dict[int, int] = {}

    async def put(self, request_id: int, index: int, pixels: np.ndarray) -> tuple[ItemPixels, tuple[np.ndarray, ...]]:
        self._sent[request_id] = self._sent.get(request_id, 0) + pixels.nbytes
        self.num_bytes += pixels.nbytes
        height, width, _ = pixels.shape
        return ItemPixels(request_id, index, "", height, width), (np.ascontiguousarray(pixels),)

    def drop(self, request_id: int) -> None:
        self.num_bytes -= self._sent.pop(request_id, 0)


def _write(path: Path, pixels: np.ndarray) -> None:
    """Written, not mapped: a full file system is an error here, and a crash there. Raises OSError; leaves no part."""
    try:
        path.write_bytes(memoryview(np.ascontiguousarray(pixels)).cast("B"))
    except OSError:
        path.unlink(missing_ok=True)
        raise
