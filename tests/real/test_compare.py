"""The runner's decisions, files and tables; its servers are tested by the client's tests against a live one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.real import compare, plan, servers, summary
from benchmarks.real.bench import Bench, allow_pixels
from benchmarks.real.plan import Plan
from benchmarks.real.requests import Mix
from benchmarks.real.servers import Command, Server, ServerFailed, Setting, our_command, start, vllm_command
from benchmarks.sim.catalog import UnknownName
from gllm.entrypoints.cli import parse_server_args
from gllm.media.processor import ImageProcessor
from tests.live_server import wait_until
from tests.real.made_up import result

SETTING = Setting(checkpoint=Path("/checkpoint"), cores=(0, 1))
PLAN = Plan(
    workload="w", mix=Mix(), rates=(1.0, 2.0), seeds=(0, 1), count=4, max_tokens=1, slo=1.0, token_budget=64,
    checkpoint="c", model_path=None, capacity=3.0,
)  # fmt: skip


@pytest.mark.parametrize("scheme", plan.OURS)
def test_our_servers_get_flags_that_give_their_scheme(scheme):
    engine, server = parse_server_args(our_command(scheme, SETTING).args[3:])
    assert engine.scheme == scheme
    assert engine.limit_mm_per_prompt == {"image": 8}
    assert engine.kv_cache_memory_bytes == 1 << 30
    assert server.served_model_name == ("bench",)


def test_vllm_gets_the_same_budget_and_cores():
    command = vllm_command("python-of-vllm", SETTING)
    assert command.args[0] == "python-of-vllm"
    assert command.args[command.args.index("--max-num-batched-tokens") + 1] == "2048"
    assert command.env["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert command.url


def test_a_server_that_ends_at_once_says_why(tmp_path):
    command = Command((sys.executable, "-c", "import sys; sys.exit('no such thing')"))
    with pytest.raises(ServerFailed, match=r"(?s)status 1: .*no such thing"), start("x", command, (0,), tmp_path):
        pass


def test_a_server_that_does_not_rest_is_stopped_and_goes_on():
    spin = [sys.executable, "-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"]
    with subprocess.Popen(spin) as process:
        try:
            server = Server("x", "", process, Path(), Command((), rests=False))
            wait_until(lambda: server.cpu_seconds() > 0.2, 60, "a busy server")
            server.pause()
            wait_until(lambda: states(server) == {"T"}, 10, "all of it stopped")
            server.resume()
            wait_until(lambda: "R" in states(server), 10, "going on")
        finally:
            for pid in reversed(servers._tree(process.pid)):
                os.kill(pid, signal.SIGKILL)


def states(server: Server) -> set[str]:
    return {servers._stat(pid)[0] for pid in servers._tree(server.process.pid)}


def test_entrants_name_their_devices():
    found = plan.entrants((0, 1), plan.OURS, one_core=True)
    assert {e.name: e.devices for e in found} == {
        "gllm": "2 cores",
        "gllm-epd": "1 LLM + 1 encoder cores",
        "rserve-intra": "1 LLM + 1 encoder cores",
        "rserve": "1 LLM + 1 encoder cores",
        "gllm-1core": "1 core",
    }
    with pytest.raises(UnknownName, match="known: vllm, gllm"):
        plan.entrants((0, 1), ["no-such"], one_core=False)


def test_rates_and_counts_follow_the_capacity_and_the_time():
    rates = plan.choose_rates(10.0)
    assert len(rates) >= 5
    assert all(0 < rate < 10 for rate in rates)
    short, long = (plan.choose_count(seconds, rates, 3, 5) for seconds in (60, 600))
    assert plan.REQUESTS[0] <= short < long <= plan.REQUESTS[1]


def test_turns_change_and_everyone_has_one():
    names = ["a", "b", "c"]
    firsts = set()
    for seed in PLAN.seeds:
        for rate in PLAN.rates:
            order = PLAN.order(seed, rate, names)
            assert sorted(order) == names
            firsts.add(order[0])
    assert firsts == set(names)


def test_a_plan_comes_back_from_its_file(tmp_path):
    assert Plan.read(tmp_path) is None
    PLAN.save(tmp_path)
    assert Plan.read(tmp_path) == PLAN
    assert Plan.read(tmp_path).digest == PLAN.digest


def test_requests_of_a_rate_have_images_of_their_own():
    small = replace(PLAN, mix=Mix(images=(1, 1), side=(28, 56), text=(1, 2)))
    slow, fast = (compare.requests_of(small, 0, rate) for rate in small.rates)
    assert len(slow) == len(fast) == 4
    assert not {r.body for r in slow} & {r.body for r in fast}
    assert [r.sizes for r in slow] == [r.sizes for r in fast]


def test_what_is_finished_is_known_and_what_is_missing_is_named(tmp_path, capsys):
    done = result("gllm", 1.0, 0, 0.5, plan_digest=PLAN.digest)
    object.__setattr__(done, "name", compare.result_name("gllm", 1.0, 0))
    results.write(tmp_path, done)
    assert compare.is_finished(PLAN, tmp_path, "gllm", 1.0, 0)
    assert not compare.is_finished(PLAN, tmp_path, "gllm", 1.0, 1)
    (entrant,) = plan.entrants((0, 1), ["gllm"], one_core=False)
    bench = Bench(SETTING, {}, {"gllm": entrant}, {}, {"vllm": "not named"}, tmp_path)
    assert compare.conclude(PLAN, bench) == 0
    written = json.loads((tmp_path / "real-summary.json").read_text())
    assert written["skipped"] == {"vllm": "not named"}
    assert len(written["missing"]) == 3
    assert "skipped: vllm: not named" in capsys.readouterr().out


def test_rows_have_mean_and_spread_over_seeds_and_ratios():
    found = [result("rserve", 1.0, seed, ttft) for seed, ttft in ((0, 1.0), (1, 3.0))]
    found += [result("gllm-epd", 1.0, seed, 4.0) for seed in (0, 1)]
    table = summary.rows(found)
    by_name = {row["system"]: row for row in table}
    assert by_name["rserve"]["ttft_mean"] == 2.0
    assert by_name["rserve"]["spread"]["ttft_mean"] == pytest.approx(2**0.5)
    assert summary.ratios(table, "ttft_mean", "gllm-epd")["rserve"] == {1.0: 0.5}
    assert "2.000 ±1.414" in summary.text(table)


def test_a_written_checkpoint_takes_the_largest_image_as_it_is(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text('{"max_pixels": 1, "patch_size": 14}')
    allow_pixels(tmp_path, 100)
    processor = ImageProcessor(tmp_path)
    assert processor.grid(100, 100) == (1, 8, 8)


def test_a_run_is_written_with_the_pace_of_its_time(tmp_path):
    class Asked(Bench):
        def timed_load(self, name, requests, slo):
            if name == "gone":
                raise ServerFailed("it ended")
            return 50.0, result("gllm", 1.0, 0, 0.5).body

    class Paces:
        def pace(self, begin, seconds):
            assert (begin, seconds) == (50.0, 3.5)  # until the last request was served
            return {0: [(0.0, 1e-3)]}

    (entrant,) = plan.entrants((0, 1), ["gllm"], one_core=False)
    server = Server("gllm", "", None, Path(), Command(("/usr/bin/python", "-m", "x")))
    bench = Asked(SETTING, {"gllm": server, "gone": server}, {"gllm": entrant, "gone": entrant}, {}, {}, tmp_path)
    for name in ("gllm", "gone"):
        compare.run_one(PLAN, bench, Paces(), name, 1.0, 0, ())
    assert compare.is_finished(PLAN, tmp_path, "gllm", 1.0, 0)
    (written,) = compare.of_plan(PLAN, tmp_path)
    assert written.body["pace"] == {"0": [[0.0, 1e-3]]}
    assert "started" not in written.body
    assert written.config["command"] == ["python", "-m", "x"]
    assert bench.skipped == {"gone": "it ended"}
    assert list(bench.servers) == ["gllm"]


def test_servers_of_a_real_checkpoint_keep_no_log(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(compare, "open_bench", lambda *args, **fields: asked.update(fields, wanted=args[1]))
    for given, logged, names in (
        ([], True, [*plan.OURS, "gllm-1core", "vllm"]),
        (["--model-path", "/model"], False, [*plan.OURS, "vllm"]),
    ):
        compare.bench_of(compare.parse([*given, "--vllm-python", "python-of-vllm"]), SETTING, tmp_path)
        assert asked["logged"] is logged
        assert [entrant.name for entrant in asked["wanted"]] == names
