"""Costs in passes: a seat's process, what passes say together, and when they are taken."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.real import seat
from benchmarks.real.compare import Passes
from benchmarks.real.cost import SeatCost
from benchmarks.real.profile import medians
from benchmarks.real.seat import PIECES, Seat, collect
from benchmarks.real.servers import ServerFailed
from gllm.config import DEMO_CHECKPOINT, usable_cores

CORE = usable_cores()[0]


def test_passes_of_a_real_worker_give_costs():
    place = Seat((CORE,), 1)
    with ProcessPoolExecutor(1, get_context("spawn"), seat.open_seat, (DEMO_CHECKPOINT, place)) as pool:
        passes = [pool.submit(seat.one_pass, number).result() for number in range(2)]
        assert pool.submit(seat.keep_busy, "encode", 0.01).result() > 0
    assert all(len(times) == len(PIECES) and min(times) > 0 for times in passes)
    cost = SeatCost(collect(passes, [1.0, 1.0], place))
    assert cost.encode([64] * 8) > cost.encode([64])
    assert cost.chunks([(0, 1500)]) > cost.chunks([(0, 100)])


def test_a_cost_is_a_median_at_the_usual_speed():
    passes = [[seconds] * len(PIECES) for seconds in (1.0, 1.1, 4.0)]
    found = collect(passes, [1.0, 1.0, 2.0], Seat((0,), 1))
    assert found["prefill"][0] == {"spans": [[0, 1]], "seconds": 1.1}
    assert found["passes"] == 3
    assert medians([{"a": 0.5}, {"a": 0.9}, {"a": 7.0}], least=1.0) == {"a": 1.0}


def test_passes_are_spread_over_the_runs():
    taken = []

    class Fake:
        def sample(self, servers):
            taken.append(run)

        def probe(self):
            return 0.5

    class Bench:
        out = Path()
        servers = {"gllm": None, "rserve": None, "vllm": None}

        def pause_all_but(self, names):
            assert set(names) in ({"gllm", "rserve"}, set())

    passes = Passes(Fake(), Bench(), wanted=4)
    for run in range(20):
        passes.before_run(run, 20)
    assert taken == [0, 5, 10, 15]
    assert passes.taken == 4
    assert passes.probe() == 0.5
    nobody = Passes(None, Bench(), wanted=4)
    nobody.before_run(0, 20)
    assert nobody.probe() is None
    assert len(taken) == 4


def test_a_server_that_fails_costs_a_pass_and_not_the_runs(capsys):
    class Failing:
        def sample(self, servers):
            raise ServerFailed("it ended")

    class Bench:
        servers = {"gllm": None, "rserve": None}

        def pause_all_but(self, names):
            pass

    passes = Passes(Failing(), Bench(), wanted=2)
    passes.before_run(0, 4)
    assert "left out: it ended" in capsys.readouterr().err
    assert (passes.tried, passes.taken) == (1, 0)
    del Bench.servers["rserve"]  # as a run does with a server that ended
    passes.before_run(3, 4)
    assert passes.tried == 1
