"""What an event log tells: a simulated machine's law is found in its log, and time around the spans is told apart."""

from __future__ import annotations

import random

import pytest

from benchmarks.real.cost import Delays, MeasuredCost, WorkerCost, dot
from benchmarks.real.observe import Asked, Log
from benchmarks.real.pace import Pace
from benchmarks.real.profile import fit
from benchmarks.sim.cluster import Cluster
from benchmarks.sim.deployment import SEPARATE, Deployment
from benchmarks.sim.job import Job, lay_out
from tests.real.test_cost import ENCODE, MODEL, NO_DELAYS, STEP

CORES = {"gllm": {"stage": (0, 1)}, "rserve": {"stage": (0,), "encoder": (1,)}}
PACE = Pace({0: [(t / 2, 1e-3 * (1 + t % 3)) for t in range(400)], 1: [(0.0, 2e-3)]}, 1e-3)


def log_of(
    scheme: str, delays: Delays = NO_DELAYS, apart: float = 0.7, at_once: int = 1, count: int = 80
) -> list[dict]:
    """The event log of a simulated machine on which cores change their pace. `at_once` requests
    every `apart` seconds."""
    cores, records = CORES[scheme], []
    workers = {worker: WorkerCost(bound, ENCODE, STEP) for worker, bound in cores.items()}
    cost = MeasuredCost(
        MODEL, workers["stage"], workers.get("encoder"), delays=delays, pace=PACE, num_kv_tokens=1 << 16
    )
    deployment = Deployment(scheme=scheme, encoders=int(scheme in SEPARATE), encoder_batch_tokens=64)
    cluster = Cluster(deployment, cost, sink=records.append)
    cost.watch(cluster)
    rng = random.Random(scheme)
    jobs = []
    for number in range(count):
        images = [(1, 2 * rng.randint(2, 12), 2 * rng.randint(2, 12)) for _ in range(rng.randint(1, 5))]
        parts = [part for image in images for part in (rng.randint(1, 200), image)]
        jobs.append(Job(apart * (number // at_once), lay_out(number, parts, MODEL.vision, 1 + number % 4)))
    cluster.run(jobs)
    return records


@pytest.mark.parametrize("scheme", ["gllm", "rserve"])
def test_a_machines_law_is_found_in_its_log_whatever_its_pace(scheme):
    works = list(Log(log_of(scheme, at_once=3)).works([(0.0, 1e9)]))
    found = fit(works, CORES[scheme], PACE)
    encoder = "encoder" if scheme == "rserve" else "stage"
    assert found[encoder]["encode"] == pytest.approx(ENCODE, rel=0.01)
    worker = WorkerCost.read(found["stage"])
    for features in ((1, 1, 200, 20000, 0, 0, 1), (1, 0, 0, 0, 2, 400, 2)):
        assert dot(worker.step, features) == pytest.approx(dot(STEP, features), rel=0.02)
    assert found["stage"]["spans"]["step"]["sd"] < 0.01
    assert found[encoder]["spans"]["encode"]["count"] == sum(w.kind == "encode" for w in works)


def test_only_spans_of_the_windows_count():
    log = Log(log_of("rserve"))
    everything, some = list(log.works([(0.0, 1e9)])), list(log.works([(3.0, 4.0), (9.0, 10.0)]))
    assert 0 < len(some) < len(everything)
    assert all(3.0 <= work.start <= 4.0 or 9.0 <= work.start <= 10.0 for work in some)


def test_too_few_spans_give_no_cost():
    works = list(Log(log_of("gllm", count=2)).works([(0.0, 1e9)]))
    with pytest.raises(ValueError, match="more passes are needed"):
        fit(works, CORES["gllm"], PACE)


def test_time_around_the_spans_is_told_apart():
    """Requests that were alone, seen by a client: 7 ms and 1 us a byte to the core, 2 ms an image and 50 ms a
    megapixel, 2 ms to the answer; and results came 3 ms after their spans."""
    delays = Delays(admit=(0.0, 0.0), ready=(0.0, 0.0), step=0.0, hop=(4e-4, 1e-6), answer=0.0)
    records = log_of("rserve", delays, apart=5.0, count=20)
    first: dict[int, float] = {}
    admitted: dict[int, tuple[float, float]] = {}
    for record in records:
        if record["e"] == "on_request":
            grids = [item["grid"] for item in record["in"][0]["items"]]
            megapixels = sum(h * w for _, h, w in grids) * 14 * 14 / 1e6
            admitted[record["in"][0]["request_id"]] = record["t"], 0.002 * len(grids) + 0.05 * megapixels
        if record["e"] == "on_item_ready":
            number, index = record["in"]
            began, seconds = admitted[number]
            record["t"] = began + seconds / (1 + index)  # the first one is the last to come
        if record["e"] == "on_batch_done":
            record["t"] += 0.003
            for sampled in record["out"]:
                first.setdefault(sampled["request_id"], record["t"])
    requests = [record for record in records if record["e"] == "on_request"]
    asked = []
    for record in requests:
        number = record["in"][0]["request_id"]
        size, arrival = 1000 * (number + 1), record["t"] - 0.007 - 1e-3 * (number + 1)
        asked.append(Asked(arrival, first[number] + 0.002, size))
    found = Log(records).delays(asked)
    assert found.admit == pytest.approx((0.007, 1e-6))
    assert found.ready == pytest.approx((0.002, 0.05))
    assert found.step == pytest.approx(0.003)
    assert found.hop == pytest.approx((4e-4, 1e-6), rel=0.01)
    assert found.answer == pytest.approx(0.002)
    assert Delays.read(found.described()) == found


def test_a_log_that_was_begun_anew_gives_what_it_has():
    records = log_of("rserve", apart=5.0, count=4)
    done = {s["request_id"]: r["t"] for r in records if r["e"] == "on_batch_done" for s in r["out"]}
    asked = [Asked(r["t"] - 0.1, done[r["in"][0]["request_id"]], 10) for r in records if r["e"] == "on_request"]
    kept = records[next(n for n, r in enumerate(records) if r.get("t", 0.0) >= 9.0) :]
    assert dot(Log(kept).delays(asked).admit, (1.0, 10.0)) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="none of the requests"):
        Log(kept).delays(asked[:2])


def test_workers_on_one_core_are_not_predicted():
    works = list(Log(log_of("rserve")).works([(0.0, 1e9)]))
    with pytest.raises(ValueError, match="share a core"):
        fit(works, {"stage": (0,), "encoder": (0,)}, PACE)
