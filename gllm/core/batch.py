"""The scheduler's answers: what stage workers run (Batch) and what encoders run (EncodeBatch). Values only.

Chunks are made by the dozen for every micro-batch: a named tuple costs a third of a frozen dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ItemRef:
    """One item of one request, by index into `Request.items`."""

    request_id: int
    index: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ItemSlice:
    """Tokens of one item inside a chunk: rows `start .. start + num_tokens - 1` of the item's embeddings go to
    positions `at .. at + num_tokens - 1` of the chunk. Read by stage 0 alone."""

    index: int
    start: int
    num_tokens: int
    at: int


class Chunk(NamedTuple):
    """Consecutive tokens `start .. start + num_tokens - 1` of one request in a micro-batch.

    new_blocks: KV blocks to append to the request's block table before the chunk runs (the table always covers
        `start + num_tokens` tokens afterwards).
    sample: the chunk ends at the last known token, so the next token is sampled from its last position.
    items: the item tokens inside the chunk.
    """

    request_id: int
    start: int
    num_tokens: int
    new_blocks: tuple[int, ...] = ()
    sample: bool = False
    items: tuple[ItemSlice, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch. Workers first forget `dropped`, then (stage 0) encode `encode`, then run the chunks in order.

    dropped: requests that finished, were aborted or preempted since the last batch: their block tables and other
        state are void, and their KV blocks may already belong to other requests of this batch. A dropped request that
        appears again starts anew.
    encode: items that stage 0 encodes itself (co-located encoder), before it gathers embeddings for the chunks.
    """

    batch_id: int
    chunks: tuple[Chunk, ...]
    dropped: tuple[int, ...] = ()
    encode: tuple[ItemRef, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class EncodeBatch:
    """Items for one encoder, all of one request, left to right (Algorithm 1)."""

    batch_id: int
    encoder_id: int
    items: tuple[ItemRef, ...]

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)
