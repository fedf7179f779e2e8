"""All schemes' real servers under the same load on the same cores; results are written as soon as each run is finished.

    python -m benchmarks.real.compare --quick                         # within 15 minutes on two cores
    python -m benchmarks.real.compare --full --vllm-python PYTHON     # longer runs, and vLLM's CPU server beside ours
    python -m benchmarks.real.compare --full --model-path DIR         # a real checkpoint, e.g. on a GPU machine
    python -m benchmarks.real.compare --resume                        # what an interrupted run left undone

All servers run all the time, and one is asked at a time, so that schemes take turns within seconds. An idle server of
ours uses no CPU; vLLM's is stopped meanwhile (the CPU time of those not asked is in every result). Without a
checkpoint: random weights, about 80 M parameters; and what `fidelity` needs is measured along with it: in between, what
single pieces of work cost, and during each run, how fast each core is (a meter at 2 to 4 % of it). Our servers then
write event logs, vLLM's does not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import results, workloads
from benchmarks.real import plan, summary
from benchmarks.real.bench import Bench, make_setting, mix_of, open_bench, say
from benchmarks.real.pace import MeterFailed, PaceMeter
from benchmarks.real.plan import Entrant, Plan
from benchmarks.real.profile import FILE, Profiler
from benchmarks.real.requests import Prepared, prepare
from benchmarks.real.servers import MODEL_NAME, ServerFailed, Setting
from benchmarks.results import Result

CALIBRATION_SEED = 1_000_002
CALIBRATION_REQUESTS = 10
MINUTES = {"quick": 6.5, "full": 45.0}  # of the runs proper; starting, warming up and calibrating come on top
SEEDS = {"quick": 3, "full": 6}
PASSES = {"quick": 6, "full": 20}  # of the profiler over all servers, in between the runs
OVERTIME = 1.25  # of the minutes, after which no run is begun
FIGURE = "measured"  # where these runs are drawn


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    begin = time.monotonic()
    # A runner that is ended must end its servers: SIGTERM unwinds as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        setting = make_setting(Path(scratch), args.model_path, mix_of(args), args.cores, args.token_budget)
        bench = stack.enter_context(bench_of(args, setting, Path(scratch)))
        if not args.vllm_python:
            bench.skipped["vllm"] = "no Python with vLLM was named (--vllm-python)"
        if not bench.servers:
            say(f"no server started: {json.dumps(bench.skipped, indent=1)}")
            return 1
        chosen = Plan.read(args.results) if args.resume else None
        chosen = chosen or make_plan(args, bench)
        chosen.save(args.results)
        say(f"{time.monotonic() - begin:.0f} s to here; {describe(chosen, bench)}")
        passes = Passes(profiler_of(chosen, bench, stack), bench, PASSES[args.form])
        try:
            run_all(chosen, bench, passes, deadline=time.monotonic() + 60 * OVERTIME * minutes(args))
        except KeyboardInterrupt:
            say("interrupted: what is finished stays; --resume does the rest")
        status = conclude(chosen, bench)
        passes.write(chosen.digest)
        return status


def profiler_of(chosen: Plan, bench: Bench, stack: contextlib.ExitStack) -> Profiler | None:
    """None when no server keeps a log, or the cores' pace cannot be metered."""
    if not bench.logs:
        return None
    try:
        meter = stack.enter_context(PaceMeter(bench.setting.cores))
    except MeterFailed as error:
        say(f"nothing is profiled: {error}")
        return None
    ours = {name: bench.entrants[name] for name in bench.logs}
    middle = chosen.rates[len(chosen.rates) // 2]
    return Profiler(ours, bench.logs, chosen.mix, bench.timed_load, meter, middle, chosen.max_tokens)


def bench_of(args: argparse.Namespace, setting: Setting, scratch: Path) -> AbstractContextManager[Bench]:
    """All entrants. The simulator's costs are those of CPU workers, so servers of a real checkpoint keep no log."""
    wanted = plan.entrants(setting.cores, args.systems, one_core=not args.no_one_core and args.model_path is None)
    if args.vllm_python:
        wanted.append(Entrant("vllm", setting.cores, "vllm"))
    return open_bench(
        setting, wanted, mix_of(args), scratch, args.results, vllm_python=args.vllm_python, max_tokens=args.max_tokens,
        logged=args.model_path is None,
    )  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", dest="form", action="store_const", const="quick", help="the default")
    length.add_argument("--full", dest="form", action="store_const", const="full")
    parser.set_defaults(form="quick")
    parser.add_argument("--minutes", type=float, help=f"of the runs proper; default {MINUTES}")
    parser.add_argument("--model-path", type=Path, help="default: random weights, written for this run")
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM; without it vLLM is skipped")
    parser.add_argument("--systems", nargs="+", default=plan.OURS, help=f"default: {' '.join(plan.OURS)}")
    parser.add_argument("--cores", type=int, nargs="+", help="default: the first two that there are")
    parser.add_argument("--no-one-core", action="store_true", help="leave out the baseline on a single core")
    parser.add_argument("--rates", type=float, nargs="+", help="requests a second; default: by what gLLM can serve")
    parser.add_argument("--seeds", type=int, nargs="+", help=f"one run each at every rate; default: {SEEDS} of them")
    parser.add_argument("--requests", type=int, help="of one run; default: by --minutes")
    parser.add_argument("--max-tokens", type=int, default=1, help="output tokens; the paper's main figures have 1")
    parser.add_argument("--images", type=int, nargs=2, help="fewest and most of a request; default 1 8")
    parser.add_argument("--sides", type=int, nargs=2, help="least and greatest side of an image, pixels")
    parser.add_argument("--text", type=int, nargs=2, help="fewest and most words of a request")
    parser.add_argument("--token-budget", type=int, default=2048)
    parser.add_argument("--resume", action="store_true", help="go on with the plan in --results")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="folder of result files")
    return parser.parse_args(argv)


