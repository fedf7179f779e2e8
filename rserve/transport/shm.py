"""Embeddings through shared memory, on one host: one arena in the run directory, mapped by stage 0 and the encoders.

Stage 0 decides where each item's rows go before an encoder starts on it, so no allocation crosses processes, and an
encoder that dies leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

from rserve.transport.base import Payload, Place
from rserve.transport.extents import Extents
from rserve.transport.rows import read_rows, write_rows

ARENA = "embeddings"  # the file of the run directory that holds them


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

    def deliver(self, place: Place, payload: Payload) -> None:
        if payload is not None:
            raise ValueError("an encoder sent rows that belong into shared memory")

    def read(self, place: Place, start: int, out: torch.Tensor) -> None:
        read_rows(self._rows, place, start, out)

    def close(self) -> None:
        del self._rows
        self._memory.close()
        self._path.unlink(missing_ok=True)


class ShmSender:
    """An encoder's view of the arena."""

    def __init__(self, path: Path, num_rows: int, hidden: int, dtype: torch.dtype) -> None:
        self._memory, self._rows = _map(path, num_rows, hidden, dtype)

    def write(self, place: Place, rows: torch.Tensor) -> Payload:
        write_rows(self._rows, place, rows)
        return None

    def close(self) -> None:
        del self._rows
        self._memory.close()
