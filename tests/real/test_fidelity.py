"""Prediction of measured runs: layouts as the server makes them, overheads told apart, and the table."""

from __future__ import annotations

import json
from statistics import fmean

import pytest

from benchmarks import results
from benchmarks.real import client, fidelity
from benchmarks.real.fidelity import Layout, Machine, Prediction
from benchmarks.real.plan import Plan
from benchmarks.real.profile import FILE, SEATS
from benchmarks.real.requests import Mix, prepare
from gllm.config import DEMO_CHECKPOINT
from tests.real.made_up import result
from tests.real.test_cost import measured, row

MIX = Mix(images=(1, 3), side=(56, 112), text=(2, 9))
PLAN = Plan(
    workload="w", mix=MIX, rates=(1.0, 2.0, 4.0, 8.0), seeds=(0,), count=4, max_tokens=1, slo=1.0, token_budget=64,
    checkpoint="demo", model_path=str(DEMO_CHECKPOINT), capacity=9.0,
)  # fmt: skip


def costs() -> dict:
    """A made-up cost file: 7 ms of HTTP and admission, 1 ms around a step, 0.5 ms a message."""
    text = row([(0, 64)], extra=3e-3)["seconds"]
    return {
        "config": {"cores": 2},
        "probe_s": 0.02,
        "seats": {name: measured() for name in SEATS},
        "beside": {"encode": 1.0, "prefill": 1.0},
        "preprocessing": [{"megapixels": m, "seconds": 1e-3 + 0.01 * m, "cpu": 1e-3} for m in (0.01, 0.05, 0.2)],
        "transfer_token_s": 1e-7,
        "servers": {
            "text_ttft": text + 8e-3, "text_prompt_tokens": 64.0, "per_body_byte": 1e-8, "request_cpu": 4e-3,
            "decode_gap": 0.0, "decode_context": 64, "health": 2e-3, "health_with_encoder": 3e-3,
        },
    }  # fmt: skip


def test_overheads_are_what_is_left_when_the_models_work_is_taken_away():
    found = costs()
    machine = Machine.read(found)
    seat = machine.seats["baseline"]
    found["servers"]["decode_gap"] = seat.chunks([(64, 1)]) + seat.sample(1) + 1e-3
    machine = Machine.read(found)
    assert machine.step_s == pytest.approx(1e-3)
    assert machine.request_s == pytest.approx(7e-3, rel=0.01)
    assert machine.hop_s == pytest.approx(5e-4)
    assert machine.image == pytest.approx((1e-3, 0.01))


def test_a_slow_moment_of_the_machine_makes_a_run_longer():
    machine, layout = Machine.read(costs()), Layout(DEMO_CHECKPOINT)

    def ttft(*probes: float) -> float:
        run = result("rserve", 1.0, 0, 0.05)
        run.body["probe_s"] = list(probes)
        return fmean(fidelity.predict(machine, layout, PLAN, run))

    assert ttft() == ttft(0.02) == ttft(0.01, 0.03)
    assert ttft(0.03, 0.05) == pytest.approx(2 * ttft(0.02), rel=0.05)


def test_layouts_are_the_servers(server):
    requests = prepare(MIX.shapes([0.0] * 3, 7, 1), server.model, 7)
    layout = Layout(DEMO_CHECKPOINT)
    body = client.run(server.base_url, requests, slo=60.0, max_seconds=60.0)
    ours = [len(layout.request(n, request).token_ids) for n, request in enumerate(requests)]
    assert ours == [outcome["prompt_tokens"] for outcome in body["outcomes"]]


def test_every_scheme_is_predicted_at_three_rates_and_written(tmp_path):
    with pytest.raises(FileNotFoundError, match="run compare first"):
        fidelity.run(tmp_path)
    PLAN.save(tmp_path)
    (tmp_path / FILE).write_text(json.dumps(costs()))
    for system in ("gllm", "gllm-epd", "rserve-intra", "rserve", "gllm-1core", "vllm"):
        for rate in PLAN.rates:
            results.write(tmp_path, result(system, rate, 0, 0.05, plan_digest=PLAN.digest))
    predictions = fidelity.run(tmp_path)
    assert {p.rate for p in predictions} == {1.0, 4.0, 8.0}
    assert len(predictions) == 15  # not vLLM
    assert all(0.005 < p.predicted < 1 for p in predictions)
    written = json.loads((tmp_path / "real-fidelity.json").read_text())
    assert len(written["predictions"]) == 15


def test_the_table_marks_what_is_beyond_the_goal():
    shown = fidelity.text([Prediction("gllm", 1.0, 1.1, 1.0, 3), Prediction("rserve", 1.0, 1.3, 1.0, 3)])
    assert "+10.0 %" in shown
    assert "+30.0 %  3  beyond 15%" in shown
    assert shown.endswith("1 of 2 within 15%")
