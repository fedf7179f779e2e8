"""Measures what work costs on this machine, in the servers that are compared; writes a cost file for the simulator.

    python -m benchmarks.real.profile [--passes 8] [--results DIR]        # writes real-costs.json

Requests of their own seeds are put to each server, at a rate as in the runs and then one by one, and its event log
tells how long every encode batch and micro-batch took and what passed between them. A shared machine's cores change
their speed within a tenth of a second: `pace` tells the speed of the moment, and costs are those at the usual one.
`compare` takes passes in between its runs; this command takes them one after the other. `fidelity` lets the simulator
predict whole runs.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import results, workloads
from benchmarks.real import plan
from benchmarks.real.bench import CPU_MIX, make_setting, open_bench, say
from benchmarks.real.checkpoint import Size
from benchmarks.real.cost import dot, least_squares
from benchmarks.real.observe import Asked, Log, Window, Work
from benchmarks.real.pace import MeterFailed, Pace, PaceMeter
from benchmarks.real.plan import Entrant
from benchmarks.real.requests import Mix, Prepared, prepare
from benchmarks.real.servers import MODEL_NAME, ServerFailed
from benchmarks.sim.deployment import SEPARATE
from gllm.config import EngineConfig, usable_cores
from gllm.core import eventlog
from gllm.engine.placement import place

FILE = "real-costs.json"
LOADED, ALONE = 6, 3  # requests of one pass to one server: at the rate of a run, and one by one
ALONE_TOKENS = 4  # output tokens of each, so that there are decodes
RATE = 2.0  # of this command's passes, requests a second
SEED = 2_000_000
MIN_SAMPLES = 10  # spans of a kind of work, below which there is no cost

# A server's name and requests -> when they began, on the monotonic clock, and the client's report.
Load = Callable[[str, Sequence[Prepared]], tuple[float, dict[str, Any]]]


def pool(system: str) -> str:
    """Whose workers are alike: those of all schemes with an encoder of its own, and each of the others."""
    return "separate" if system in SEPARATE else system


def seats(entrant: Entrant) -> dict[str, tuple[int, ...]]:
    """The cores of a server's workers, as its engine binds them."""
    encoders = int(entrant.system in SEPARATE)
    placed = place(EngineConfig(model_path=""), entrant.cores, 1, encoders)
    return dict(zip(("stage", "encoder"), (one.cores or entrant.cores for one in placed), strict=False))


@dataclass(slots=True)
class Profiler:
    """Passes over servers, and what their logs say of them. load: sends requests to one of them and reports. rate,
    max_tokens: of the requests that come as in a run. Work takes longer then than one by one: workers rest in between,
    and the API process takes its share of their cores. passes: those that were taken over all that are there."""

    entrants: Mapping[str, Entrant]
    logs: Mapping[str, Path]
    mix: Mix
    load: Load
    meter: PaceMeter
    rate: float
    max_tokens: int = 1
    passes: int = 0
    _asked: dict[str, list[Asked]] = field(default_factory=dict)
    _windows: dict[str, list[Window]] = field(default_factory=dict)

    def sample(self, names: Collection[str]) -> None:
        """One pass over those of the servers that are still there. Raises ServerFailed; what it has of others stays."""
        seed = SEED + 2 * self.passes
        arrivals = workloads.poisson(self.rate, LOADED, seed)
        loaded = self._requests(arrivals, seed, self.max_tokens)
        alone = self._requests([0.0] * ALONE, seed + 1, ALONE_TOKENS)
        for name in self.entrants:
            if name not in names:
                continue
            self._serve(name, loaded)
            for request in alone:
                (outcome,), window = self._serve(name, [request])
                arrival, first_token = (window[0] + outcome[moment] for moment in ("arrival", "first_token"))
                self._asked.setdefault(name, []).append(Asked(arrival, first_token, len(request.body)))
        self.passes += 1

    def _requests(self, arrivals: Iterable[float], seed: int, max_tokens: int) -> list[Prepared]:
        return prepare(self.mix.shapes(arrivals, seed, max_tokens), MODEL_NAME, seed)

    def _serve(self, name: str, requests: Sequence[Prepared]) -> tuple[list[dict[str, Any]], Window]:
        begin, report = self.load(name, requests)
        if report["failed"]:
            raise ServerFailed(f"{name}: {report['errors']}")
        outcomes = report["outcomes"]
        window = begin, begin + max(outcome["finish"] for outcome in outcomes)
        self._windows.setdefault(name, []).append(window)
        return outcomes, window

    def costs(self, plan_digest: str | None = None) -> dict[str, Any]:
        """The cost file's content. plan_digest: of the runs between which the passes were taken. Servers of which too
        little is known are left out, with the reason. Raises ValueError when none is left, and MeterFailed."""
        windows = [window for found in self._windows.values() for window in found]
        if not windows:
            raise ValueError("no pass was taken")
        samples = self.meter.samples(min(begin for begin, _ in windows), max(end for _, end in windows))
        # Harmonic: at pace 1 as much work is done as in all the passes' time. The runs in between have no say in it.
        unit = statistics.harmonic_mean(
            [s for found in samples.values() for t, s in found if any(begin <= t <= end for begin, end in windows)]
        )
        workers, delays, left_out = self._fit(Pace(samples, unit))
        if not workers:
            raise ValueError(f"no server's costs are known: {left_out}")
        return {
            "kind": "measured",
            "machine": results.this_machine(),
            "commit": results.commit(),
            "plan_digest": plan_digest,
            "pace_unit_s": unit,
            "pace": {str(core): spread([s / unit for _, s in found]) for core, found in samples.items()},
            "passes": self.passes,
            "workers": workers,
            "delays": delays,
            "left_out": left_out,
            "config": {"size": {n: getattr(Size(), n) for n in Size.__slots__}},
        }

    def _fit(self, pace: Pace) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
        """Workers by pool; delays and reasons by server."""
        works: dict[str, list[Work]] = {}
        workers, delays, left_out = {}, {}, {}
        for name in self.entrants:
            try:
                with self.logs[name].open() as lines:
                    log = Log(eventlog.read(lines))
                works.setdefault(pool(name), []).extend(log.works(self._windows.get(name, ())))
                delays[name] = log.delays(self._asked.get(name, ())).described()
            except ValueError as error:
                left_out[name] = str(error)
        for name, entrant in self.entrants.items():
            try:
                if name not in left_out and pool(name) not in workers:
                    workers[pool(name)] = fit(works[pool(name)], seats(entrant), pace)
            except ValueError as error:
                left_out[name] = str(error)
        return workers, {name: found for name, found in delays.items() if pool(name) in workers}, left_out


