"""Costs from live servers: passes over real ones, who shares a cost, and when passes are taken."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from benchmarks.real import plan
from benchmarks.real.bench import Bench, open_bench
from benchmarks.real.compare import Passes
from benchmarks.real.cost import Delays, WorkerCost
from benchmarks.real.observe import Asked
from benchmarks.real.pace import MeterFailed, PaceMeter
from benchmarks.real.profile import FILE, Profiler, pool, seats, spread
from benchmarks.real.requests import Mix
from benchmarks.real.servers import ServerFailed, Setting
from gllm.config import DEMO_CHECKPOINT, usable_cores
from gllm.core import eventlog
from tests.real.test_observe import log_of

CORES = tuple(usable_cores()[:2])
MIX = Mix(images=(1, 3), side=(56, 112), text=(2, 40))


def test_passes_over_real_servers_give_costs(tmp_path):
    setting = Setting(checkpoint=DEMO_CHECKPOINT, cores=CORES)
    wanted = plan.entrants(CORES, ("gllm", "rserve"), one_core=False)
    with contextlib.ExitStack() as stack:
        bench: Bench = stack.enter_context(open_bench(setting, wanted, MIX, tmp_path, tmp_path))
        assert not bench.skipped
        meter = stack.enter_context(PaceMeter(CORES))
        profiler = Profiler(bench.entrants, bench.logs, MIX, bench.timed_load, meter, rate=20.0)
        for _ in range(4):
            profiler.sample(bench.servers)
        found = profiler.costs("digest")
    assert (found["passes"], found["plan_digest"], found["left_out"]) == (4, "digest", {})
    assert set(found["workers"]) == {"gllm", "separate"}
    assert set(found["workers"]["gllm"]) == {"stage"}
    both, encoder, stage = (
        WorkerCost.read(found["workers"][name][worker])
        for name, worker in (("gllm", "stage"), ("separate", "encoder"), ("separate", "stage"))
    )
    assert both.encode_seconds([64] * 8) > both.encode_seconds([16]) > 0
    assert encoder.encode_seconds([64] * 8) > encoder.encode_seconds([16]) > 0
    assert not stage.encode
    assert set(stage.cores).isdisjoint(encoder.cores) or len(CORES) == 1
    for name in ("gllm", "rserve"):
        delays = Delays.read(found["delays"][name])
        assert 0 < delays.admit[0] + 20_000 * delays.admit[1] < 1
        assert 0 < delays.answer < 1
        assert 0 < delays.step < 1
    assert found["delays"]["gllm"]["hop"] == (0.0, 0.0)
    assert sum(found["delays"]["rserve"]["hop"]) > 0


def test_pace_one_is_that_of_the_passes_and_not_of_the_runs_in_between(tmp_path):
    """A meter that was twice as fast in the passes as in the runs between them."""
    records = log_of("gllm")
    (tmp_path / "log").write_text("".join(eventlog.dump(record) + "\n" for record in records))
    windows = [(0.0, 7.0), (14.0, 21.0)]

    class Meter:
        def samples(self, begin, end):
            assert (begin, end) == (0.0, 21.0)
            return {0: [(t / 10, 2e-3 if 7.0 < t / 10 < 14.0 else 1e-3) for t in range(211)], 1: [(0.0, 1e-3)]}

    (entrant,) = plan.entrants((0, 1), ("gllm",), one_core=False)
    profiler = Profiler({"gllm": entrant}, {"gllm": tmp_path / "log"}, MIX, None, Meter(), rate=1.0)
    profiler._windows["gllm"] = windows
    admitted = next(record for record in records if record["e"] == "on_request")
    done = next(record for record in records if record["e"] == "on_batch_done")
    profiler._asked["gllm"] = [Asked(admitted["t"] - 0.01, done["t"] + 0.001, 10)]
    assert profiler.costs()["pace_unit_s"] == pytest.approx(1e-3)


def test_schemes_with_an_encoder_share_their_costs():
    assert {pool(entrant.name) for entrant in plan.entrants((0, 1), plan.OURS, one_core=True)} == {
        "gllm",
        "gllm-1core",
        "separate",
    }
    found = {entrant.name: seats(entrant) for entrant in plan.entrants((3, 5), plan.OURS, one_core=True)}
    assert found["gllm"] == {"stage": (3, 5)}
    assert found["gllm-1core"] == {"stage": (3,)}
    assert found["rserve"] == {"stage": (3,), "encoder": (5,)}


def test_spread_is_mean_and_standard_deviation():
    assert spread([1.0, 3.0]) == {"mean": 2.0, "sd": 1.0}
    assert spread([1.0]) == {"mean": 1.0, "sd": 0.0}  # and not NaN, which is no JSON


class Fake:
    """A profiler that notes when it was asked for a pass, and of which servers."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.taken: list[tuple[int, set[str]]] = []
        self.meter = self
        self.run = 0

    @property
    def passes(self) -> int:
        return len(self.taken)

    def sample(self, names) -> None:
        if self.fails:
            raise ServerFailed("it ended")
        self.taken.append((self.run, set(names)))

    def samples(self, begin, end):
        if self.fails:
            raise MeterFailed("it ended, too")
        assert (begin, end) == (100.0, 103.0)
        return {0: [(99.98, 1e-3), (101.5, 0.00200000049)]}

    def costs(self, digest):
        if not self.taken:
            raise ValueError("no pass was taken")
        return {"plan_digest": digest, "passes": self.passes, "left_out": {"gllm": "a reason"}}


