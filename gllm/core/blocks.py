"""Paged KV accounting: which blocks are free. The blocks' contents live in the workers."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """`num_blocks` KV blocks of `block_size` tokens each. free + allocated = total, always."""

    __slots__ = ("_free", "block_size", "num_blocks")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: the block released last is handed out first, while it is still warm in the caches.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` blocks. Raises ValueError when fewer are free: callers look at `num_free` first."""
        if count > len(self._free):
            raise ValueError(f"{count} KV blocks wanted, {len(self._free)} free")
        return tuple(self._free.pop() for _ in range(count))

    def release(self, blocks: Iterable[int]) -> None:
        self._free.extend(blocks)
