"""What Qwen2.5-VL adds to its two halves (qwen2, qwen2_5_vit): the 3-D positions of a prompt with images in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class PlacedItem(Protocol):
    """An item's span in the prompt and its grid (t, h, w) in patches (`gllm.core.request.Item`)."""

    @property
    def offset(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def grid(self) -> tuple[int, int, int]: ...


class PositionTable:
    """M-RoPE positions of one request, for any range of its tokens, output tokens included.

    Text counts on by one along all three axes. A token of an item stands at its own frame, row and column, counted
    from where the item begins; the text after it goes on past the item's longest side.
    """

    def __init__(self, items: Sequence[PlacedItem], merge_size: int = 2) -> None:
        self.end = 0  # tokens from here on are text at token index + self.delta
        self.delta = 0
        starts, ends, deltas, rows, cols = [0], [0], [0], [1], [1]
        for item in items:
            frames, height, width = item.grid
            height, width = height // merge_size, width // merge_size
            starts.append(item.offset)
            ends.append(item.offset + item.num_tokens)
            deltas.append(self.delta)
            rows.append(height)
            cols.append(width)
            self.end = item.offset + item.num_tokens
            self.delta += max(frames, height, width) - item.num_tokens
        self._starts, self._ends = np.array(starts), np.array(ends)
        self._deltas = np.array([*deltas, self.delta])
        self._rows, self._cols = np.array(rows), np.array(cols)

    def positions(self, start: int, num_tokens: int) -> np.ndarray:
        """int64 [3, num_tokens]: (t, h, w) of tokens `start .. start + num_tokens - 1`."""
        token = np.arange(start, start + num_tokens, dtype=np.int64)
        if start >= self.end:
            return np.broadcast_to(token + self.delta, (3, num_tokens))
        # Entry 0 is an empty item before everything, so that every token has a last item that began at or before it.
        item = np.searchsorted(self._starts[1:], token, side="right")
        inside = token < self._ends[item]
        delta = np.where(inside, self._deltas[item], self._deltas[item + 1])
        within = np.where(inside, token - self._starts[item], 0)
        rest, col = np.divmod(within, self._cols[item])
        frame, row = np.divmod(rest, self._rows[item])
        begin = np.where(inside, self._starts[item], token) + delta
        return begin + np.stack([frame, row, col])


def mrope_positions(items: Sequence[PlacedItem], start: int, num_tokens: int, merge_size: int = 2) -> np.ndarray:
    """int64 [3, num_tokens]: positions of a range of a request; keep a `PositionTable` to ask more than once."""
    return PositionTable(items, merge_size).positions(start, num_tokens)