class FakeBench:
    def __init__(self, *names: str, out: Path = Path()) -> None:
        self.servers = dict.fromkeys(names)
        self.out = out


def test_passes_are_spread_over_the_runs_and_take_the_servers_that_are_there():
    fake, bench = Fake(), FakeBench("gllm", "rserve", "vllm")
    passes = Passes(fake, bench, wanted=4)
    for fake.run in range(20):
        passes.before_run(fake.run, 20)
        if fake.run == 12:
            del bench.servers["rserve"]  # as a run does with a server that ended
    assert [run for run, _ in fake.taken] == [0, 5, 10, 15]
    assert [names for _, names in fake.taken][2:] == [{"gllm", "rserve", "vllm"}, {"gllm", "vllm"}]
    nobody = Passes(None, FakeBench("gllm"), wanted=4)
    nobody.before_run(0, 20)
    assert nobody.pace(0.0, 1.0) == {}
    nobody.write("d")


def test_a_server_or_a_meter_that_fails_costs_no_run(capsys):
    passes = Passes(Fake(fails=True), FakeBench("gllm"), wanted=2)
    passes.before_run(0, 4)
    assert "left out: it ended" in capsys.readouterr().err
    passes.write("d")
    assert "no costs: no pass was taken" in capsys.readouterr().err
    assert passes.pace(100.0, 3.0) == {}
    assert "it ended, too" in capsys.readouterr().err
    assert passes.profiler is None


def test_a_runs_pace_is_told_in_its_own_time():
    assert Passes(Fake(), FakeBench(), wanted=1).pace(100.0, 3.0) == {0: [(-0.02, 0.001), (1.5, 0.002)]}


def test_the_cost_file_of_more_passes_of_the_same_plan_stays(tmp_path, capsys):
    def written(count: int, digest: str) -> int:
        fake = Fake()
        passes = Passes(fake, FakeBench("gllm", out=tmp_path), wanted=count)
        for number in range(count):
            passes.before_run(number, count)
        passes.write(digest)
        return json.loads((tmp_path / FILE).read_text())["passes"]

    assert written(3, "a") == 3
    assert "no costs of gllm: a reason" in capsys.readouterr().err
    assert written(2, "a") == 3
    assert written(4, "a") == 4
    assert written(1, "b") == 1
