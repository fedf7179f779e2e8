"""Particular decisions of the orchestrator."""

from __future__ import annotations

import time

import pytest

from gllm.core.policy import FixedBudget
from gllm.core.request import Item, Request
from gllm.core.scheduler import SchedulerConfig
from rserve.config import RServeConfig
from rserve.core.encoder_scheduler import MAX_LOSSES
from rserve.core.orchestrator import Orchestrator


def orchestrator(num_blocks=64, max_num_seqs=4, **config) -> Orchestrator:
    scheduler = SchedulerConfig(num_blocks=num_blocks, block_size=4, max_num_seqs=max_num_seqs)
    return Orchestrator(scheduler, FixedBudget(64), RServeConfig(embedding_capacity=10**6, **config))


def with_images(request_id: int, num_items: int = 1, text: int = 3, size: int = 8) -> Request:
    items = tuple(Item(text + i * size, size, (1, 4, 8)) for i in range(num_items))
    return Request(request_id, (0,) * (text + num_items * size + 1), items, 4)


def run(core: Orchestrator) -> list[int]:
    """One micro-batch, start to end: the requests in it."""
    batch = core.next_batch(0.0)
    if batch is None:
        return []
    core.on_batch_done(batch.batch_id, {c.request_id: 5 for c in batch.chunks if c.sample}, 0.0)
    return [chunk.request_id for chunk in batch.chunks]


def test_requests_that_wait_for_their_clients_do_not_keep_a_ready_one_out():
    """They have prefilled their text and hold all places; a text request comes."""
    core = orchestrator(max_num_seqs=4)
    for i in range(4):
        core.on_request(with_images(i), 0.0)
    assert run(core) == [0, 1, 2, 3]
    core.on_request(Request(9, (1, 2, 3), (), 1), 0.0)
    assert 9 in run(core)


def test_a_decode_gets_on_beside_an_older_request_that_waits_for_its_client():
    core = orchestrator(num_blocks=10)
    core.on_request(with_images(0, text=15), 0.0)
    run(core)
    core.on_request(Request(1, (1, 2, 3, 4), (), 30), 0.0)
    for _ in range(40):
        run(core)
    assert not core.is_live(1)
    core.on_item_ready(0, 0, 0.0)
    encode = core.next_encode(0, 0.0)
    core.on_encoded(encode.batch_id, 0.0)
    while core.is_live(0):
        assert run(core)


def test_small_pieces_wait_but_hide_nobody_behind_them():
    core = orchestrator(num_blocks=1000, max_num_seqs=64, min_chunk_tokens=16)
    core.on_request(Request(0, (1,), (), 50), 0.0)
    run(core)
    for i in range(1, 41):
        core.on_request(with_images(i), 0.0)
    core.on_request(Request(99, (1, 2, 3), (), 1), 0.0)
    assert run(core) == [0, 99]


def test_the_next_encode_is_found_without_walking_half_loaded_requests():
    core = orchestrator(encoder_batch_tokens=100)
    core.on_request(with_images(0, 30), 0.0)
    for index in range(13):
        core.on_item_ready(0, index, 0.0)
    assert core.next_encode(0, 0.0).num_tokens == 104
    for i in range(1, 2001):
        core.on_request(with_images(i, 20), 0.0)
        core.on_item_ready(i, 0, 0.0)
    start = time.perf_counter()
    for _ in range(100):
        assert core.next_encode(0, 0.0) is None  # a busy encoder gets a full batch only
    assert (time.perf_counter() - start) / 100 < 0.002


@pytest.mark.parametrize("budget", [256, 512, 2048])
@pytest.mark.parametrize("overlap", [True, False])
def test_two_items_that_do_not_fit_together_are_served_one_after_the_other(budget, overlap):
    """Embedding capacity 3,000, two images of 2,304 tokens in one request: the first is released as it is consumed."""
    scheduler = SchedulerConfig(num_blocks=400, block_size=16)
    config = RServeConfig(
        embedding_capacity=3000,
        encoder_batch_tokens=1024 if overlap else None,
        intra_request_overlap=overlap,
    )
    core = Orchestrator(scheduler, FixedBudget(budget), config)
    core.on_request(with_images(0, num_items=2, size=2304), 0.0)
    for index in range(2):
        core.on_item_ready(0, index, 0.0)
    for _ in range(100):
        if not core.is_live(0):
            break
        if encode := core.next_encode(0, 0.0):
            core.on_encoded(encode.batch_id, 0.0)
        run(core)
    assert not core.is_live(0)
    assert core.embedding_stats().peak_held == 2304


def test_six_requests_share_kv_for_one_and_embeddings_for_two_images():
    config = RServeConfig(embedding_capacity=16, encoder_batch_tokens=8)
    core = Orchestrator(SchedulerConfig(num_blocks=6, block_size=4), FixedBudget(64), config)
    for i in range(6):
        core.on_request(with_images(i, num_items=2), 0.0)
        for index in range(2):
            core.on_item_ready(i, index, 0.0)
    for _ in range(300):
        if encode := core.next_encode(0, 0.0):
            core.on_encoded(encode.batch_id, 0.0)
        run(core)
    assert not any(core.is_live(i) for i in range(6))
    stats = core.embedding_stats()
    assert (stats.held, stats.encoding, core.stats().blocks_used) == (0, 0, 0)


def test_an_item_that_ends_encoders_is_found_and_named():
    """Three items go as one batch; the second ends every encoder that takes it."""
    core = orchestrator(encoder_batch_tokens=24, num_encoders=2)
    core.on_request(with_images(0, num_items=3), 0.0)
    for index in range(3):
        core.on_item_ready(0, index, 0.0)
    assert [ref.index for ref in core.next_encode(0, 0.0).items] == [0, 1, 2]
    assert core.on_encoder_lost(0, 0.0) == ()
    done = []
    fatal = ()
    while not fatal:
        batch = core.next_encode(1, 0.0)
        (ref,) = batch.items
        if ref.index == 1:
            fatal = core.on_encoder_lost(1, 0.0)
        else:
            core.on_encoded(batch.batch_id, 0.0)
            done.append(ref.index)
    assert done == [0]
    assert [(ref.request_id, ref.index) for ref in fatal] == [(0, 1)]
    core.on_abort(0, 0.0)
    assert not core.is_live(0)
    assert core.tracker.pool.used == 0


def test_what_only_waited_at_a_lost_encoder_is_not_blamed():
    core = orchestrator(encoder_batch_tokens=8)
    core.on_request(with_images(0, num_items=2), 0.0)
    for index in range(2):
        core.on_item_ready(0, index, 0.0)
    for _ in range(MAX_LOSSES):
        assert [core.next_encode(0, 0.0).items[0].index for _ in range(2)] == [0, 1]
        fatal = core.on_encoder_lost(0, 0.0)
    assert [ref.index for ref in fatal] == [0]
