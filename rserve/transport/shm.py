"""Embeddings through shared memory, on one host: one arena in the run directory, mapped by stage 0 and the encoders.

Stage 0 decides where each item's rows go before an encoder starts on it, so no allocation crosses processes, and an
encoder that dies leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

from rserve.transport.base import Place
from rserve.transport.extents import Extents


def _map(path: Path, num_rows: int, hidden: int, dtype: torch.dtype) -> tuple[mmap.mmap, torch.Tensor]:
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), num_rows * hidden * dtype.itemsize)
    return memory, torch.frombuffer(memory, dtype=dtype).view(num_rows, hidden)


class ShmReceiver:
    """Makes the arena: `num_rows` rows of `hidden` elements. Raises OSError when the memory is not there; it is all
    taken at once, since a page that is missing later would kill the process that touches it."""

    def __init__(self, path: Path, num_rows: int, hidden: int, dtype: torch.dtype) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(fd, 0, num_rows * hidden * dtype.itemsize)
        finally:
            os.close(fd)
        self._path = path
        self._memory, self._rows = _map(path, num_rows, hidden, dtype)
        self._extents = Extents(num_rows)

    @property
    def num_rows_used(self) -> int:
        return self._extents.num_rows - self._extents.num_free

    def allocate(self, num_tokens: int) -> Place:
        return self._extents.allocate(num_tokens)

    def free(self, place: Place) -> None:
        self._extents.free(place)

    def read(self, place: Place, start: int, out: torch.Tensor) -> None:
        at = 0
        for first, count in place:
            skip = min(start, count)
            start -= skip
            taken = min(count - skip, len(out) - at)
            if taken > 0:
                out[at : at + taken].copy_(self._rows[first + skip : first + skip + taken])
                at += taken
        if at < len(out):
            raise ValueError(f"{len(out)} rows asked for, the item has {at} from there on")

    def close(self) -> None:
        del self._rows
        self._memory.close()
        self._path.unlink(missing_ok=True)


class ShmSender:
    """An encoder's view of the arena."""

    def __init__(self, path: Path, num_rows: int, hidden: int, dtype: torch.dtype) -> None:
        self._memory, self._rows = _map(path, num_rows, hidden, dtype)

    def write(self, place: Place, rows: torch.Tensor) -> None:
        if len(rows) != (room := sum(count for _, count in place)):
            raise ValueError(f"{len(rows)} rows for a place of {room}")
        at = 0
        for first, count in place:
            self._rows[first : first + count].copy_(rows[at : at + count])
            at += count

    def close(self) -> None:
        del self._rows
        self._memory.close()
