"""Algorithm 2 (paper, section 4.3): how schedulable tokens of several requests fill a micro-batch.

A token is schedulable when its embedding is ready and every earlier token of its request is prefilled or schedulable.
Each micro-batch has a budget of B tokens; the scheduler walks the queue, first come first served, and each request
gives n = min(its schedulable tokens, what is left of B). A request that is not finished keeps its place at the head;
one with nothing ready is passed over. RServe-intra lacks the packing: a micro-batch holds the prefill of one request.
"""

from __future__ import annotations

from dataclasses import dataclass

from gllm.core.policy import Budget, Load, Offer, TokenPolicy


@dataclass(frozen=True, slots=True)
class TokenScheduler:
    """`base` sets the budget B. `min_chunk_tokens`: a smaller piece of a request is left to grow while more of the
    request is to come (small pieces make small matrix products), unless nothing else could run."""

    base: TokenPolicy
    inter_request_batching: bool = True
    min_chunk_tokens: int = 1

    def budget(self, load: Load) -> Budget:
        return self.base.budget(load)

    def grant(self, offer: Offer, remaining: int) -> int:
        if offer.prefills_before and not self.inter_request_batching:
            return 0
        return self.base.grant(offer, remaining)