def fit(works: Sequence[Work], cores: Mapping[str, tuple[int, ...]], pace: Pace) -> dict[str, Any]:
    """By worker: its cores, coefficients at pace 1 by kind of work, and how far single spans are from them. Raises
    ValueError when there are too few, and when workers share a core: the simulator's have one of their own each."""
    if len({core for bound in cores.values() for core in bound}) < sum(map(len, cores.values())):
        raise ValueError("its workers share a core")
    found: dict[str, Any] = {}
    for worker, bound in cores.items():
        found[worker] = {"cores": list(bound), "encode": [], "step": [], "spans": {}}
        for kind in ("encode", "step"):
            mine = [work for work in works if (work.worker, work.kind) == (worker, kind)]
            if not mine:
                continue
            if len(mine) < MIN_SAMPLES:
                raise ValueError(f"only {len(mine)} spans of {kind} by the {worker}: more passes are needed")
            features = [work.features for work in mine]
            seconds = [pace.usual_seconds(bound, work.start, work.end) for work in mine]
            coefficients = least_squares(features, seconds)
            ratios = [s / dot(coefficients, f) for s, f in zip(seconds, features, strict=True)]
            found[worker][kind] = coefficients
            found[worker]["spans"][kind] = {"count": len(mine), **spread(ratios)}
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation."""
    return {"mean": statistics.fmean(values), "sd": statistics.pstdev(values)}


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 when there are no costs."""
    args = parse(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cores = tuple(args.cores or usable_cores()[:2])
    with tempfile.TemporaryDirectory() as scratch:
        setting = make_setting(Path(scratch), None, CPU_MIX, cores)
        wanted = plan.entrants(cores, plan.OURS, one_core=True)
        try:
            with (
                open_bench(setting, wanted, CPU_MIX, Path(scratch), args.results) as bench,
                PaceMeter(cores) as meter,
            ):
                profiler = Profiler(bench.entrants, bench.logs, CPU_MIX, bench.timed_load, meter, RATE)
                for number in range(1, args.passes + 1):
                    try:
                        profiler.sample(bench.servers)
                    except ServerFailed as error:
                        say(f"  pass {number} is left out: {error}")
                    else:
                        say(f"  pass {number} of {args.passes}")
                costs = profiler.costs()
        except (ValueError, MeterFailed) as error:
            say(f"no costs: {error}")
            return 1
    results.write_json(args.results / FILE, costs)
    print(json.dumps({name: costs[name] for name in ("machine", "pace", "workers", "delays", "left_out")}))
    say(str(args.results / FILE))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=8, help="over all servers; about 25 seconds each")
    parser.add_argument("--cores", type=int, nargs="+", help="default: the first two that there are")
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
