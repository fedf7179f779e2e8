"""How the tokens of a micro-batch are spent: the second seam of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Load:
    """What a policy may look at when a micro-batch opens. `num_decodes`: requests whose next token could be computed
    now; `waiting_tokens`: prefill tokens that could be scheduled now or later; blocks are KV blocks."""

    num_decodes: int
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
    """A request in the line for prefill.

    available: its schedulable tokens, at least 1. completes: they reach the last known token.
    prefills_before: requests that already prefill in this micro-batch.
    last_resort: nothing is in flight and no larger piece of work was found, so passing over would idle the stage.
    """

    available: int
    completes: bool
    prefills_before: int
    last_resort: bool


class TokenPolicy(Protocol):
    """Spends the token budget. Stateless: the same load and offers give the same answers."""

    def budget(self, load: Load) -> Budget: ...

    def grant(self, offer: Offer, remaining: int) -> int:
        """Tokens to prefill, at most min(offer.available, remaining); 0 passes the request over."""
        ...


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """Sarathi-style chunked prefill: every micro-batch holds at most `max_tokens` tokens, decodes first."""

    max_tokens: int

    def budget(self, load: Load) -> Budget:
        return Budget(decode=self.max_tokens, prefill=self.max_tokens, total=self.max_tokens)

    def grant(self, offer: Offer, remaining: int) -> int:
        return min(offer.available, remaining)


POLICIES = {"FixedBudget": FixedBudget}  # by class name, as event logs write it
