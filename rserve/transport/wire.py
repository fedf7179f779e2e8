"""Embeddings between hosts: rows travel as frames of the message that reports them, raw; stage 0 copies each into an
arena in its own memory.

Nobody but stage 0 writes there, so an encoder that is given up cannot disturb what came after it.
"""

from __future__ import annotations

import torch

from rserve.transport.base import Payload, Place
from rserve.transport.extents import Extents
from rserve.transport.rows import check_fit, read_rows, write_rows


class WireReceiver:
    """`num_rows` rows of `hidden` elements. Raises MemoryError when they cannot be had; pages are taken as they are
    used."""

    def __init__(self, num_rows: int, hidden: int, dtype: torch.dtype) -> None:
        try:
            self._rows = torch.empty(num_rows, hidden, dtype=dtype)
        except RuntimeError as error:
            raise MemoryError(f"{num_rows * hidden * dtype.itemsize:,} bytes") from error
        self._extents = Extents(num_rows)

    @property
    def num_rows_used(self) -> int:
        return self._extents.num_rows - self._extents.num_free

    def allocate(self, num_tokens: int) -> Place:
        return self._extents.allocate(num_tokens)

    def free(self, place: Place) -> None:
        self._extents.free(place)

    def deliver(self, place: Place, payload: Payload) -> None:
        buffer, room = memoryview(payload), sum(count for _, count in place)
        if buffer.nbytes != (wanted := self._rows[0].nbytes * room):
            raise ValueError(f"{buffer.nbytes} bytes came for a place of {wanted}")
        write_rows(self._rows, place, torch.frombuffer(buffer, dtype=self._rows.dtype).view(room, -1))

    def read(self, place: Place, start: int, out: torch.Tensor) -> None:
        read_rows(self._rows, place, start, out)

    def close(self) -> None:
        del self._rows


class WireSender:
    """An encoder's end."""

    def write(self, place: Place, rows: torch.Tensor) -> Payload:
        """The rows' own memory where they are whole and on the CPU; it must not change before it is sent."""
        check_fit(place, rows)
        whole = rows.detach().to("cpu").contiguous()
        return whole.view(torch.uint8).numpy().reshape(-1).data

    def close(self) -> None:
        pass
