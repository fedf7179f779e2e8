"""Measures what work costs on this machine, on cores as the schemes use them; writes a cost file for the simulator.

    python -m benchmarks.real.profile [--quick] [--model-path DIR] [--results DIR]        # writes real-costs.json

Every piece of work is timed by itself, with the real StageRunner and VisionEncoder, on cores that are otherwise idle.
`fidelity` lets the simulator predict whole runs from it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.real import overheads, seat
from benchmarks.real.bench import CPU_MIX, allow_pixels
from benchmarks.real.checkpoint import Size, write_checkpoint
from benchmarks.real.seat import Grid, Seat
from benchmarks.real.servers import Setting
from gllm.config import usable_cores
from gllm.models.loader import resolve_dtype
from gllm.models.registry import model_info

FILE = "real-costs.json"
BESIDE_SECONDS = {"quick": 3.0, "full": 10.0}
REPEATS = {"quick": 12, "full": 40}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    # As the engine starts its workers: threads that wait must not spin on a core that another process could use.
    os.environ.update(OMP_WAIT_POLICY="PASSIVE", KMP_BLOCKTIME="0")
    cores = tuple(args.cores or usable_cores()[:2])
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = args.model_path or Path(scratch, "checkpoint")
        if args.model_path is None:
            write_checkpoint(checkpoint)
            allow_pixels(checkpoint, CPU_MIX.side[1])
        costs = measure(checkpoint, cores, args.form, Path(scratch))
    path = args.results / FILE
    results.write_json(path, costs)
    print(json.dumps({name: costs[name] for name in ("machine", "beside", "servers", "transfer_token_s")}))
    print(path, file=sys.stderr)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", dest="form", action="store_const", const="quick", default="full")
    parser.add_argument("--model-path", type=Path, help="default: random weights, about 80 M parameters")
    parser.add_argument("--cores", type=int, nargs="+", help="default: the first two that there are")
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    return parser.parse_args(argv)


def measure(checkpoint: Path, cores: tuple[int, ...], form: str, scratch: Path) -> dict[str, Any]:
    """The cost file's content. Seats are named by their threads: "1" is one core, the other the baseline's cores."""
    grid = seat.QUICK if form == "quick" else Grid()
    seats = {str(len(used)): Seat(used, len(used)) for used in ((cores[-1],), cores)}
    found: dict[str, Any] = {"kind": "measured", "machine": results.this_machine(), "commit": results.commit()}
    found["seats"] = {}
    for name, where in seats.items():
        say(f"work on {name} core(s)")
        found["seats"][name] = alone(seat.measure, checkpoint, where, grid)
    say("two workers beside each other")
    found["beside"] = beside(checkpoint, cores, BESIDE_SECONDS[form]) if len(cores) > 1 else None
    say("preprocessing, transfer, servers")
    found["preprocessing"] = alone(overheads.measure_preprocessing, checkpoint, cores, REPEATS[form])
    info = model_info(checkpoint)
    found["transfer_token_s"] = overheads.measure_transfer(info.hidden_size, resolve_dtype(checkpoint, "auto"))
    setting = Setting(checkpoint=checkpoint, cores=cores)
    found["servers"] = overheads.measure_servers(setting, scratch, REPEATS[form])
    found["config"] = {"form": form, "cores": len(cores), "size": {n: getattr(Size(), n) for n in Size.__slots__}}
    return found


def beside(checkpoint: Path, cores: tuple[int, ...], seconds: float) -> dict[str, float]:
    """How many times longer encode and prefill take while the other runs on the other core."""
    places = {"encode": Seat((cores[-1],), 1), "prefill": Seat((cores[0],), 1)}
    single = {kind: alone(seat.measure_beside, checkpoint, place, kind, seconds) for kind, place in places.items()}
    with _pool(2) as pool:
        jobs = {kind: pool.submit(seat.measure_beside, checkpoint, places[kind], kind, seconds) for kind in places}
        return {kind: max(1.0, job.result() / single[kind]) for kind, job in jobs.items()}


def alone(work: Callable[..., Any], *args: Any) -> Any:
    """Run in a fresh process: what binds itself to cores or sets threads does so once."""
    with _pool(1) as pool:
        return pool.submit(work, *args).result()


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
