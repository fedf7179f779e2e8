"""Prediction of measured runs: layouts as the server makes them, what a run's pace does, and the table."""

from __future__ import annotations

import json
from statistics import fmean

import pytest

from benchmarks import results
from benchmarks.real import client, fidelity
from benchmarks.real.cost import Delays
from benchmarks.real.fidelity import Layout, Machine, Prediction
from benchmarks.real.plan import OURS, Plan
from benchmarks.real.profile import FILE
from benchmarks.real.requests import Mix, prepare
from gllm.config import DEMO_CHECKPOINT
from tests.real.made_up import result
from tests.real.test_cost import ENCODE, STEADY, STEP

MIX = Mix(images=(1, 3), side=(56, 112), text=(2, 9))
PLAN = Plan(
    workload="w", mix=MIX, rates=(1.0, 2.0, 4.0, 8.0), seeds=(0,), count=4, max_tokens=1, slo=1.0, token_budget=64,
    checkpoint="demo", model_path=str(DEMO_CHECKPOINT), capacity=9.0,
)  # fmt: skip


def costs() -> dict:
    """A made-up cost file: 7 ms of HTTP and admission, 1 ms an image, 1 ms around a step, 2 ms to the client."""
    delays = Delays(admit=(7e-3, 1e-8), ready=(1e-3, 0.01), step=1e-3, hop=(1e-3, 0.0), answer=2e-3)
    cores = {"gllm": {"stage": [0, 1]}, "gllm-1core": {"stage": [0]}, "separate": {"stage": [0], "encoder": [1]}}
    return {
        "plan_digest": PLAN.digest,
        "left_out": {},
        "pace_unit_s": 2e-3,
        "workers": {
            name: {worker: {"cores": bound, "encode": ENCODE, "step": STEP} for worker, bound in found.items()}
            for name, found in cores.items()
        },
        "delays": {name: delays.described() for name in (*OURS, "gllm-1core")},
    }


def test_delays_are_added_to_the_models_work():
    layout = Layout(DEMO_CHECKPOINT)
    found = costs()
    run = result("gllm-epd", 1.0, 0, 0.05)
    before = fidelity.predict(Machine.read(found), layout, PLAN, run, STEADY)
    found["delays"]["gllm-epd"] |= {"admit": [1.007, 1e-8], "answer": 0.502}
    after = fidelity.predict(Machine.read(found), layout, PLAN, run, STEADY)
    assert after == pytest.approx([ttft + 1.5 for ttft in before])


def test_a_slow_moment_of_a_core_makes_a_run_longer():
    machine, layout = Machine.read(costs()), Layout(DEMO_CHECKPOINT)

    def ttft(**pace: float) -> float:
        run = result("rserve", 1.0, 0, 0.05)
        run.body["pace"] = {core[1:]: [[0.0, seconds]] for core, seconds in pace.items()}
        return fmean(fidelity.predict(machine, layout, PLAN, run, machine.pace(run)))

    usual = ttft()
    assert usual == pytest.approx(ttft(_0=2e-3, _1=2e-3))
    assert ttft(_0=4e-3) > usual + 1e-3
    assert ttft(_1=4e-3) > usual
    assert usual < ttft(_0=4e-3, _1=4e-3) < 2 * usual


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
            found = result(system, rate, 0, 0.05, plan_digest=PLAN.digest)
            found.body["pace"] = {core: [[0.0, 4e-3]] for core in ("0", "1")}
            results.write(tmp_path, found)
    predictions = fidelity.run(tmp_path)
    assert {p.rate for p in predictions} == {1.0, 4.0, 8.0}
    assert len(predictions) == 15  # not vLLM
    assert all(0.005 < p.steady < p.predicted < 1 for p in predictions)
    written = json.loads((tmp_path / "real-fidelity.json").read_text())
    assert len(written["predictions"]) == 15
    assert all(len(p["requests"]) == PLAN.count for p in written["predictions"])
    assert "60, correlation" in written["scatter"]


def test_what_does_not_belong_together_is_refused_in_one_line(tmp_path, capsys):
    PLAN.save(tmp_path)
    for digest, message in (("another", "not measured along"), (PLAN.digest, "no runs of this plan")):
        (tmp_path / FILE).write_text(json.dumps(costs() | {"plan_digest": digest}))
        assert fidelity.main(["--results", str(tmp_path)]) == 1
        said = capsys.readouterr().err.strip().splitlines()
        assert said[-1].startswith("fidelity: ")
        assert message in said[-1]
    (tmp_path / FILE).write_text('{"seats": {}}')  # of an older version
    assert fidelity.main(["--results", str(tmp_path)]) == 1


def test_runs_without_a_known_pace_are_not_predicted():
    run = result("rserve", 1.0, 0, 0.05)
    assert not fidelity.compare(Machine.read(costs()), Layout(DEMO_CHECKPOINT), PLAN, [run])


def test_a_scatter_is_that_within_cells():
    near = Prediction("gllm", 1.0, 1.0, 1.0, 1.0, 1, requests=((1.0, 2.0), (2.0, 1.0), (1.5, 1.5)))
    far = Prediction("gllm", 2.0, 9.0, 9.0, 9.0, 1, requests=((10.0, 20.0), (20.0, 10.0), (15.0, 15.0)))
    assert "correlation -0.98 within cells" in fidelity.scatter([near, far])


def test_the_table_marks_what_is_beyond_the_goal():
    shown = fidelity.text([Prediction("gllm", 1.0, 1.1, 0.9, 1.0, 3), Prediction("rserve", 1.0, 1.3, 0.9, 1.0, 3)])
    assert "+10.0 %" in shown
    assert "+30.0 %  3  beyond 15%" in shown
    assert shown.endswith("1 of 2 within 15%; single requests: too few")
