"""Particular decisions of the baseline scheduler."""

from __future__ import annotations

import time

import pytest

from gllm.core.embeddings import EmbeddingPool
from gllm.core.policy import FixedBudget, TokenThrottling
from gllm.core.readiness import ColocatedEncoder, NeverFits
from gllm.core.request import Item, Request
from gllm.core.scheduler import Sampled, Scheduler, SchedulerConfig


def scheduler(num_blocks=64, block_size=4, budget=16, capacity=100, **config) -> Scheduler:
    config = SchedulerConfig(num_blocks=num_blocks, block_size=block_size, **config)
    return Scheduler(config, ColocatedEncoder(EmbeddingPool(capacity)), FixedBudget(budget))


def text(request_id: int, num_tokens: int, max_tokens: int = 4, **more) -> Request:
    return Request(request_id, tuple(range(10, 10 + num_tokens)), (), max_tokens, **more)


def shape(batch) -> list[tuple[int, int, int]]:
    return [(chunk.request_id, chunk.start, chunk.num_tokens) for chunk in batch.chunks]


def test_a_prompt_is_cut_into_chunks_and_the_last_one_samples():
    core = scheduler(budget=16)
    core.on_request(text(0, 40), 0.0)
    for start, count, sample in [(0, 16, False), (16, 16, False), (32, 8, True)]:
        batch = core.next_batch(0.0)
        assert shape(batch) == [(0, start, count)]
        assert batch.chunks[0].sample == sample
        done = core.on_batch_done(batch.batch_id, {0: 5}, 0.0)
    assert done == (Sampled(0, 5, None),)


def test_decodes_come_first_and_prefill_fills_the_rest():
    core = scheduler(budget=16)
    core.on_request(text(0, 4), 0.0)
    core.on_batch_done(core.next_batch(0.0).batch_id, {0: 5}, 0.0)
    core.on_request(text(1, 40), 0.0)
    assert shape(core.next_batch(0.0)) == [(0, 4, 1), (1, 0, 15)]


def test_consecutive_chunks_of_one_prompt_are_in_flight_together():
    core = scheduler(budget=16, max_in_flight=3)
    core.on_request(text(0, 40), 0.0)
    assert [shape(core.next_batch(0.0)) for _ in range(2)] == [[(0, 0, 16)], [(0, 16, 16)]]
    assert shape(core.next_batch(0.0)) == [(0, 32, 8)]
    assert core.next_batch(0.0) is None


def test_a_stop_token_ends_the_output_but_not_before_min_tokens():
    core = scheduler()
    core.on_request(text(0, 4, max_tokens=9, min_tokens=2, stop_token_ids=frozenset({5})), 0.0)
    reasons = []
    while core.is_live(0):
        reasons += [s.finish_reason for s in core.on_batch_done(core.next_batch(0.0).batch_id, {0: 5}, 0.0)]
    assert reasons == [None, None, "stop"]
    assert core.stats().blocks_used == 0


def test_growing_decodes_preempt_the_youngest_which_starts_again_with_its_output():
    core = scheduler(num_blocks=4, block_size=4, budget=16, max_num_seqs=4)
    core.on_request(text(0, 7, max_tokens=8), 0.0)
    core.on_request(text(1, 7, max_tokens=8), 0.0)
    resumed = []
    while core.is_live(0) or core.is_live(1):
        batch = core.next_batch(0.0)
        resumed += [c for c in batch.chunks if c.request_id == 1 and c.start == 0]
        core.on_batch_done(batch.batch_id, {c.request_id: 5 for c in batch.chunks if c.sample}, 0.0)
    assert core.stats().preemptions >= 1
    assert len(resumed) == 2
    assert resumed[1].num_tokens > 7


def test_a_preempted_decode_counts_as_a_decode_again_once_it_is_prefilled():
    """Token throttling gives decodes a budget by their number."""
    config = SchedulerConfig(num_blocks=3, block_size=1)
    core = Scheduler(config, ColocatedEncoder(EmbeddingPool(8)), TokenThrottling(16, 1, 4, 0.1, 3))
    core.on_request(text(0, 1, max_tokens=3), 0.0)
    core.on_request(text(1, 1, max_tokens=3), 0.0)
    while core.is_live(0) or core.is_live(1):
        batch = core.next_batch(0.0)
        core.on_batch_done(batch.batch_id, {c.request_id: 5 for c in batch.chunks if c.sample}, 0.0)
    assert core.stats().preemptions >= 1


def test_what_can_never_fit_is_refused_at_admission():
    core = scheduler(num_blocks=4, block_size=4, capacity=10)
    with pytest.raises(NeverFits, match="need KV for 17 tokens, the pool holds 16"):
        core.on_request(text(0, 10, max_tokens=8), 0.0)
    core.on_request(text(1, 10, max_tokens=7), 0.0)
    with pytest.raises(NeverFits, match="image 1 has 11 tokens, more than the embedding capacity of 10"):
        core.on_request(Request(2, (0,) * 12, (Item(0, 11, (1, 2, 22)),), 1), 0.0)
    assert not core.is_live(2)


def test_all_items_are_encoded_with_the_first_chunk_once_all_pixels_are_there():
    core = scheduler(budget=4)
    core.on_request(Request(0, (0,) * 10, (Item(1, 4, (1, 2, 8)), Item(5, 4, (1, 2, 8))), 2), 0.0)
    core.on_item_ready(0, 1, 0.0)
    assert core.next_batch(0.0) is None
    core.on_item_ready(0, 0, 0.0)
    batch = core.next_batch(0.0)
    assert [ref.index for ref in batch.encode] == [0, 1]
    assert shape(batch) == [(0, 0, 4)]


def test_the_cost_of_an_iteration_follows_what_is_scheduled_not_what_waits():
    def iteration(waiting: int) -> float:
        core = scheduler(num_blocks=100_000, budget=2048, max_num_seqs=64, capacity=10**9)
        for i in range(64):
            core.on_request(text(i, 8, max_tokens=1000), 0.0)
        for i in range(waiting):
            core.on_request(text(100 + i, 400), 0.0)
        times = []
        for _ in range(60):
            start = time.perf_counter()
            batch = core.next_batch(0.0)
            core.on_batch_done(batch.batch_id, {c.request_id: 5 for c in batch.chunks if c.sample}, 0.0)
            times.append(time.perf_counter() - start)
        return min(times)

    few, many = iteration(500), iteration(10_000)
    assert many < 3 * few


def test_a_decode_without_kv_does_not_keep_an_older_prefill_from_going_on():
    """Under token throttling, a younger decode takes the last block while an older prompt is half prefilled."""
    config = SchedulerConfig(num_blocks=16, block_size=4, max_num_seqs=4)
    core = Scheduler(config, ColocatedEncoder(EmbeddingPool(8)), TokenThrottling(8, 4, 8, 0.05, 8))
    core.on_request(text(0, 40, max_tokens=4), 0.0)
    core.on_request(text(1, 4, max_tokens=50), 0.0)
    for _ in range(400):
        if not core.is_live(0) and not core.is_live(1):
            return
        batch = core.next_batch(0.0)
        core.on_batch_done(batch.batch_id, {c.request_id: 5 for c in batch.chunks if c.sample}, 0.0)
    pytest.fail("the requests did not end")
