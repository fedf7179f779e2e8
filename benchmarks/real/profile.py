"""Measures what work costs on this machine, on cores as the schemes use them; writes a cost file for the simulator.

    python -m benchmarks.real.profile [--passes 8] [--results DIR]        # writes real-costs.json

Every piece of work is timed by itself, with the real StageRunner and VisionEncoder, on cores that are otherwise idle. A
shared machine's speed changes within seconds, so `compare` takes the passes in between its runs, and probes the speed
before and after each of them; this command takes passes one after the other. `fidelity` lets the simulator predict
whole runs from the file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.real import overheads, seat
from benchmarks.real.bench import CPU_MIX, make_setting
from benchmarks.real.checkpoint import Size
from benchmarks.real.seat import Seat
from benchmarks.real.servers import Server, our_command, start
from gllm.config import EngineConfig, usable_cores
from gllm.engine.placement import place
from gllm.models.loader import resolve_dtype
from gllm.models.registry import model_info

FILE = "real-costs.json"
BESIDE_SECONDS = 0.5
SEATS = ("baseline", "stage", "encoder")
SERVERS = ("gllm", "rserve")  # live ones that a pass asks


class Profiler:
    """Costs of a checkpoint on the first two of `cores`, in passes, at the seats that the engine would give to its
    workers: `baseline` (a stage alone), `stage` and `encoder` (beside each other). Each is a process that rests between
    passes. Cores are not equal: the first one also has the machine's own work."""

    def __init__(self, checkpoint: Path, cores: Sequence[int]) -> None:
        self._checkpoint = checkpoint
        self._cores = tuple(cores[:2])
        self._stack = contextlib.ExitStack()
        config = EngineConfig(model_path=str(checkpoint))
        placed = [*place(config, self._cores, 1, 0), *place(config, self._cores, 1, 1)]
        self._seats = {name: Seat(one.cores, one.threads) for name, one in zip(SEATS, placed, strict=True)}
        self._pools: dict[str, ProcessPoolExecutor] = {}
        self._probes: list[float] = []
        self._passes: dict[str, list[list[float]]] = {name: [] for name in SEATS}
        self._beside: list[dict[str, float]] = []
        self._overheads: list[dict[str, float]] = []

    def __enter__(self) -> Profiler:
        # As the engine starts its workers: threads that wait must not spin on a core that another process could use.
        os.environ.update(OMP_WAIT_POLICY="PASSIVE", KMP_BLOCKTIME="0")
        context = multiprocessing.get_context("spawn")
        with contextlib.ExitStack() as stack:
            for name, place in self._seats.items():
                pool = ProcessPoolExecutor(1, context, seat.open_seat, (self._checkpoint, place))
                self._pools[name] = stack.enter_context(pool)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def sample(self, servers: Mapping[str, Server]) -> None:
        """One pass over all pieces of work, on idle cores; one that does not end counts for nothing. servers: those of
        SERVERS. Raises ServerFailed."""
        number = len(self._overheads) + 1
        probes, times = [self.probe()], {}
        for name in self._passes:
            times[name] = self._pools[name].submit(seat.one_pass, number).result()
            probes.append(self.probe())
        beside = self._slow_down()
        around = overheads.measure_servers(servers["gllm"], servers["rserve"])
        for name, passes in self._passes.items():
            passes.append(times[name])
        self._probes.append(statistics.fmean(probes))
        self._beside.append(beside)
        self._overheads.append(around)

    def probe(self) -> float:
        """Mean seconds of a piece of work on all cores at once, for half a second: how fast the machine is now."""
        jobs = [self._pools[name].submit(seat.keep_busy, "prefill", BESIDE_SECONDS) for name in ("stage", "encoder")]
        return statistics.fmean(job.result() for job in jobs)

    def _slow_down(self) -> dict[str, float]:
        """How many times longer encode and prefill take while the other runs on the other core."""
        pools = {"encode": self._pools["encoder"], "prefill": self._pools["stage"]}
        alone = {kind: pool.submit(seat.keep_busy, kind, BESIDE_SECONDS).result() for kind, pool in pools.items()}
        jobs = {kind: pool.submit(seat.keep_busy, kind, BESIDE_SECONDS) for kind, pool in pools.items()}
        return {kind: job.result() / alone[kind] for kind, job in jobs.items()}

    def costs(self) -> dict[str, Any]:
        """The cost file's content: medians over the passes, at the speed at which a probe takes `probe_s`."""
        usual = statistics.median(self._probes)
        paces = [probe / usual for probe in self._probes]
        info = model_info(self._checkpoint)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            preprocessing = pool.submit(overheads.measure_preprocessing, self._checkpoint, self._cores).result()
        return {
            "kind": "measured",
            "machine": results.this_machine(),
            "commit": results.commit(),
            "probe_s": usual,
            "seats": {name: seat.collect(passes, paces, self._seats[name]) for name, passes in self._passes.items()},
            "beside": medians(self._beside, least=1.0),
            "preprocessing": preprocessing,
            "transfer_token_s": overheads.measure_transfer(info.hidden_size, resolve_dtype(self._checkpoint, "auto")),
            "servers": medians(self._overheads),
            "config": {"cores": len(self._cores), "size": {n: getattr(Size(), n) for n in Size.__slots__}},
        }


def medians(passes: Sequence[Mapping[str, float]], least: float = 0.0) -> dict[str, float]:
    return {name: max(least, statistics.median(one[name] for one in passes)) for name in passes[0]}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    cores = tuple(args.cores or usable_cores()[:2])
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        setting = make_setting(Path(scratch), None, CPU_MIX, cores)
        profiler = stack.enter_context(Profiler(setting.checkpoint, cores))
        servers = {
            name: stack.enter_context(start(name, our_command(name, setting), cores, Path(scratch))) for name in SERVERS
        }
        for number in range(1, args.passes + 1):
            profiler.sample(servers)
            print(f"  pass {number} of {args.passes}", file=sys.stderr, flush=True)
        costs = profiler.costs()
    path = args.results / FILE
    results.write_json(path, costs)
    print(json.dumps({name: costs[name] for name in ("machine", "beside", "servers", "transfer_token_s")}))
    print(path, file=sys.stderr)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=8, help="over all pieces of work")
    parser.add_argument("--cores", type=int, nargs="+", help="default: the first two that there are")
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
