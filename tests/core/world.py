"""A world around a core for property tests: encoders, a pipeline and clients that do things in any order.

It keeps books of its own (positions sent, block tables, embeddings held) and asserts the invariants of every decision.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from gllm.core.batch import Batch, EncodeBatch
from gllm.core.embeddings import EmbeddingPool
from gllm.core.policy import FixedBudget, TokenThrottling
from gllm.core.readiness import ColocatedEncoder
from gllm.core.request import Item, Request
from gllm.core.scheduler import Scheduler, SchedulerConfig
from rserve.config import RServeConfig
from rserve.core.encoder_scheduler import MAX_LOSSES
from rserve.core.orchestrator import Orchestrator

STOP = 7  # the stop token id; output tokens are drawn from 0..9


@dataclass
class Client:
    """What the world knows of one request."""

    request: Request
    pixels_to_come: list[int]
    sent: int = 0
    outputs: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    losses: dict[int, int] = field(default_factory=dict)  # by item: encoders that ended at work on it
    held: set[int] = field(default_factory=set)  # items whose embeddings are in stage 0's memory
    known_to_workers: bool = False
    aborted: bool = False
    finished: bool = False

    @property
    def known(self) -> int:
        return len(self.request.token_ids) + len(self.outputs)


def draw_request(rng: Random, request_id: int, max_prompt: int, max_item: int, max_tokens: int) -> Request:
    """Text and items in random order; at least one token."""
    tokens: list[int] = []
    items: list[Item] = []
    for _ in range(rng.randint(1, 5)):
        if rng.random() < 0.5:
            count = rng.randint(1, max_item)
            if len(tokens) + count > max_prompt:
                break
            items.append(Item(len(tokens), count, (1, 2, 2 * count)))
            tokens += [100] * count
        else:
            count = rng.randint(1, 6)
            tokens += [rng.randint(10, 99) for _ in range(min(count, max_prompt - len(tokens)))]
    if not tokens:
        tokens = [10]
    return Request(request_id, tuple(tokens), tuple(items), max_tokens, 0, frozenset({STOP}))


class World:
    def __init__(self, core: Scheduler | Orchestrator, rng: Random, budget: int, num_encoders: int) -> None:
        self.core = core
        self.has_tracker = isinstance(core, Orchestrator)
        self.rng = rng
        self.budget = budget
        self.scheduler = core.scheduler if isinstance(core, Orchestrator) else core
        self.pool = core.tracker.pool if isinstance(core, Orchestrator) else core._readiness.pool
        self.num_encoders = num_encoders
        self.clients: dict[int, Client] = {}
        self.pipeline: deque[Batch] = deque()
        self.unfed: deque[Batch] = deque()
        self.encoding: list[EncodeBatch] = []
        self.now = 0.0
        self.prefill_order: list[int] = []

    # ---- things that happen -------------------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        self.core.on_request(request, self.tick())
        self.clients[request.request_id] = Client(request, list(range(len(request.items))))

    def pixels(self, client: Client) -> None:
        index = client.pixels_to_come.pop(self.rng.randrange(len(client.pixels_to_come)))
        self.core.on_item_ready(client.request.request_id, index, self.tick())
        self.drain()

    def abort(self, client: Client) -> None:
        client.aborted = True
        self.core.on_abort(client.request.request_id, self.tick())
        self.drain()

    def start_encodes(self) -> bool:
        started = False
        for encoder in self.rng.sample(range(self.num_encoders), self.num_encoders):
            while (batch := self.core.next_encode(encoder, self.tick())) is not None:
                self.encoding.append(batch)
                self.drain()
                self.check_encode(batch)
                started = True
            self.drain()
        return started

    def finish_encode(self) -> None:
        batch = self.encoding.pop(self.rng.randrange(len(self.encoding)))
        wanted = self.core.on_encoded(batch.batch_id, self.tick())
        assert set(wanted) <= set(batch.items)
        for ref in wanted:
            client = self.clients[ref.request_id]
            assert ref.index not in client.held
            client.held.add(ref.index)
        self.drain()

    def lose_encoder(self) -> None:
        encoder = self.rng.randrange(self.num_encoders)
        lost = [batch for batch in self.encoding if batch.encoder_id == encoder]
        self.encoding = [batch for batch in self.encoding if batch.encoder_id != encoder]
        fatal = self.core.on_encoder_lost(encoder, self.tick())
        self.drain()
        expected = set()
        for ref in min(lost, key=lambda batch: batch.batch_id).items if lost else ():
            client = self.clients[ref.request_id]
            if not client.aborted:
                client.losses[ref.index] = client.losses.get(ref.index, 0) + 1
                if client.losses[ref.index] >= MAX_LOSSES:
                    expected.add(ref)
        assert {ref for ref in fatal if not self.clients[ref.request_id].aborted} == expected
        for ref in expected:
            self.abort(self.clients[ref.request_id])
        if lost and self.rng.random() < 0.5:  # a late message about a dead batch
            assert self.core.on_encoded(lost[0].batch_id, self.tick()) == ()

    def start_batch(self) -> bool:
        batch = self.core.next_batch(self.tick())
        self.drain()
        if batch is None:
            return False
        self.check_batch(batch)
        self.pipeline.append(batch)
        self.unfed.append(batch)
        return True

    def feed(self) -> None:
        batch = self.unfed.popleft()
        self.core.on_batch_fed(batch.batch_id, self.tick())
        self.drain()

    def finish_batch(self) -> None:
        batch = self.pipeline.popleft()
        if batch in self.unfed:
            self.unfed.remove(batch)
        tokens = {c.request_id: self.rng.randint(0, 9) for c in batch.chunks if c.sample}
        sampled = self.core.on_batch_done(batch.batch_id, tokens, self.tick())
        wanted = [c.request_id for c in batch.chunks if c.sample and not self.clients[c.request_id].aborted]
        assert [s.request_id for s in sampled] == wanted
        for result in sampled:
            client = self.clients[result.request_id]
            assert result.token_id == tokens[result.request_id]
            client.outputs.append(result.token_id)
            ended = result.token_id == STOP or len(client.outputs) == client.request.max_tokens
            assert (result.finish_reason is not None) == ended
            client.finished = ended
        self.drain()

    # ---- books and checks -----------------------------------------------------------------------------------------

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def drain(self) -> None:
        """Free what the core names as released; check the accounts."""
        if self.has_tracker:
            for ref in self.core.take_released():
                self.clients[ref.request_id].held.remove(ref.index)
            held = sum(
                client.request.items[index].num_tokens for client in self.clients.values() for index in client.held
            )
            at_encoders = sum(batch.num_tokens for batch in self.encoding)
            assert held == self.core.tracker.held
            assert self.pool.used == held + at_encoders <= self.pool.capacity
        assert 0 <= self.pool.used <= self.pool.capacity
        used = self.scheduler.pool.num_used
        assert used + self.scheduler.pool.num_free == self.scheduler.pool.num_blocks
        assert len(set(self.scheduler.pool._free)) == self.scheduler.pool.num_free

    def forget(self, dropped: tuple[int, ...]) -> None:
        """Workers forget these requests."""
        for request_id in dropped:
            self.clients[request_id].table.clear()
            self.clients[request_id].sent = 0

    def check_encode(self, batch: EncodeBatch) -> None:
        assert batch.items
        assert len({ref.request_id for ref in batch.items}) == 1
        client = self.clients[batch.items[0].request_id]
        assert not client.aborted
        indices = [ref.index for ref in batch.items]
        assert indices == sorted(set(indices))
        assert len(batch.items) == 1 or not client.losses.keys() & {*indices}, "an item that cost an encoder goes alone"
        for ref in batch.items:
            assert ref.index not in client.pixels_to_come, "encoded before its pixels were there"
            assert ref.index not in client.held, "encoded while its embeddings are held"

    def check_batch(self, batch: Batch) -> None:
        scheduler = self.scheduler
        assert 1 <= batch.num_tokens <= self.budget
        if not scheduler.config.chunked_pipeline:
            in_pipeline = {chunk.request_id for other in self.pipeline for chunk in other.chunks}
            assert not in_pipeline & {chunk.request_id for chunk in batch.chunks}
        assert len(self.pipeline) < scheduler.config.max_in_flight
        in_flight = {chunk.request_id for other in self.pipeline for chunk in other.chunks}
        assert not in_flight & set(batch.dropped), "blocks freed under a running micro-batch"
        self.forget(batch.dropped)
        for ref in batch.encode:
            client = self.clients[ref.request_id]
            assert not client.pixels_to_come
            client.held.add(ref.index)
        for chunk in batch.chunks:
            self.check_chunk(chunk)
        owners = [block for client in self.clients.values() for block in client.table]
        assert len(owners) == len(set(owners)), "a KV block has two owners"

    def check_chunk(self, chunk) -> None:
        client = self.clients[chunk.request_id]
        assert not client.aborted
        assert not client.finished
        assert chunk.start == client.sent, "a token twice, or out of order"
        end = chunk.start + chunk.num_tokens
        client.sent = end
        assert end <= client.known
        assert chunk.sample == (end == client.known)
        client.table += chunk.new_blocks
        assert len(client.table) == self.scheduler.pool.blocks_for(end)
        covered = []
        for part in chunk.items:
            item = client.request.items[part.index]
            assert part.index in client.held, "prefilled before its embedding was ready"
            assert item.offset + part.start == chunk.start + part.at
            covered += range(chunk.start + part.at, chunk.start + part.at + part.num_tokens)
        expected = [p for item in client.request.items for p in range(item.offset, item.end) if chunk.start <= p < end]
        assert covered == expected
        want = (*client.request.token_ids, *client.outputs)[chunk.start : end]
        assert self.core.tokens(chunk.request_id, chunk.start, chunk.num_tokens) == want

    def live(self) -> list[Client]:
        return [c for c in self.clients.values() if not c.finished and not c.aborted]

    # ---- running --------------------------------------------------------------------------------------------------

    def possible(self, requests: list[Request], faults: bool) -> Iterator[str]:
        """Names of what could happen next."""
        if requests:
            yield "arrive"
        if any(c.pixels_to_come for c in self.live()):
            yield "pixels"
        if self.encoding:
            yield "encoded"
        if self.unfed:
            yield "fed"
        if self.pipeline:
            yield "done"
        if self.num_encoders:
            yield "encode"
        if not self.pipeline:
            yield "dropped"
        yield "batch"
        if faults and self.rng.random() < 0.1:
            if self.live():
                yield "abort"
            if self.num_encoders:
                yield "lost"

    def run(self, requests: list[Request], faults: bool = True, max_steps: int = 20000) -> None:
        """Until every request has finished or was aborted; fails when nothing can go on."""
        waiting = deque(requests)
        for _ in range(max_steps):
            if not waiting and not self.live():
                break
            idle = not self.pipeline and not self.encoding
            choice = self.rng.choice(list(self.possible(waiting, faults)))
            if choice == "arrive":
                self.arrive(waiting.popleft())
            elif choice == "pixels":
                self.pixels(self.rng.choice([c for c in self.live() if c.pixels_to_come]))
            elif choice == "encoded":
                self.finish_encode()
            elif choice == "fed":
                self.feed()
            elif choice == "done":
                self.finish_batch()
            elif choice == "abort":
                self.abort(self.rng.choice(self.live()))
            elif choice == "lost":
                self.lose_encoder()
            elif choice == "encode":
                self.start_encodes()
            elif choice == "batch":
                self.start_batch()
            elif choice == "dropped":
                self.forget(self.core.take_dropped(self.tick()))
            if idle and not waiting and self.live() and not any(c.pixels_to_come for c in self.live()):
                self.check_progress()
        assert not waiting, "the world did not come to an end"
        assert not self.live(), "the world did not come to an end"
        self.finish()

    def check_progress(self) -> None:
        """Nothing is in flight and all pixels are there: something must be able to run."""
        if self.pipeline or self.encoding:
            return
        moved = self.start_batch()
        moved = (self.num_encoders and self.start_encodes()) or moved
        if not moved:  # making room for one may need the other's turn first
            moved = self.start_batch() or (self.num_encoders and self.start_encodes())
        assert moved, "live requests, nothing in flight, and nothing runs"

    def finish(self) -> None:
        while self.pipeline:
            self.finish_batch()
        while self.encoding:
            self.finish_encode()
        self.drain()
        stats = self.core.stats()
        assert (stats.running, stats.waiting, stats.blocks_used, stats.in_flight) == (0, 0, 0, 0)
        assert self.scheduler._committed == 0
        assert self.scheduler._waiting_tokens == 0
        assert self.scheduler._num_decoding == 0
        assert self.pool.used == 0
        if self.has_tracker:
            assert not any(c.held for c in self.clients.values())
            assert not self.core.tracker.holders
            assert not self.core.tracker.encodable


def make_core(
    scheme: str, *, num_blocks: int, block_size: int, max_in_flight: int, budget: int, capacity: int, batch_tokens: int,
    min_chunk: int = 1, encoders: int = 1, max_num_seqs: int = 8, throttling: bool = False,
    chunked_pipeline: bool = True,
) -> Scheduler | Orchestrator:  # fmt: skip
    """A fresh core of one of the paper's schemes."""
    config = SchedulerConfig(
        num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs, max_in_flight=max_in_flight,
        chunked_pipeline=chunked_pipeline,
    )  # fmt: skip
    policy = TokenThrottling(budget, 1 + budget // 8, 4, 0.1, 3) if throttling else FixedBudget(budget)
    if scheme == "gllm":
        return Scheduler(config, ColocatedEncoder(EmbeddingPool(capacity)), policy)
    rserve = RServeConfig(
        num_encoders=encoders,
        encoder_batch_tokens=None if scheme == "gllm-epd" else batch_tokens,
        intra_request_overlap=scheme != "gllm-epd",
        inter_request_batching=scheme != "rserve-intra",
        embedding_capacity=capacity,
        min_chunk_tokens=min_chunk,
    )
    return Orchestrator(config, policy, rserve)
