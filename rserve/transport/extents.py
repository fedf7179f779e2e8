"""Which rows of an arena are free. An item may be split over several pieces, so room is never lost to fragmentation."""

from __future__ import annotations

from bisect import bisect_left, insort

from rserve.transport.base import Place


class Extents:
    """`num_rows` rows; free + allocated = total, always. Pieces are handed out first fit, whole where possible."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.num_free = num_rows
        self._free: list[tuple[int, int]] = [(0, num_rows)]  # (start, count), by start, never adjacent

    def allocate(self, count: int) -> Place:
        """Raises ValueError when fewer rows are free."""
        if not 0 < count <= self.num_free:
            raise ValueError(f"{count} rows wanted, {self.num_free} free")
        whole = next((piece for piece in self._free if piece[1] >= count), None)
        pieces = [(whole[0], count)] if whole else self._first_pieces(count)
        for start, length in pieces:
            self._cut(start, length)
        self.num_free -= count
        return tuple(pieces)

    def free(self, place: Place) -> None:
        """Raises ValueError when a row of it is free already."""
        for start, length in place:
            self._join(start, length)
            self.num_free += length

    def _first_pieces(self, count: int) -> list[tuple[int, int]]:
        pieces = []
        for start, length in self._free:
            taken = min(length, count)
            pieces.append((start, taken))
            count -= taken
            if not count:
                break
        return pieces

    def _cut(self, start: int, length: int) -> None:
        index = bisect_left(self._free, (start,))
        free_start, free_length = self._free.pop(index)
        assert free_start == start
        if free_length > length:
            insort(self._free, (start + length, free_length - length))

    def _join(self, start: int, length: int) -> None:
        index = bisect_left(self._free, (start,))
        before = self._free[index - 1] if index else None
        after = self._free[index] if index < len(self._free) else None
        overlaps_before = before is not None and sum(before) > start
        if overlaps_before or (after is not None and start + length > after[0]) or start + length > self.num_rows:
            raise ValueError(f"rows {start} to {start + length - 1} are not allocated")
        if after is not None and start + length == after[0]:
            length += self._free.pop(index)[1]
        if before is not None and sum(before) == start:
            start, length = before[0], before[1] + length
            self._free.pop(index - 1)
        insort(self._free, (start, length))
