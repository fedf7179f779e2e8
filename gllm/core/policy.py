"""How the tokens of a micro-batch are spent: the second seam of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Load:
    """What a policy may look at when a micro-batch opens. `num_running_decodes`: requests that are past their prompt,
    in flight or not; `num_in_flight`: micro-batches in the pipeline; `waiting_tokens`: prefill tokens that could be
    scheduled now or later; blocks are KV blocks."""

    num_running_decodes: int
    num_in_flight: int
    waiting_tokens: int
    free_blocks: int
    total_blocks: int
    block_size: int
    max_in_flight: int


@dataclass(frozen=True, slots=True)
class Budget:
    """The most tokens that a micro-batch may spend on decodes, on prefill, and in total."""

    decode: int
    prefill: int
    total: int


@dataclass(frozen=True, slots=True)
class Offer:
    """A request in the line for prefill. available: its schedulable tokens, at least 1. prefills_before: requests that
    already prefill in this micro-batch."""

    available: int
    prefills_before: int


class TokenPolicy(Protocol):
    """Spends the token budget. Stateless: the same load and offers give the same answers."""

    @property
    def min_chunk_tokens(self) -> int:
        """Fewer schedulable tokens of a request are left to grow while more of it is to come, unless nothing else could
        run."""
        ...

    def budget(self, load: Load) -> Budget: ...

    def grant(self, offer: Offer, remaining: int) -> int:
        """Tokens to prefill, at most min(offer.available, remaining); 0 passes the request over."""
        ...


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """Sarathi-style chunked prefill: every micro-batch holds at most `max_tokens` tokens, decodes (at most
    `max_decodes`) first."""

    max_tokens: int
    max_decodes: int = 1 << 30
    min_chunk_tokens: int = 1

    def budget(self, load: Load) -> Budget:
        return Budget(decode=min(self.max_decodes, self.max_tokens), prefill=self.max_tokens, total=self.max_tokens)

    def grant(self, offer: Offer, remaining: int) -> int:
        return min(offer.available, remaining)


@dataclass(frozen=True, slots=True)
class TokenThrottling:
    """gLLM's policy (arXiv 2504.14775): micro-batches of even size, so that a pipeline has fewer bubbles.

    Prefill: the waiting tokens are spread over `num_iterations` micro-batches, between `min_prefill` and `max_prefill`
    tokens, fewer as free KV falls towards the share `kv_threshold`, none below it. Decode: the running decodes are
    spread evenly over the micro-batches of the pipeline, at most `max_decodes` in each.
    """

    max_prefill: int
    min_prefill: int = 32
    num_iterations: int = 8
    kv_threshold: float = 0.05
    max_decodes: int = 512
    min_chunk_tokens: int = 1

    def budget(self, load: Load) -> Budget:
        decode = min(-(-load.num_running_decodes // load.max_in_flight), self.max_decodes)
        free = load.free_blocks / load.total_blocks
        by_memory = round(self.max_prefill * max(0.0, (free - self.kv_threshold) / (1.0 - self.kv_threshold)))
        by_waiting = max(load.waiting_tokens // self.num_iterations, self.min_prefill)
        spare_blocks = load.free_blocks - int(self.kv_threshold * load.total_blocks)
        prefill = min(by_waiting, by_memory, max(0, spare_blocks) * load.block_size)
        if not load.num_running_decodes and not load.num_in_flight:
            prefill = max(prefill, self.min_prefill)  # nothing else would ever free KV
        return Budget(decode=decode, prefill=prefill, total=decode + prefill)

    def grant(self, offer: Offer, remaining: int) -> int:
        return min(offer.available, remaining)


POLICIES = {policy.__name__: policy for policy in (FixedBudget, TokenThrottling)}  # as event logs name them
