"""vLLM 0.10's own rules, as a core that the simulator drives beside ours: the baselines vllm-tp4 and vllm-pp4.

Taken over (vllm/v1/core/sched/scheduler.py and encoder_cache_manager.py of release 0.10; behaviour only):
* an item is encoded on the LLM's devices in the step whose tokens reach into it, not before;
* a step encodes items only within a compute budget, and only into free room of the encoder cache; a chunk ends before
  the first item that has neither. Both are the token budget or the largest item, whichever is larger;
* a cached item is freed once its tokens are computed;
* a request enters the queue with all its items preprocessed;
* first come first served, decodes before prefill, chunked prefill under one token budget; the next chunk of a prompt
  may be scheduled while the previous one is still in the pipeline, with one batch per stage in flight.
Left to `gllm.core.Scheduler`, whose rules are the same here: the queue, chunking and KV accounting. Not modelled:
prefix caching (off in the paper), structured output, LoRA, CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Mapping

from gllm.core.batch import Batch, ItemRef
from gllm.core.embeddings import EmbeddingPool, EmbeddingStats
from gllm.core.policy import FixedBudget
from gllm.core.readiness import check_items_fit
from gllm.core.request import Request
from gllm.core.scheduler import Sampled, Scheduler, SchedulerConfig, Stats


class _Progress:
    """Items of one request, left to right: `missing` pixels to come, `encoded` and `freed` so far."""

    __slots__ = ("encoded", "freed", "missing", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.missing = set(range(len(request.items)))
        self.encoded = 0
        self.freed = 0


class EncoderCache:
    """Readiness by vLLM's rules (gllm.core.readiness.Readiness). `open_step` renews the compute budget."""

    def __init__(self, capacity: int, compute_budget: int) -> None:
        self.pool = EmbeddingPool(capacity)
        self._compute_budget = compute_budget
        self._left = compute_budget
        self._requests: dict[int, _Progress] = {}

    def open_step(self) -> None:
        self._left = self._compute_budget

    def add(self, request: Request, seq: int) -> None:
        check_items_fit(request, min(self.pool.capacity, self._compute_budget))
        self._requests[request.request_id] = _Progress(request)

    def pixels_ready(self, request_id: int, index: int) -> None:
        self._requests[request_id].missing.discard(index)

    def ready_end(self, request_id: int, num_tokens: int) -> int:
        return 0 if self._requests[request_id].missing else num_tokens

    def is_coming(self, request_id: int) -> bool:
        return False

    def room_end(self, request_id: int, end: int) -> int:
        progress = self._requests[request_id]
        room = min(self._left, self.pool.capacity - self.pool.used)
        for item in progress.request.items[progress.encoded :]:
            if item.offset >= end:
                break
            room -= item.num_tokens
            if room < 0:
                return item.offset
        return end

    def take(self, request_id: int, start: int, end: int) -> tuple[ItemRef, ...]:
        progress = self._requests[request_id]
        taken = []
        items = progress.request.items
        while progress.encoded < len(items) and items[progress.encoded].offset < end:
            num_tokens = items[progress.encoded].num_tokens
            self.pool.reserve(num_tokens)
            self._left -= num_tokens
            taken.append(ItemRef(request_id, progress.encoded, num_tokens))
            progress.encoded += 1
        return tuple(taken)

    def fed(self, request_id: int, end: int) -> None:
        progress = self._requests[request_id]
        items = progress.request.items
        while progress.freed < progress.encoded and items[progress.freed].end <= end:
            self.pool.release(items[progress.freed].num_tokens)
            progress.freed += 1

    def reset(self, request_id: int) -> None:
        progress = self._requests[request_id]
        for item in progress.request.items[progress.freed : progress.encoded]:
            self.pool.release(item.num_tokens)
        progress.encoded = progress.freed = 0

    def remove(self, request_id: int) -> None:
        self.reset(request_id)
        del self._requests[request_id]

    def stats(self) -> EmbeddingStats:
        return EmbeddingStats(self.pool.used, self.pool.peak, 0, self.pool.capacity)


class VllmScheduler:
    """The calls of a core. `max_item_tokens`: the largest item that the model's processor can make."""

    def __init__(self, config: SchedulerConfig, token_budget: int, max_item_tokens: int) -> None:
        limit = max(token_budget, max_item_tokens)
        self._cache = EncoderCache(limit, limit)
        self._scheduler = Scheduler(config, self._cache, FixedBudget(token_budget))

    def on_request(self, request: Request, now: float) -> None:
        self._scheduler.on_request(request, now)

    def on_item_ready(self, request_id: int, index: int, now: float) -> None:
        self._scheduler.on_item_ready(request_id, index, now)

    def on_batch_fed(self, batch_id: int, now: float) -> None:
        self._scheduler.on_batch_fed(batch_id, now)

    def on_batch_done(self, batch_id: int, tokens: Mapping[int, int], now: float) -> tuple[Sampled, ...]:
        return self._scheduler.on_batch_done(batch_id, tokens, now)

    def next_batch(self, now: float) -> Batch | None:
        self._cache.open_step()
        return self._scheduler.next_batch(now)

    def stats(self) -> Stats:
        return self._scheduler.stats()
