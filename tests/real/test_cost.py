"""Costs for the simulator from measured spans: a made-up machine whose law is known."""

from __future__ import annotations

import random

import pytest

from benchmarks.real.cost import Delays, MeasuredCost, WorkerCost, dot, encode_features, least_squares, step_features
from benchmarks.real.pace import Pace
from benchmarks.sim.cluster import Cluster
from benchmarks.sim.deployment import Deployment
from benchmarks.sim.job import Job, lay_out
from benchmarks.sim.model_spec import load_model
from gllm.core.batch import Batch, Chunk

MODEL = load_model("qwen2.5-vl-3b")
ENCODE = (1e-3, 1e-4, 1e-6, 1e-9)
STEP = (2e-3, 1e-4, 1e-5, 1e-8, 1e-3, 1e-6, 5e-4)
NO_DELAYS = Delays(admit=(0.0, 0.0), ready=(0.0, 0.0), step=0.0, hop=(0.0, 0.0), answer=0.0)
STEADY = Pace({}, 1.0)


def worker(core: int) -> WorkerCost:
    return WorkerCost((core,), ENCODE, STEP)


def test_what_encodes_and_micro_batches_are_made_of():
    assert encode_features([16, 64]) == (1, 2, 80, 16**2 + 64**2)
    spans = [(0, 100), (50, 10), (99, 1), (199, 1)]  # two prompts' chunks and two decodes
    assert step_features(spans, 3) == (1, 2, 110, 100 * 50 + 10 * 55, 2, 298, 3)
    assert step_features([(0, 1)], 0)[1:3] == (1, 1)  # the first token of a prompt is no decode


def test_the_law_is_found_again():
    rng = random.Random(0)
    images = [[rng.randrange(16, 600) for _ in range(rng.randrange(1, 9))] for _ in range(60)]
    features = [encode_features(patches) for patches in images]
    assert least_squares(features, [dot(ENCODE, f) for f in features]) == pytest.approx(ENCODE)


def test_scatter_upwards_does_not_make_the_fit_too_low():
    rng = random.Random(1)
    features = [(1.0, float(rng.randrange(1, 100))) for _ in range(400)]
    seconds = [(3.0 + 0.5 * f[1]) * (2.0 if rng.random() < 0.2 else 0.75) for f in features]
    found = least_squares(features, seconds)
    assert sum(dot(found, f) for f in features) == pytest.approx(sum(seconds), rel=1e-3)
    assert found == pytest.approx((3.0, 0.5), rel=0.3)


def test_no_coefficient_is_negative():
    found = least_squares([(1, 1), (1, 2), (1, 3)], [3.0, 2.0, 1.0])
    assert all(c >= 0 for c in found)


def test_a_micro_batch_costs_what_its_chunks_and_samples_do():
    batch = Batch(0, (Chunk(0, 0, 64, (), False), Chunk(1, 99, 1, (), True)))
    assert worker(0).step_seconds(batch) == pytest.approx(2e-3 + 1e-4 + 64e-5 + 64 * 32e-8 + 1e-3 + 99e-6 + 5e-4)


def ttft(scheme: str, delays: Delays = NO_DELAYS, pace: Pace = STEADY) -> float:
    encoder = worker(1) if scheme != "gllm" else None
    cost = MeasuredCost(MODEL, worker(0), encoder, delays=delays, pace=pace, num_kv_tokens=4096)
    deployment = Deployment(scheme=scheme, encoders=int(scheme != "gllm"), encoder_batch_tokens=64)
    cluster = Cluster(deployment, cost)
    cost.watch(cluster)
    request = lay_out(0, [10, (1, 16, 16), (1, 16, 16), 10], MODEL.vision, 1)
    (served,) = cluster.run([Job(0.0, request)]).served
    return served.first_token


def test_the_simulator_runs_on_measured_costs_and_adds_them_up():
    alone = worker(0).encode_seconds([256, 256]) + worker(0).step_seconds(Batch(0, (Chunk(0, 0, 152, (), True),)))
    assert ttft("gllm") == pytest.approx(alone)
    assert ttft("gllm", Delays.read(NO_DELAYS.described() | {"step": 0.5})) == pytest.approx(alone + 0.5)
    assert ttft("gllm-epd", Delays.read(NO_DELAYS.described() | {"hop": [0.1, 1e-3]})) == pytest.approx(
        ttft("gllm-epd") + 0.1 + 0.128
    )


def test_a_slow_core_slows_the_work_on_it():
    slow = {core: Pace({core: [(0.0, 3e-3)]}, 1e-3) for core in (0, 1)}
    assert ttft("gllm", pace=slow[0]) == pytest.approx(3 * ttft("gllm"))
    assert ttft("gllm", pace=slow[1]) == pytest.approx(ttft("gllm"))
    encode = worker(1).encode_seconds([256, 256])
    assert ttft("gllm-epd", pace=slow[1]) == pytest.approx(ttft("gllm-epd") + 2 * encode)


def test_the_pace_is_that_of_the_moment_at_which_work_begins():
    encode = worker(0).encode_seconds([256, 256])
    step = ttft("gllm") - encode
    # Fast until the images are encoded, then four times slower: only the micro-batch's chunks are.
    samples = [(0.0, 1e-3), (0.4, 1e-3), (0.6, 4e-3), (9.0, 4e-3)]
    long = WorkerCost((0,), (0.5, 0.0, 0.0, 0.0), STEP)
    cost = MeasuredCost(MODEL, long, None, delays=NO_DELAYS, pace=Pace({0: samples}, 1e-3), num_kv_tokens=4096)
    cluster = Cluster(Deployment(scheme="gllm"), cost)
    cost.watch(cluster)
    request = lay_out(0, [10, (1, 16, 16), (1, 16, 16), 10], MODEL.vision, 1)
    (served,) = cluster.run([Job(0.0, request)]).served
    assert served.first_token == pytest.approx(0.5 + 4 * step, abs=0.1)
    assert served.first_token > 0.5 + step
