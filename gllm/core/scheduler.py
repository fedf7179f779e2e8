"""The scheduler: continuous batching of chunked prefill and decode over paged KV, sans-IO.

There is no prefill phase and no decode phase: a request has known tokens, and the scheduler sends those that were not
sent yet, as far as they are ready. A decode is the special case of one unsent token that was sampled. Events go in
(`on_*`), micro-batches come out (`next_batch`). It owns no clock, socket, tensor or logger.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from gllm.core.batch import Batch, Chunk, ItemRef, ItemSlice
from gllm.core.blocks import BlockPool
from gllm.core.embeddings import EmbeddingStats
from gllm.core.ordered import OrderedIds
from gllm.core.policy import Load, Offer, TokenPolicy
from gllm.core.readiness import NeverFits, Readiness
from gllm.core.request import Item, Request

MAX_PASSED_OVER = 32  # requests with nothing to do now that a micro-batch looks at before it gives up on starting more


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """num_blocks, block_size: the KV pool. max_num_seqs: requests that hold KV at once. max_in_flight: micro-batches
    that may be in the pipeline (pp). chunked_pipeline: consecutive chunks of one request may be in it together (CPP);
    False is vanilla pipeline parallelism: a chunk waits until the one before has left the last stage."""

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 128
    max_in_flight: int = 1
    chunked_pipeline: bool = True

    @property
    def num_kv_tokens(self) -> int:
        return self.num_blocks * self.block_size


class Sampled(NamedTuple):
    """A new output token of a request. finish_reason: "stop" (a stop token), "length" (max_tokens), or None."""

    request_id: int
    token_id: int
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts at one moment. running: requests that hold KV; waiting: the others."""

    waiting: int
    running: int
    in_flight: int
    blocks_used: int
    blocks_total: int
    preemptions: int


class _State:
    """A live request. `sent`: tokens handed to workers, `in_flight`: its chunks that have not come back."""

    __slots__ = (
        "aborted", "blocks", "decoding", "first_item", "in_flight", "known", "line", "outputs", "ready_end", "request",
        "sent", "seq",
    )  # fmt: skip

    def __init__(self, request: Request, seq: int) -> None:
        self.request = request
        self.seq = seq
        self.outputs: list[int] = []
        self.known = len(request.token_ids)
        self.sent = 0
        self.in_flight = 0
        self.blocks: list[int] = []
        self.ready_end = 0
        self.first_item = 0  # items before this index lie wholly before `sent`
        self.aborted = False
        self.decoding = False  # its last known token is a sampled one, and all before are sent
        self.line: OrderedIds | None = None  # where it waits for its turn


