"""RServe's state machine: the scheduler with the embedding tracker, Algorithm 1 and Algorithm 2 plugged in.

What happened goes in (`on_*`), what to do next comes out (`next_encode`, `next_batch`). Sans-IO: the engine, the
simulator and the property tests drive this same object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gllm.core.batch import Batch, EncodeBatch, ItemRef
from gllm.core.embeddings import EmbeddingPool, EmbeddingStats
from gllm.core.eventlog import plain
from gllm.core.policy import POLICIES, TokenPolicy
from gllm.core.readiness import ColocatedEncoder
from gllm.core.request import Request
from gllm.core.scheduler import Sampled, Scheduler, SchedulerConfig, Stats
from rserve.config import RServeConfig
from rserve.core.encoder_scheduler import MAX_OUTSTANDING, EncoderScheduler
from rserve.core.token_scheduler import TokenScheduler
from rserve.core.tracker import EmbeddingTracker


class Orchestrator:
    """Encode and prefill of many requests, overlapped."""

    def __init__(self, scheduler: SchedulerConfig, policy: TokenPolicy, config: RServeConfig) -> None:
        self.config = config
        pool = EmbeddingPool(config.embedding_capacity)
        self.tracker = EmbeddingTracker(pool, config.intra_request_overlap, config.encoder_batch_tokens)
        token_scheduler = TokenScheduler(policy, config.inter_request_batching, config.min_chunk_tokens)
        self.scheduler = Scheduler(scheduler, self.tracker, token_scheduler)
        self._encodes = EncoderScheduler(self.tracker, config.encoder_batch_tokens, self.scheduler.is_stuck)

    # ---- events -------------------------------------------------------------------------------------------------

    def on_request(self, request: Request, now: float) -> None:
        """A laid-out prompt arrived. Raises NeverFits (a ValueError) when it could never finish."""
        self.scheduler.on_request(request, now)

    def on_item_ready(self, request_id: int, index: int, now: float) -> None:
        """The pixels of an item are there: it can be encoded."""
        self.scheduler.on_item_ready(request_id, index, now)

    def on_encoded(self, batch_id: int, now: float) -> tuple[ItemRef, ...]:
        """An encode batch is done. Returns the items that are wanted; the others' embeddings can be thrown away."""
        wanted = self._encodes.done(batch_id)
        for request_id in {ref.request_id for ref in wanted}:
            self.scheduler.refresh(request_id)
        return wanted

    def on_encoder_lost(self, encoder_id: int, now: float) -> tuple[ItemRef, ...]:
        """An encoder died and writes no more: its items are encoded again elsewhere, or once it is back. Returns items
        that have cost too many encoders: their requests should be aborted."""
        return self._encodes.lost(encoder_id)

    def on_batch_fed(self, batch_id: int, now: float) -> None:
        """Stage 0 has gathered the embeddings of a micro-batch: they are released."""
        self.scheduler.on_batch_fed(batch_id, now)

    def on_batch_done(self, batch_id: int, tokens: Mapping[int, int], now: float) -> tuple[Sampled, ...]:
        """A micro-batch left the last stage; `tokens` maps each sampled request to its token."""
        return self.scheduler.on_batch_done(batch_id, tokens, now)

    def on_abort(self, request_id: int, now: float) -> None:
        """The request is not wanted any more; an unknown id is ignored."""
        if request_id in self.tracker:
            self.tracker.stop(request_id)
        self.scheduler.on_abort(request_id, now)

    # ---- decisions ----------------------------------------------------------------------------------------------

    def next_encode(self, encoder_id: int, now: float) -> EncodeBatch | None:
        """Algorithm 1: the next items for this encoder, at most two batches at a time.

        Elastic encode: stage 0 asks as encoder number `num_encoders` when `next_batch` gave it nothing. It gets one
        batch, and only while nothing is schedulable, so no decode waits longer than that batch. Meanwhile encoders get
        one batch at a time as well: what they cannot start yet is for stage 0.
        """
        batch, surrendered = self._encodes.next_encode(encoder_id, self._max_outstanding(encoder_id))
        for request_id in surrendered:
            self.scheduler.refresh(request_id)
        return batch

    def _max_outstanding(self, encoder_id: int) -> int:
        stage_is_idle = self.config.elastic_encode and not self.scheduler.has_schedulable
        if encoder_id < self.config.num_encoders:
            return 1 if stage_is_idle else MAX_OUTSTANDING
        return 1 if stage_is_idle else 0

    def next_batch(self, now: float) -> Batch | None:
        """Algorithm 2: the next micro-batch."""
        return self.scheduler.next_batch(now)

    def take_dropped(self, now: float) -> tuple[int, ...]:
        """Requests that stage workers may forget, besides those that batches name."""
        return self.scheduler.take_dropped(now)

    def take_released(self) -> tuple[ItemRef, ...]:
        """Items whose embeddings are not needed any more."""
        return self.tracker.take_released()

    # ---- questions ----------------------------------------------------------------------------------------------

    def tokens(self, request_id: int, start: int, num_tokens: int) -> tuple[int, ...]:
        """Known token ids at positions `start .. start + num_tokens - 1` of a live request."""
        return self.scheduler.tokens(request_id, start, num_tokens)

    def request(self, request_id: int) -> Request:
        """A live request."""
        return self.scheduler.request(request_id)

    def outputs(self, request_id: int) -> tuple[int, ...]:
        """Output tokens so far of a live request."""
        return self.scheduler.outputs(request_id)

    def is_live(self, request_id: int) -> bool:
        """It was admitted, and it or a micro-batch with it is not over."""
        return self.scheduler.is_live(request_id)

    def stats(self) -> Stats:
        return self.scheduler.stats()

    def embedding_stats(self) -> EmbeddingStats:
        return self.tracker.stats()


def build(scheduler: SchedulerConfig, policy: TokenPolicy, config: RServeConfig) -> Orchestrator | Scheduler:
    """The core of any scheme: without a separate encoder it is the baseline scheduler."""
    if config.num_encoders:
        return Orchestrator(scheduler, policy, config)
    return Scheduler(scheduler, ColocatedEncoder(EmbeddingPool(config.embedding_capacity)), policy)


def describe(scheduler: SchedulerConfig, policy: TokenPolicy, config: RServeConfig) -> dict[str, Any]:
    """The first record of an event log: what `rebuild` needs."""
    return {
        "e": "core",
        "scheduler": plain(scheduler),
        "policy": {"name": type(policy).__name__, **plain(policy)},
        "rserve": plain(config),
    }


def rebuild(record: dict[str, Any]) -> Orchestrator | Scheduler:
    """A fresh core as the log's first record describes it."""
    fields = dict(record["policy"])
    policy = POLICIES[fields.pop("name")](**fields)
    return build(SchedulerConfig(**record["scheduler"]), policy, RServeConfig(**record["rserve"]))
