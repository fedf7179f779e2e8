"""Costs for the simulator from measured pieces: made-up measurements of a machine whose law is known."""

from __future__ import annotations

import pytest

from benchmarks.real.cost import Line, MeasuredCost, SeatCost, least_squares
from benchmarks.sim.cluster import Cluster
from benchmarks.sim.deployment import Deployment
from benchmarks.sim.job import Job, lay_out
from benchmarks.sim.model_spec import load_model
from gllm.core.batch import Batch, Chunk

MODEL = load_model("qwen2.5-vl-3b")


def encode_law(patches: list[int]) -> float:
    return 1e-3 + 1e-4 * len(patches) + 1e-6 * sum(patches) + 1e-9 * sum(p * p for p in patches)


def prefill_law(spans: list[tuple[int, int]]) -> float:
    return 2e-3 + sum(1e-5 * new + 1e-8 * new * start + 5e-9 * new * new for start, new in spans)


def row(spans: list[tuple[int, int]], extra: float = 0.0) -> dict:
    return {"spans": spans, "seconds": prefill_law(spans) + extra}


def measured() -> dict:
    batches = [[(side, 2 * side)] * count for side in (112, 224, 448) for count in (1, 2, 8)]
    return {
        "encode": [{"sizes": b, "seconds": encode_law([h // 14 * (w // 14) for h, w in b])} for b in batches],
        "prefill": [row([(0, n)]) for n in (1, 64, 256, 512, 1024)],
        "prefixed": [row([span]) for span in ((256, 32), (1024, 256), (2048, 64))],
        "pairs": [row([(0, n), (0, n)]) for n in (64, 256)],
        "sampled": [row([(0, 16)] * n, extra=3e-3) for n in (1, 8)],
        "unsampled": [row([(0, 16)] * n) for n in (1, 8)],
        "decode": [row([(ctx - 1, 1)] * n, extra=3e-3 + 1e-4 * n) for ctx, n in ((64, 1), (512, 1), (64, 8))],
    }


@pytest.fixture(scope="module")
def seat() -> SeatCost:
    return SeatCost(measured())


def test_encoding_follows_the_law_between_and_beyond_the_points(seat):
    for patches in ([100], [64, 1024, 300], [256] * 16):
        assert seat.encode(patches) == pytest.approx(encode_law(patches), rel=1e-3)
    assert seat.encode_error < 1e-3


@pytest.mark.parametrize("spans", [[(0, 100)], [(0, 700)], [(512, 100)], [(0, 100), (0, 300)], [(256, 64), (0, 200)]])
def test_prefill_follows_the_law(seat, spans):
    assert seat.chunks(spans) == pytest.approx(prefill_law(spans), rel=0.1)


def test_sampling_and_decodes_cost_extra(seat):
    chunks = (Chunk(0, 0, 64, (), False), Chunk(1, 99, 1, (), True))
    plain = seat.chunks([(0, 64)])
    assert seat.step(Batch(0, chunks[:1])) == plain
    assert seat.step(Batch(0, chunks)) > plain + 3e-3


def test_lines_go_on_beyond_their_ends():
    line = Line((1.0, 2.0, 4.0), (1.0, 2.0, 8.0))
    assert [line.at(x) for x in (0.5, 1, 3, 6)] == [0.5, 1.0, 5.0, 14.0]
    assert Line((1.0,), (3.0,)).at(100) == 3.0


def test_no_coefficient_is_negative():
    found = least_squares([(1, 1), (1, 2), (1, 3)], [3.0, 2.0, 1.0])
    assert all(c >= 0 for c in found)


def cost_of(seat: SeatCost, separate: bool, **fields) -> MeasuredCost:
    settings = {"num_kv_tokens": 4096, "step_s": 0.0, "hop_s": 0.0, "token_s": 0.0}
    settings |= {"beside": {"encode": 1.0, "prefill": 1.0}}
    return MeasuredCost(MODEL, seat, seat if separate else None, **{**settings, **fields})


def ttft(scheme: str, cost: MeasuredCost) -> float:
    deployment = Deployment(scheme=scheme, encoders=int(scheme != "gllm"), encoder_batch_tokens=64)
    cluster = Cluster(deployment, cost)
    cost.watch(cluster)
    request = lay_out(0, [10, (1, 16, 16), (1, 16, 16), 10], MODEL.vision, 1)
    (served,) = cluster.run([Job(0.0, request)]).served
    return served.first_token


def test_the_simulator_runs_on_measured_costs_and_adds_them_up(seat):
    alone = ttft("gllm", cost_of(seat, False))
    assert alone == pytest.approx(seat.encode([256, 256]) + seat.chunks([(0, 152)]) + seat.sample(1), rel=1e-6)
    assert ttft("gllm", cost_of(seat, False, step_s=0.5)) == pytest.approx(alone + 0.5)
    assert ttft("gllm-epd", cost_of(seat, True, hop_s=0.1)) == pytest.approx(alone + 0.2)
    assert ttft("gllm", cost_of(seat, False, stolen=(0.0, 0.5))) == pytest.approx(2 * alone)
    assert ttft("gllm", cost_of(seat, False, pace=3.0)) == pytest.approx(3 * alone)


def test_a_worker_is_slower_only_while_the_other_one_works(seat):
    beside = {"encode": 3.0, "prefill": 3.0}
    assert ttft("gllm-epd", cost_of(seat, True, beside=beside)) == pytest.approx(ttft("gllm-epd", cost_of(seat, True)))
    assert ttft("rserve", cost_of(seat, True, beside=beside)) > ttft("rserve", cost_of(seat, True))
