"""Elastic encode: stage 0 encodes only when nothing is schedulable, one batch at a time, and everything still ends."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.core.policy import FixedBudget
from gllm.core.request import Item, Request
from gllm.core.scheduler import SchedulerConfig
from rserve.config import RServeConfig
from rserve.core.orchestrator import Orchestrator
from tests.core.world import World, draw_request


class ElasticWorld(World):
    """A world whose stage 0 asks for an encode batch as encoder number `num_encoders`."""

    def start_encodes(self) -> bool:
        return super().start_encodes() or self.start_stage_encode()

    def start_stage_encode(self) -> bool:
        batch = self.core.next_encode(self.num_encoders, self.tick())
        at_stage = [other for other in self.encoding if other.encoder_id == self.num_encoders]
        if batch is not None:
            assert not at_stage, "stage 0 holds two encode batches: a decode could wait for both"
            self.encoding.append(batch)
        self.drain()
        if batch is None:
            return False
        self.check_encode(batch)
        assert not self.start_batch(), "stage 0 was given an encode batch while a micro-batch could run"
        return True


@st.composite
def worlds(draw) -> tuple[ElasticWorld, list]:
    rng = draw(st.randoms(use_true_random=False))
    max_item, max_prompt, max_tokens = draw(st.integers(1, 12)), draw(st.integers(4, 40)), draw(st.integers(1, 8))
    block_size = draw(st.sampled_from([1, 4, 16]))
    smallest = -(-(max_prompt + max_tokens) // block_size)
    encoders, budget = draw(st.integers(1, 2)), draw(st.integers(1, 32))
    scheduler = SchedulerConfig(
        num_blocks=smallest + draw(st.integers(0, 2 * smallest)),
        block_size=block_size,
        max_num_seqs=draw(st.integers(1, 6)),
        max_in_flight=draw(st.integers(1, 4)),
        chunked_pipeline=draw(st.booleans()),
    )
    rserve = RServeConfig(
        num_encoders=encoders,
        encoder_batch_tokens=draw(st.one_of(st.none(), st.integers(1, 20))),
        embedding_capacity=max_item + draw(st.integers(0, 30)),
        min_chunk_tokens=draw(st.integers(1, 8)),
        elastic_encode=True,
    )
    core = Orchestrator(scheduler, FixedBudget(budget), rserve)
    requests = [draw_request(rng, i, max_prompt, max_item, max_tokens) for i in range(draw(st.integers(1, 10)))]
    return ElasticWorld(core, rng, budget, encoders), requests


@pytest.mark.parametrize("faults", [False, True])
def test_every_interleaving_keeps_the_invariants_and_ends(faults):
    @settings(max_examples=120, deadline=None)
    @given(worlds())
    def check(drawn):
        world, requests = drawn
        world.run(requests, faults=faults)

    check()


def core(**config) -> Orchestrator:
    rserve = RServeConfig(num_encoders=1, encoder_batch_tokens=4, **config)
    return Orchestrator(SchedulerConfig(num_blocks=64, block_size=4), FixedBudget(16), rserve)


def images(request_id: int, text: int, count: int) -> Request:
    """Text, then items of 4 tokens."""
    items = tuple(Item(text + 4 * i, 4, (1, 4, 4)) for i in range(count))
    return Request(request_id, (0,) * (text + 4 * count), items, 4)


def with_pixels(core: Orchestrator, request: Request) -> Orchestrator:
    core.on_request(request, 0.0)
    for index in range(len(request.items)):
        core.on_item_ready(request.request_id, index, 0.0)
    return core


def test_stage_0_takes_what_the_encoder_cannot_start_yet():
    busy = with_pixels(core(elastic_encode=True), images(0, 0, 3))
    assert [ref.index for ref in busy.next_encode(0, 0.0).items] == [0]
    assert busy.next_encode(0, 0.0) is None
    assert [ref.index for ref in busy.next_encode(1, 0.0).items] == [1]
    assert busy.next_encode(1, 0.0) is None


def test_stage_0_gets_nothing_while_anything_is_schedulable_or_without_elastic():
    with_text = with_pixels(core(elastic_encode=True), images(0, 2, 3))
    assert with_text.next_encode(0, 0.0) is not None
    assert with_text.next_encode(0, 0.0) is not None, "stage 0 is busy: the encoder gets a batch ahead"
    assert with_text.next_encode(1, 0.0) is None
    assert with_pixels(core(), images(0, 0, 3)).next_encode(1, 0.0) is None


def test_long_random_runs():
    for seed in range(10):
        rng = Random(seed)
        scheduler = SchedulerConfig(num_blocks=rng.randint(10, 40), block_size=8, max_num_seqs=8, max_in_flight=3)
        rserve = RServeConfig(
            num_encoders=2, encoder_batch_tokens=rng.randint(1, 40), embedding_capacity=rng.randint(16, 60),
            elastic_encode=True,
        )  # fmt: skip
        requests = [draw_request(rng, i, 60, 16, 12) for i in range(60)]
        world = ElasticWorld(Orchestrator(scheduler, FixedBudget(16), rserve), rng, 16, 2)
        world.run(requests, max_steps=200_000)
