"""Pixels of items as the driver has them: files of the run directory on one host, frames of messages between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class PixelFile:
    """uint8 [height, width, 3] in a file, by its name in the run directory; "": in a frame."""

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


def view_pixels(frame: Any, source: PixelFile) -> torch.Tensor:
    """uint8 [height, width, 3] on the memory of a frame (a buffer). Raises LookupError when it is not of that size."""
    buffer = memoryview(frame)
    if buffer.nbytes != source.height * source.width * 3:
        raise LookupError(f"{buffer.nbytes} bytes of pixels came for an item of {source.height} x {source.width}")
    return torch.frombuffer(buffer, dtype=torch.uint8).view(source.height, source.width, 3)


class Pixels(Protocol):
    """What the driver knows of items' pixels; also a `PixelSource` for an encoder in its process. Filled by the loop,
    read by the stage's thread. Held until the request is dropped: a preempted one is encoded again."""

    def put(self, request_id: int, index: int, source: PixelFile, frames: Sequence[Any]) -> None: ...

    def file(self, request_id: int, index: int) -> PixelFile: ...

    def frames(self, request_id: int, index: int) -> Sequence[Any]:
        """What has to travel with an item that is given to an encoder: nothing, or its pixels."""
        ...

    def drop(self, request_id: int) -> None: ...

    def pixels(self, request_id: int, index: int) -> torch.Tensor: ...

    @property
    def num_bytes(self) -> int:
        """Memory of this process that they take."""
        ...


class PixelFiles:
    """`Pixels` in the run directory."""

    num_bytes = 0

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files: dict[int, dict[int, PixelFile]] = {}

    def put(self, request_id: int, index: int, source: PixelFile, frames: Sequence[Any]) -> None:
        self._files.setdefault(request_id, {})[index] = source

    def frames(self, request_id: int, index: int) -> Sequence[Any]:
        return ()

    def file(self, request_id: int, index: int) -> PixelFile:
        return self._files[request_id][index]

    def drop(self, request_id: int) -> None:
        self._files.pop(request_id, None)

    def pixels(self, request_id: int, index: int) -> torch.Tensor:
        source = self._files.get(request_id, {}).get(index)
        if source is None:
            raise LookupError(f"request {request_id}: item {index} has no pixels")
        return read_pixels(self._run_dir, source)


class PixelFrames:
    """`Pixels` that came with messages, in the frames that they came in."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._items: dict[int, dict[int, tuple[PixelFile, Any]]] = {}

    def put(self, request_id: int, index: int, source: PixelFile, frames: Sequence[Any]) -> None:
        (frame,) = frames
        self._items.setdefault(request_id, {})[index] = (source, frame)
        self.num_bytes += memoryview(frame).nbytes

    def file(self, request_id: int, index: int) -> PixelFile:
        return self._items[request_id][index][0]

    def frames(self, request_id: int, index: int) -> Sequence[Any]:
        return (self._items[request_id][index][1],)

    def drop(self, request_id: int) -> None:
        self.num_bytes -= sum(memoryview(frame).nbytes for _, frame in self._items.pop(request_id, {}).values())

    def pixels(self, request_id: int, index: int) -> torch.Tensor:
        item = self._items.get(request_id, {}).get(index)
        if item is None:
            raise LookupError(f"request {request_id}: item {index} has no pixels")
        return view_pixels(item[1], item[0])