def minutes(args: argparse.Namespace) -> float:
    return float(args.minutes or MINUTES[args.form])


# ---- the plan -----------------------------------------------------------------------------------------------------


def make_plan(args: argparse.Namespace, bench: Bench) -> Plan:
    """Rates, SLO and count from what the first server (the baseline) can do."""
    first, mix = next(iter(bench.servers)), mix_of(args)
    shapes = mix.shapes([0.0] * CALIBRATION_REQUESTS, CALIBRATION_SEED, args.max_tokens)
    requests = prepare(shapes, MODEL_NAME, CALIBRATION_SEED)
    alone = [bench.load(first, requests[i : i + 1], 1.0)["summary"]["ttft_mean"] for i in range(4)]
    capacity = bench.load(first, requests, 1.0)["summary"]["requests_per_s"]
    rates = tuple(sorted(args.rates)) if args.rates else plan.choose_rates(capacity)
    seeds = tuple(args.seeds or range(SEEDS[args.form]))
    return Plan(
        workload=f"random images, {mix.images[0]} to {mix.images[1]} a request",
        mix=mix,
        rates=rates,
        seeds=seeds,
        count=args.requests or plan.choose_count(60 * minutes(args), rates, len(seeds), len(bench.servers)),
        max_tokens=args.max_tokens,
        slo=float(f"{plan.SLO_FACTOR * sum(alone) / len(alone):.2g}"),
        token_budget=args.token_budget,
        checkpoint=args.model_path.resolve().name if args.model_path else "random weights, 80 M parameters, seed 0",
        model_path=str(args.model_path) if args.model_path else None,
        capacity=capacity,
    )


def describe(chosen: Plan, bench: Bench) -> str:
    runs = len(chosen.rates) * len(chosen.seeds) * len(bench.servers)
    return (
        f"{runs} runs of {chosen.count} requests, {chosen.workload}, at {', '.join(map('{:g}'.format, chosen.rates))} "
        f"requests/s (the first system serves at most {chosen.capacity:.2f}), SLO {chosen.slo:g} s"
    )


# ---- running ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Passes:
    """Passes of the profiler, spread evenly over the runs: costs and runs meet the same moods of the machine."""

    profiler: Profiler | None
    bench: Bench
    wanted: int
    tried: int = 0

    def before_run(self, number: int, total: int) -> None:
        """number: of the run, from 0."""
        is_due = self.tried * total <= number * self.wanted
        if self.profiler is None or not is_due:
            return
        self.tried += 1
        try:
            self.profiler.sample(self.bench.servers)
        except ServerFailed as error:
            say(f"a pass of the profiler is left out: {error}")

    def pace(self, begin: float, seconds: float) -> dict[int, list[tuple[float, float]]]:
        """Samples of the cores' pace in a run, in seconds after its begin; none where nothing is profiled."""
        if self.profiler is None:
            return {}
        try:
            found = self.profiler.meter.samples(begin, begin + seconds)
        except MeterFailed as error:
            say(f"nothing is profiled from here on: {error}")
            self.profiler = None
            return {}
        return {core: [(round(t - begin, 4), round(s, 7)) for t, s in samples] for core, samples in found.items()}

    def write(self, plan_digest: str) -> None:
        """The cost file, unless there is one for the same plan from more passes (before an interruption)."""
        if self.profiler is None:
            return
        path = self.bench.out / FILE
        known = json.loads(path.read_text()) if path.exists() else {}
        if known.get("plan_digest") == plan_digest and known["passes"] >= self.profiler.passes:
            return
        try:
            costs = self.profiler.costs(plan_digest)
        except (ValueError, MeterFailed) as error:
            say(f"no costs: {error}")
            return
        results.write_json(path, costs)
        for name, reason in costs["left_out"].items():
            say(f"no costs of {name}: {reason}")


