"""Everything that is measured on this machine, part by part: all schemes under load and what single pieces of work
cost, the simulator's prediction of these runs, timelines, and Table 1. A part that fails is named, and others go on.

    python -m benchmarks.real.run [--full] [--vllm-python PYTHON] [--model-path DIR] [--results DIR]

The quick form (default) takes at most 15 minutes on two idle cores; `--only` starts some parts alone.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import results


@dataclass(frozen=True, slots=True)
class Part:
    """A module with a command line of its own, and its arguments."""

    name: str
    module: str
    args: tuple[str, ...]


def parts(args: argparse.Namespace) -> list[Part]:
    """In order: a prediction needs runs."""
    where = ("--results", str(args.results))
    model = ("--model-path", str(args.model_path)) if args.model_path else ()
    vllm = ("--vllm-python", args.vllm_python) if args.vllm_python else ()
    resume = ("--resume",) if args.resume else ()
    found = [Part("load", "benchmarks.real.compare", (f"--{args.form}", *model, *vllm, *resume, *where))]
    if args.model_path is None:
        found.append(Part("fidelity", "benchmarks.real.fidelity", where))
    found.append(Part("timelines", "benchmarks.real.timelines", (*model, *where)))
    questions = "500" if args.form == "full" else "200"
    found.append(Part("table1", "benchmarks.functional.held_out", ("-n", questions, *where)))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """0 when all parts were done, 1 when one failed, 130 when interrupted."""
    args = parse(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    failed = []
    chosen = [part for part in parts(args) if not args.only or part.name in args.only]
    for part in chosen:
        print(f"== {part.name}", file=sys.stderr, flush=True)
        begin = time.monotonic()
        try:
            status = start(part)
        except KeyboardInterrupt:
            print(f"interrupted in {part.name}; what is finished stays", file=sys.stderr)
            return 130
        print(f"== {part.name}: status {status}, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        if status:
            failed.append(part.name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def start(part: Part) -> int:
    """Its exit status. When this process is interrupted, the part is too, and gets the time to end its servers."""
    with subprocess.Popen([sys.executable, "-m", part.module, *part.args]) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", dest="form", action="store_const", const="quick", help="the default")
    length.add_argument("--full", dest="form", action="store_const", const="full", help="longer runs, all questions")
    parser.set_defaults(form="quick")
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM")
    parser.add_argument("--model-path", type=Path, help="a real checkpoint, for the load part")
    parser.add_argument("--resume", action="store_true", help="go on with the load runs of the plan in --results")
    parser.add_argument(
        "--only", nargs="+", choices=("load", "fidelity", "timelines", "table1"), help="only these parts"
    )
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="folder of result files")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
