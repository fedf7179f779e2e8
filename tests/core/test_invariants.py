"""The invariants of the cores over random interleavings: arrivals, pixels and encodings in any order, aborts, lost
encoders, tiny pools, several micro-batches in flight."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.world import World, draw_request, make_core

SCHEMES = ("gllm", "gllm-epd", "rserve-intra", "rserve")


@st.composite
def worlds(draw, scheme: str) -> tuple[World, list]:
    rng = draw(st.randoms(use_true_random=False))
    max_item = draw(st.integers(1, 12))
    max_prompt = draw(st.integers(4, 40))
    max_tokens = draw(st.sampled_from([1, 2, 4, 8, 40]))
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    smallest = -(-(max_prompt + max_tokens) // block_size)
    encoders = 0 if scheme == "gllm" else draw(st.integers(1, 3))
    budget = draw(st.integers(1, 32))
    core = make_core(
        scheme,
        num_blocks=smallest + draw(st.sampled_from([0, 1, 2, smallest, 2 * smallest])),
        block_size=block_size,
        max_in_flight=draw(st.integers(1, 4)),
        budget=budget,
        capacity=max_item + draw(st.integers(0, 30)),
        batch_tokens=draw(st.integers(1, 20)),
        min_chunk=draw(st.integers(1, 8)),
        encoders=encoders,
        max_num_seqs=draw(st.integers(1, 6)),
        throttling=draw(st.booleans()),
        chunked_pipeline=draw(st.booleans()),
    )
    requests = [draw_request(rng, i, max_prompt, max_item, max_tokens) for i in range(draw(st.integers(1, 10)))]
    return World(core, rng, budget + 3, encoders), requests


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("faults", [False, True])
def test_every_interleaving_keeps_the_invariants_and_ends(scheme, faults):
    @settings(max_examples=80, deadline=None)
    @given(worlds(scheme))
    def check(drawn):
        world, requests = drawn
        world.run(requests, faults=faults)

    check()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_long_random_runs(scheme):
    """Larger worlds than hypothesis draws, from fixed seeds."""
    for seed in range(25):
        rng = Random(seed)
        core = make_core(
            scheme, num_blocks=rng.randint(10, 40), block_size=8, max_in_flight=rng.randint(1, 4), budget=16,
            capacity=rng.randint(16, 60), batch_tokens=rng.randint(1, 40), min_chunk=rng.choice([1, 4]),
            encoders=2, max_num_seqs=rng.randint(1, 16), throttling=seed % 3 == 0,
        )  # fmt: skip
        requests = [draw_request(rng, i, 60, 16, 12) for i in range(60)]
        World(core, rng, 19, 0 if scheme == "gllm" else 2).run(requests, max_steps=200_000)
