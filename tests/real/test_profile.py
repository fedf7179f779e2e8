"""Costs from live servers: passes over real ones, who shares a cost, and when passes are taken."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from benchmarks.real import plan
from benchmarks.real.bench import Bench, open_bench
from benchmarks.real.compare import Passes
from benchmarks.real.cost import Delays, WorkerCost
from benchmarks.real.pace import PaceMeter
from benchmarks.real.profile import Profiler, pool, seats, spread
from benchmarks.real.requests import Mix
from benchmarks.real.servers import ServerFailed, Setting
from gllm.config import DEMO_CHECKPOINT, usable_cores

CORES = tuple(usable_cores()[:2])
MIX = Mix(images=(1, 3), side=(56, 112), text=(2, 40))


def test_passes_over_real_servers_give_costs(tmp_path):
    setting = Setting(checkpoint=DEMO_CHECKPOINT, cores=CORES)
    wanted = plan.entrants(CORES, ("gllm", "rserve"), one_core=False)
    with contextlib.ExitStack() as stack:
        bench: Bench = stack.enter_context(open_bench(setting, wanted, MIX, tmp_path, tmp_path))
        assert not bench.skipped
        meter = stack.enter_context(PaceMeter(CORES))
        profiler = Profiler(bench.entrants, bench.logs, MIX, bench.ask, meter)
        for _ in range(4):
            profiler.sample()
        time.sleep(0.3)  # the driver writes its log behind its work
        found = profiler.costs()
    assert found["passes"] == 4
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
    assert spread([1.0, 3.0]) == {"mean": 2.0, "sd": 2**0.5}


class Fake:
    """A profiler that notes when it was asked for a pass."""

    def __init__(self, taken: list[int] | None = None) -> None:
        self.entrants = {"gllm": None, "rserve": None}
        self.taken = taken

    def sample(self) -> None:
        if self.taken is None:
            raise ServerFailed("it ended")
        self.taken.append(run)


class FakeBench:
    out = Path()

    def __init__(self, *names: str) -> None:
        self.servers = dict.fromkeys(names)


run = 0


def test_passes_are_spread_over_the_runs():
    global run
    taken: list[int] = []
    passes = Passes(Fake(taken), FakeBench("gllm", "rserve", "vllm"), wanted=4)
    for run in range(20):
        passes.before_run(run, 20)
    assert taken == [0, 5, 10, 15]
    assert passes.taken == 4
    nobody = Passes(None, FakeBench("gllm"), wanted=4)
    nobody.before_run(0, 20)
    assert nobody.pace(0.0, 1.0) == {}
    nobody.write()
    assert len(taken) == 4


def test_a_server_that_fails_costs_a_pass_and_not_the_runs(capsys):
    bench = FakeBench("gllm", "rserve")
    passes = Passes(Fake(), bench, wanted=2)
    passes.before_run(0, 4)
    assert "left out: it ended" in capsys.readouterr().err
    assert (passes.tried, passes.taken) == (1, 0)
    del bench.servers["rserve"]  # as a run does with a server that ended
    passes.before_run(3, 4)
    assert passes.tried == 1


def test_a_runs_pace_is_told_in_its_own_time():
    class Meter:
        def samples(self, begin, end):
            assert (begin, end) == (100.0, 103.0)
            return {0: [(99.98, 1e-3), (101.5, 0.00200000049)]}

    profiler = Fake([])
    profiler.meter = Meter()
    assert Passes(profiler, FakeBench(), wanted=1).pace(100.0, 3.0) == {0: [(-0.02, 0.001), (1.5, 0.002)]}
