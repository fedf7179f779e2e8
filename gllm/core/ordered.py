"""A set of sequence numbers that is walked in order: the waiting lines of the scheduler."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator


class OrderedIds:
    """Distinct integers, iterated from the smallest. Adding and removing cost a binary search and one memory move."""

    __slots__ = ("_ids", "_members")

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._members: set[int] = set()

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, value: int) -> bool:
        return value in self._members

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __reversed__(self) -> Iterator[int]:
        return reversed(self._ids)

    def walk(self, after: int | None = None) -> Iterator[int]:
        """From the smallest (or from the first above `after`) upwards; members may come and go meanwhile."""
        index = 0 if after is None else bisect_right(self._ids, after)
        while index < len(self._ids):
            value = self._ids[index]
            yield value
            index = bisect_right(self._ids, value)

    def add(self, value: int) -> None:
        """Nothing happens when it is a member."""
        if value not in self._members:
            self._members.add(value)
            if not self._ids or value > self._ids[-1]:
                self._ids.append(value)
            else:
                insort(self._ids, value)

    def remove(self, value: int) -> None:
        """Nothing happens when it is none."""
        if value in self._members:
            self._members.remove(value)
            del self._ids[bisect_left(self._ids, value)]

    def set(self, value: int, present: bool) -> None:
        """Make `value` a member or not, whatever it was."""
        if present:
            self.add(value)
        else:
            self.remove(value)