def run_all(chosen: Plan, bench: Bench, passes: Passes, deadline: float) -> None:
    """Every seed, rate and system, in turns. What is finished is kept; after the deadline nothing more is begun."""
    total = len(chosen.seeds) * len(chosen.rates) * len(bench.servers)
    done = 0
    for seed in chosen.seeds:
        for rate in chosen.rates:
            requests = requests_of(chosen, seed, rate)
            for name in chosen.order(seed, rate, list(bench.servers)):
                done += 1
                if is_finished(chosen, bench.out, name, rate, seed) or name not in bench.servers:
                    continue
                if time.monotonic() > deadline:
                    say("out of time: what is finished stays; --resume does the rest")
                    return
                passes.before_run(done - 1, total)
                run_one(chosen, bench, passes, name, rate, seed, requests)
                say(f"  {done} of {total} runs")


def requests_of(chosen: Plan, seed: int, rate: float) -> list[Prepared]:
    """The same shapes at every rate, but images of their own: no cache of any system can help."""
    shapes = chosen.mix.shapes(workloads.poisson(rate, chosen.count, seed), seed, chosen.max_tokens)
    return prepare(shapes, MODEL_NAME, seed * 1000 + chosen.rates.index(rate), logprobs=chosen.max_tokens > 1)


def run_one(
    chosen: Plan, bench: Bench, passes: Passes, name: str, rate: float, seed: int, requests: Sequence[Prepared]
) -> None:
    entrant, server = bench.entrants[name], bench.servers[name]
    try:
        started, body = bench.timed_load(name, requests, chosen.slo)
    except ServerFailed as error:
        bench.skipped[name] = str(error)
        del bench.servers[name]
        say(f"{name} is left out from here on: {error}")
        return
    last = max(outcome["finish"] for outcome in body["outcomes"])
    body["pace"] = passes.pace(started, last)
    config = {
        "figure": FIGURE,
        "system": name,
        "devices": entrant.devices,
        "cores": entrant.cores,
        "workload": chosen.workload,
        "rate": rate,
        "plan": chosen.described(),
        "plan_digest": chosen.digest,
        "command": _without_paths(server.command.args),
        "env": server.command.env,
    }
    results.write(
        bench.out,
        Result(
            kind="measured",
            name=result_name(name, rate, seed),
            config=config,
            seed=seed,
            commit=results.commit(),
            machine=results.this_machine(),
            body=body,
        ),
    )


def result_name(name: str, rate: float, seed: int) -> str:
    return f"load-{name}-{rate:g}-s{seed}"


def is_finished(chosen: Plan, out: Path, name: str, rate: float, seed: int) -> bool:
    found = results.read(out, "measured", result_name(name, rate, seed))
    return found is not None and found.config.get("plan_digest") == chosen.digest


def conclude(chosen: Plan, bench: Bench) -> int:
    """Print and write the table of what is there; 1 when nothing is."""
    table = summary.rows(of_plan(chosen, bench.out))
    wanted = [(n, r, s) for n in bench.entrants for r in chosen.rates for s in chosen.seeds]
    missing = [result_name(*key) for key in wanted if not is_finished(chosen, bench.out, *key)]
    ratios = {metric: summary.ratios(table, metric, "gllm-epd") for metric in ("ttft_mean", "input_tokens_per_s")}
    results.write_json(
        bench.out / "real-summary.json",
        {
            "kind": "measured",
            "machine": results.this_machine(),
            "commit": results.commit(),
            "plan": chosen.described(),
            "rows": table,
            "ratio_to_gllm_epd": ratios,
            "skipped": bench.skipped,
            "missing": missing,
        },
    )
    print(summary.text(table))
    for name, reason in bench.skipped.items():
        print(f"skipped: {name}: {reason.splitlines()[0] if reason else ''}")
    if missing:
        print(f"missing: {len(missing)} runs: {', '.join(missing)}")
    return 0 if table else 1


def of_plan(chosen: Plan, out: Path) -> list[Result]:
    """The measured load runs that belong to this plan."""
    return [r for r in results.measured(out) if r.config.get("plan_digest") == chosen.digest]


def _without_paths(args: Sequence[str]) -> list[str]:
    """What was started, without where things lie on this machine."""
    return [os.path.basename(arg) if arg.startswith("/") else arg for arg in args]


if __name__ == "__main__":
    sys.exit(main())
