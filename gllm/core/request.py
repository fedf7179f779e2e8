"""What the scheduler knows of a request: token ids, where its items stand, and when it ends. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Item:
    """One multimodal item of a prompt. Its tokens (its span) are `offset .. offset + num_tokens - 1`.

    grid: (t, h, w) in ViT patches, before the 2x2 merge; `num_tokens` = t * h * w / 4 for Qwen2.5-VL.
    """

    offset: int
    num_tokens: int
    grid: tuple[int, int, int]

    @property
    def end(self) -> int:
        return self.offset + self.num_tokens


@dataclass(frozen=True, slots=True)
class Request:
    """A laid-out prompt: every token position is known, the pixels of its items may follow later.

    request_id: never reused. items: ordered by offset, not overlapping. max_tokens: upper bound on output tokens,
    already cut to the context length. stop_token_ids end the output (the token itself is kept), unless fewer than
    `min_tokens` tokens are out.
    """

    request_id: int
    token_ids: tuple[int, ...]
    items: tuple[Item, ...] = ()
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()

    @property
    def num_item_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)
