"""What a simulated run must satisfy whatever the costs: order, overlap, conservation, determinism and speed."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from benchmarks import workloads
from benchmarks.figures import fit
from benchmarks.figures.points import Point, simulate
from benchmarks.sim.catalog import UnknownName
from benchmarks.sim.cluster import Cluster, Preprocessing
from benchmarks.sim.cost import CostModel
from benchmarks.sim.deployment import SCHEMES, Deployment
from benchmarks.sim.fitted import load_efficiency
from benchmarks.sim.hardware import load_hardware
from benchmarks.sim.model_spec import load_model
from benchmarks.systems import deploy, label, system

COST = CostModel(load_model("qwen2.5-vl-72b"), load_hardware("h100-sxm"), load_efficiency())


def ttft(scheme: str, workload: str = "1K-interleaved", layout: str = "PP4", **settings) -> float:
    point = Point(deployment=deploy(scheme, layout, **settings), workload=workload, rate=None, num_requests=1)
    return simulate(point)["summary"]["ttft_mean"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_requests_finish_and_busy_times_fit_into_the_run(scheme):
    shapes = workloads.shapes("mix", workloads.poisson(1.0, 30, 1), 1, max_tokens=3)
    run = Cluster(deploy(scheme, "PP4"), COST, Preprocessing(seconds_per_megapixel=0.03)).run(
        workloads.jobs(shapes, COST.model)
    )
    assert len(run.served) == 30
    assert all(s.arrival < s.first_token < s.finish and s.output_tokens == 3 for s in run.served)
    assert all(sum(kinds.values()) <= run.end for kinds in run.busy.values())
    assert set(run.busy) == {f"stage {i}" for i in range(4)} | (
        {"encoder 0"} if "vllm" not in scheme and scheme != "gllm" else set()
    )


def test_the_encode_of_a_request_overlaps_its_own_prefill_in_rserve_alone():
    assert ttft("rserve") < 0.95 * ttft("gllm-epd")
    assert ttft("rserve") == pytest.approx(ttft("rserve-intra"))
    assert ttft("gllm-epd") == pytest.approx(ttft("gllm"), rel=0.02)


def test_vllm_encodes_in_the_step_that_needs_the_item():
    point = Point(deployment=deploy("vllm", "PP4"), workload="1K-interleaved", rate=None, num_requests=1, log=True)
    log = simulate(point)["log"]
    encodes = [[ref["index"] for ref in r["out"]["encode"]] for r in log if r["e"] == "next_batch" and r["out"]]
    assert encodes[0] == [0]
    assert [1] in encodes[1:]


def test_chunks_of_one_request_fill_the_pipeline():
    assert ttft("gllm", chunked_pipeline=False) > 1.8 * ttft("gllm")


def test_the_same_seed_gives_the_same_result():
    point = Point(deployment=deploy("rserve", "PP4"), workload="mix", rate=1.0, num_requests=20)
    assert simulate(point) == simulate(point)
    assert simulate(point)["ttfts"] != simulate(replace(point, seed=1))["ttfts"]


def test_the_fitted_numbers_meet_their_targets():
    assert fit.plateau(load_efficiency()) == pytest.approx(fit.PLATEAU, rel=0.003)
    assert fit.share(load_efficiency()) == pytest.approx(fit.SHARE, rel=0.01)


def test_an_hour_at_two_requests_a_second_takes_seconds():
    point = Point(deployment=deploy("rserve", "PP4"), workload="1K", rate=2.0, num_requests=720)
    begin = time.process_time()
    simulate(point)
    assert 10 * (time.process_time() - begin) < 20, "a tenth of an hour of arrivals"


def test_unknown_names_and_impossible_deployments():
    with pytest.raises(UnknownName, match="known: vllm, gllm, gllm-epd, rserve-intra, rserve"):
        Deployment(scheme="sglang")
    with pytest.raises(UnknownName, match="known: vllm"):
        system("sglang")
    with pytest.raises(ValueError, match="scheme rserve with 0 encoders"):
        Deployment(scheme="rserve")
    with pytest.raises(ValueError, match="is not of the form"):
        deploy("gllm", "PP4xEP2")
    with pytest.raises(UnknownName, match="known: 1K, 2K"):
        workloads.shapes("3K", [0.0], 0)


def test_labels_carry_the_device_count():
    assert label(deploy("rserve", "PP4")) == "RServe PP4+E1 (5 GPUs)"
    assert label(deploy("vllm", "TP4")) == "vLLM TP4 (4 GPUs)"
    assert label(deploy("gllm", "")) == "gLLM 1 GPU (1 GPU)"


def test_workloads_have_the_papers_sizes():
    def prompt(name: str) -> int:
        return len(workloads.jobs(workloads.shapes(name, [0.0], 0), COST.model)[0].request.token_ids)

    assert 8000 < prompt("1K") < 8500
    assert 12000 < prompt("2K") < 12500
    assert prompt("items-1024") == 2048 + 20 * 1026
    assert prompt("items-32") == 2048 + 20 * 34
    assert list(workloads.trace([5.0, 3.0])) == [0.0, 2.0]
