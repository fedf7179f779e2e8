"""The simulator's decisions are the core's: its event log, replayed into a fresh core, gives the same batches."""

from __future__ import annotations

import itertools
import json

import pytest

from benchmarks import workloads
from benchmarks.sim.cluster import Cluster, Preprocessing
from benchmarks.sim.cost import CostModel
from benchmarks.sim.deployment import SCHEMES, build_core
from benchmarks.sim.fitted import load_efficiency
from benchmarks.sim.hardware import load_hardware
from benchmarks.sim.model_spec import load_model
from benchmarks.systems import deploy
from gllm.core.eventlog import ReplayMismatch, replay
from gllm.core.policy import FixedBudget
from gllm.core.timeline import trace
from rserve.core.orchestrator import describe, rebuild

COST = CostModel(load_model("qwen2.5-vl-7b"), load_hardware("h100-sxm"), load_efficiency())


def logged(scheme: str, rate: float = 4.0, count: int = 15) -> tuple[list[dict], list]:
    shapes = workloads.shapes("mix", workloads.poisson(rate, count, 3), 3, max_tokens=4)
    log: list[dict] = []
    cluster = Cluster(deploy(scheme, "PP2"), COST, Preprocessing(seconds_per_megapixel=0.05), sink=log.append)
    run = cluster.run(workloads.jobs(shapes, COST.model))
    # As the log stands in a file.
    return json.loads(json.dumps(log)), run.served


@pytest.mark.parametrize("scheme", SCHEMES)
def test_replay_into_a_fresh_core_gives_the_same_decisions(scheme):
    log, served = logged(scheme)
    core = build_core(deploy(scheme, "PP2"), COST)
    batches = [record for record, result in replay(log, core) if record["e"] == "next_batch" and result is not None]
    assert len(batches) > 30
    assert all(s.output_tokens == 4 for s in served)
    assert core.stats().running == core.stats().waiting == 0


def test_the_core_is_the_one_that_the_engine_would_build():
    deployment = deploy("rserve", "PP2")
    log, _ = logged("rserve")
    record = describe(deployment.scheduler_config(COST), FixedBudget(2048), deployment.rserve_config())
    assert log[0] == json.loads(json.dumps(record))
    assert sum(1 for _ in replay(log, rebuild(log[0]))) > 100


def test_replay_notices_another_budget():
    log, _ = logged("rserve")
    with pytest.raises(ReplayMismatch):
        list(replay(log, build_core(deploy("rserve", "PP2", token_budget=1024), COST)))


def test_spans_draw_a_timeline_and_never_overlap():
    log, _ = logged("rserve")
    spans = [record for record in log if record["e"] == "span"]
    by_worker: dict[str, list[tuple[float, float]]] = {}
    for span in spans:
        by_worker.setdefault(span["worker"], []).append((span["start"], span["end"]))
    assert set(by_worker) == {"stage 0", "stage 1", "encoder 0"}
    for times in by_worker.values():
        assert all(end <= start + 1e-12 for (_, end), (start, _) in itertools.pairwise(times))
    assert len(trace(log)["traceEvents"]) > len(spans)