class Scheduler:
    """Complete alone (the baseline engine). `readiness` says how far a request may be prefilled, `policy` how the
    token budget is spent. Requests are served first come first served; a request with nothing ready is passed over."""

    def __init__(self, config: SchedulerConfig, readiness: Readiness, policy: TokenPolicy) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self._readiness = readiness
        self._policy = policy
        self._states: dict[int, _State] = {}
        self._by_seq: dict[int, _State] = {}
        self._in_flight: dict[int, tuple[Chunk, ...]] = {}
        self._unfed: set[int] = set()
        self._prefills = OrderedIds()  # seq of requests with schedulable tokens that are not decodes
        self._small = OrderedIds()  # those whose schedulable tokens are too few for a chunk, with more to come
        self._decodes = OrderedIds()  # seq of requests whose sampled token can be fed back
        self._running = OrderedIds()  # seq of requests that hold KV blocks
        self._dropped: list[int] = []
        self._committed = 0  # blocks that running requests still need for the tokens they know
        self._waiting_tokens = 0
        self._num_decoding = 0
        self._starved_from: int | None = None
        self._preemptions = 0
        self._num_requests = 0
        self._num_batches = 0

    # ---- events -------------------------------------------------------------------------------------------------

    def on_request(self, request: Request, now: float) -> None:
        """A request was admitted. Raises NeverFits when it could not finish even alone, ValueError when it is void."""
        if request.request_id in self._states:
            raise ValueError(f"request id {request.request_id} is in use")
        if not request.token_ids or request.max_tokens < 1:
            raise ValueError("a request needs at least one prompt token and one output token")
        num_tokens = len(request.token_ids) + request.max_tokens - 1  # the last output token is never fed back
        if num_tokens > self.config.num_kv_tokens:
            raise NeverFits(
                f"prompt and output need KV for {num_tokens} tokens, the pool holds {self.config.num_kv_tokens}"
            )
        self._readiness.add(request, self._num_requests)
        state = _State(request, self._num_requests)
        self._num_requests += 1
        self._states[request.request_id] = state
        self._by_seq[state.seq] = state
        self._waiting_tokens += state.known
        self.refresh(request.request_id)

    def on_item_ready(self, request_id: int, index: int, now: float) -> None:
        """The pixels of an item are there. Ignored when the request is gone."""
        if request_id in self._states:
            self._readiness.pixels_ready(request_id, index)
            self.refresh(request_id)

    def on_batch_fed(self, batch_id: int, now: float) -> None:
        """Stage 0 has gathered the embeddings of this micro-batch."""
        if batch_id in self._unfed:
            self._unfed.remove(batch_id)
            for chunk in self._in_flight[batch_id]:
                self._readiness.fed(chunk.request_id, chunk.start + chunk.num_tokens)

    def on_batch_done(self, batch_id: int, tokens: Mapping[int, int], now: float) -> tuple[Sampled, ...]:
        """A micro-batch left the last stage; `tokens` maps each sampled request to its token. Tokens of requests that
        were aborted meanwhile are dropped."""
        self.on_batch_fed(batch_id, now)
        sampled = []
        for chunk in self._in_flight.pop(batch_id):
            state = self._states[chunk.request_id]
            state.in_flight -= 1
            if state.aborted:
                if not state.in_flight:
                    self._remove(state)
            elif chunk.sample:
                result = self._append(state, tokens[chunk.request_id])
                sampled.append(result)
                if result.finish_reason:
                    self._remove(state)
                else:
                    self._index(state)
            elif not self.config.chunked_pipeline:
                self._index(state)
        return tuple(sampled)

    def on_abort(self, request_id: int, now: float) -> None:
        """The client left, or a stop string ended the output. Its memory is released at once, or, while micro-batches
        with it are in flight, when they have come back. An unknown id is ignored: the request is gone already."""
        state = self._states.get(request_id)
        if state is None or state.aborted:
            return
        state.aborted = True
        self._index(state)
        if not state.in_flight:
            self._remove(state)

    def refresh(self, request_id: int) -> None:
        """The readiness of this request may have changed."""
        state = self._states.get(request_id)
        if state is not None and not state.aborted:
            self._refresh(state)

    # ---- decisions ----------------------------------------------------------------------------------------------

    def next_batch(self, now: float) -> Batch | None:
        """The next micro-batch, or None while nothing can run or `max_in_flight` are in the pipeline."""
        if len(self._in_flight) >= self.config.max_in_flight:
            return None
        load = self._load()
        budget = self._policy.budget(load)
        self._starved_from = None
        chunks: list[Chunk] = []
        encode: list[ItemRef] = []
        self._add_decodes(chunks, min(budget.decode, budget.total))
        self._add_prefills(chunks, encode, min(budget.prefill, budget.total - len(chunks)), self._prefills)
        if not chunks and not self._in_flight:
            # No decode got KV: only a prefill can go on, so it gets what it would get if there were none; and nothing
            # else could run, so small pieces are taken too.
            budget = self._policy.budget(replace(load, num_running_decodes=0))
            for line in (self._prefills, self._small):
                if not chunks:
                    self._add_prefills(chunks, encode, budget.prefill, line)
        if not chunks:
            return None
        batch = Batch(self._num_batches, tuple(chunks), self.take_dropped(now), tuple(encode))
        self._num_batches += 1
        self._in_flight[batch.batch_id] = batch.chunks
        self._unfed.add(batch.batch_id)
        return batch

    def take_dropped(self, now: float) -> tuple[int, ...]:
        """Requests that workers may forget; each is named once, here or in `Batch.dropped`."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    # ---- questions ----------------------------------------------------------------------------------------------

    @property
    def has_schedulable(self) -> bool:
        """Some token could be scheduled now, were there room in the pipeline, in the budget and in the KV pool."""
        return bool(self._decodes) or bool(self._prefills) or bool(self._small)

    def is_live(self, request_id: int) -> bool:
        return request_id in self._states

    def outputs(self, request_id: int) -> tuple[int, ...]:
        """Output tokens so far of a live request."""
        return tuple(self._states[request_id].outputs)

    def tokens(self, request_id: int, start: int, num_tokens: int) -> tuple[int, ...]:
        """Known token ids at positions `start .. start + num_tokens - 1` of a live request."""
        state = self._states[request_id]
        prompt = state.request.token_ids
        if start >= len(prompt):
            return tuple(state.outputs[start - len(prompt) : start - len(prompt) + num_tokens])
        head = prompt[start : start + num_tokens]
        return head + tuple(state.outputs[: num_tokens - len(head)])

    def request(self, request_id: int) -> Request:
        return self._states[request_id].request

    def is_stuck(self, request_id: int) -> bool:
        """Nothing of this request is in flight or at an encoder, and none of it can be scheduled: it waits for its
        client's pixels, or for another request to make room."""
        state = self._states[request_id]
        if state.in_flight or state.line is self._decodes or self._readiness.is_coming(request_id):
            return False
        if state.line is None:
            return True
        return not state.blocks and self._starved_from is not None and state.seq >= self._starved_from

    def stats(self) -> Stats:
        return Stats(
            waiting=len(self._states) - len(self._running),
            running=len(self._running),
            in_flight=len(self._in_flight),
            blocks_used=self.pool.num_used,
            blocks_total=self.pool.num_blocks,
            preemptions=self._preemptions,
        )

    def embedding_stats(self) -> EmbeddingStats:
        return self._readiness.stats()

    # ---- choosing chunks ----------------------------------------------------------------------------------------

    def _load(self) -> Load:
        return Load(
            num_running_decodes=self._num_decoding,
            num_in_flight=len(self._in_flight),
            waiting_tokens=self._waiting_tokens - len(self._decodes),
            free_blocks=self.pool.num_free,
            total_blocks=self.pool.num_blocks,
            block_size=self.pool.block_size,
            max_in_flight=self.config.max_in_flight,
        )

    def _add_decodes(self, chunks: list[Chunk], budget: int) -> None:
        for seq in list(self._decodes)[:budget]:
            state = self._by_seq[seq]
            # Making room for an older request may have preempted this one.
            if state.line is self._decodes and self._fit_kv(state, 1):
                chunks.append(self._send(state, 1))

    def _add_prefills(self, chunks: list[Chunk], encode: list[ItemRef], budget: int, line: OrderedIds) -> None:
        prefills = passed_over = 0
        walk = line.walk()
        while budget > 0 and (seq := next(walk, None)) is not None:
            state = self._by_seq[seq]
            wanted = self._wanted(state, budget, prefills)
            num_tokens = self._fit_kv(state, wanted) if wanted else 0
            if num_tokens:
                encode.extend(self._readiness.take(state.request.request_id, state.sent, state.sent + num_tokens))
                chunks.append(self._send(state, num_tokens))
                budget -= num_tokens
                prefills += 1
                continue
            passed_over += 1
            starved = bool(wanted) and not state.blocks
            if (starved or passed_over == MAX_PASSED_OVER) and self._starved_from is None:
                # First come first served: nobody behind may start before who waits for KV; and a long line of requests
                # with nothing to do now is not walked to its end. Those that hold KV already go on.
                self._starved_from = seq if starved else None
                walk = self._started(seq, line)

    def _wanted(self, state: _State, budget: int, prefills_before: int) -> int:
        """Tokens that the policy wants of this request; 0 passes it over."""
        end = self._readiness.room_end(state.request.request_id, state.ready_end)
        available = end - state.sent
        if available <= 0:
            return 0
        return self._policy.grant(Offer(available, prefills_before), budget)

    def _started(self, after: int, line: OrderedIds) -> Iterator[int]:
        return (seq for seq in self._running.walk(after) if self._by_seq[seq].line is line)

    def _send(self, state: _State, num_tokens: int) -> Chunk:
        start, end = state.sent, state.sent + num_tokens
        need = self.pool.blocks_for(end) - len(state.blocks)
        new_blocks = self.pool.allocate(need) if need > 0 else ()
        if new_blocks:
            if not state.blocks:
                self._running.set(state.seq, True)
                self._committed += self.pool.blocks_for(state.known)
            state.blocks.extend(new_blocks)
            self._committed -= len(new_blocks)
        state.sent = end
        state.in_flight += 1
        self._waiting_tokens -= num_tokens
        chunk = Chunk(
            state.request.request_id, start, num_tokens, new_blocks, end == state.known, self._slices(state, start, end)
        )
        self._index(state)
        return chunk

    def _slices(self, state: _State, start: int, end: int) -> tuple[ItemSlice, ...]:
        items = state.request.items
        if state.first_item == len(items):
            return ()
        slices = []
        while state.first_item < len(items):
            item = items[state.first_item]
            if item.offset >= end:
                break
            slices.append(_overlap(state.first_item, item, start, end))
            if item.end > end:
                break
            state.first_item += 1
        return tuple(slices)

    # ---- KV memory ----------------------------------------------------------------------------------------------

    def _fit_kv(self, state: _State, num_tokens: int) -> int:
        """How many of the next `num_tokens` tokens get KV: all, fewer, or 0. Younger requests may be preempted."""
        if not state.blocks:
            while not self._may_start(state):
                if not (self._preempt_younger(state.seq, only_stuck=True) or self._preempt_waiting(state)):
                    return 0
        need = self.pool.blocks_for(state.sent + num_tokens) - len(state.blocks)
        while need > self.pool.num_free and (self._preempt_younger(state.seq) or self._preempt_waiting(state)):
            pass
        if need <= self.pool.num_free:
            return num_tokens
        room = (len(state.blocks) + self.pool.num_free) * self.pool.block_size - state.sent
        return max(0, min(num_tokens, room))

    def _may_start(self, state: _State) -> bool:
        """A request starts only if all its known tokens fit beside what the running ones still need: prefills never
        push each other out; only growing decodes preempt, and older requests those that are stuck."""
        if len(self._running) >= self.config.max_num_seqs:
            return False
        return self.pool.blocks_for(state.known) <= self.pool.num_free - self._committed

    def _preempt_younger(self, seq: int, only_stuck: bool = False) -> bool:
        """Free the KV of the youngest running request behind `seq` that is not in flight (and is stuck)."""
        for victim_seq in reversed(self._running):
            if victim_seq <= seq:
                return False
            victim = self._by_seq[victim_seq]
            if not victim.in_flight and (not only_stuck or self.is_stuck(victim.request.request_id)):
                self._preempt(victim)
                return True
        return False

    def _preempt_waiting(self, state: _State) -> bool:
        """Free the KV of a request, older or younger, that has nothing to do until its client's pixels come: it has
        little to lose, and may wait for long. Only for a request that needs nothing more itself, or two that wait would
        push each other out for ever."""
        if state.ready_end < state.known:
            return False
        for seq in reversed(self._running):
            other = self._by_seq[seq]
            idle = not other.in_flight and other.line is None and other is not state
            if idle and self._readiness.waits_for_pixels(other.request.request_id):
                self._preempt(other)
                return True
        return False

    def _preempt(self, state: _State) -> None:
        self._preemptions += 1
        self._free_blocks(state)
        self._waiting_tokens += state.sent
        state.sent = 0
        state.first_item = 0
        self._readiness.reset(state.request.request_id)
        self._refresh(state)

    def _free_blocks(self, state: _State) -> None:
        if state.decoding:
            state.decoding = False
            self._num_decoding -= 1
        if state.blocks:
            self._committed -= max(0, self.pool.blocks_for(state.known) - len(state.blocks))
            self.pool.release(state.blocks)
            state.blocks.clear()
            self._running.set(state.seq, False)
            self._dropped.append(state.request.request_id)

    # ---- bookkeeping --------------------------------------------------------------------------------------------

    def _append(self, state: _State, token_id: int) -> Sampled:
        request = state.request
        state.outputs.append(token_id)
        if state.blocks and state.known % self.pool.block_size == 0:
            self._committed += 1  # the new token begins a block
        if state.ready_end == state.known:
            state.ready_end += 1
        state.known += 1
        self._waiting_tokens += 1
        count = len(state.outputs)
        reason = None
        if token_id in request.stop_token_ids and count > request.min_tokens:
            reason = "stop"
        elif count >= request.max_tokens:
            reason = "length"
        return Sampled(request.request_id, token_id, reason)

    def _remove(self, state: _State) -> None:
        self._free_blocks(state)
        self._readiness.remove(state.request.request_id)
        if state.line is not None:
            state.line.remove(state.seq)
        self._waiting_tokens -= state.known - state.sent
        del self._states[state.request.request_id]
        del self._by_seq[state.seq]

    def _refresh(self, state: _State) -> None:
        state.ready_end = self._readiness.ready_end(state.request.request_id, state.known)
        self._index(state)

    def _index(self, state: _State) -> None:
        """Put the request into the line it belongs to now."""
        line = None
        if state.sent < state.ready_end and not state.aborted and (self.config.chunked_pipeline or not state.in_flight):
            if state.sent == state.known - 1 and state.outputs:
                line = self._decodes
            elif state.ready_end < state.known and state.ready_end - state.sent < self._policy.min_chunk_tokens:
                line = self._small
            else:
                line = self._prefills
        if line is self._decodes and not state.decoding:
            state.decoding = True
            self._num_decoding += 1
        if line is not state.line:
            if state.line is not None:
                state.line.remove(state.seq)
            if line is not None:
                line.add(state.seq)
            state.line = line


def _overlap(index: int, item: Item, start: int, end: int) -> ItemSlice:
    first = max(item.offset, start)
    return ItemSlice(index, first - item.offset, min(item.end, end) - first, first - start)
