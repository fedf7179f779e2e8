"""All figures and the table of claims: what run_all.sh starts.

python -m benchmarks.figures.run [--sim-only] [--full] [--figure N] [--vllm-python PYTHON] [--model-path DIR]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import results
from benchmarks.figures.curves import LOADS, NUM_REQUESTS, SEEDS
from benchmarks.figures.frame import POINTS, RELATIVE, FigureModule, Row, table
from benchmarks.figures.points import MissingResult, load, run_all
from benchmarks.sim.catalog import UnknownName
from benchmarks.sim.fitted import describe

# Figure -> the script that draws it.
FIGURES = {
    "2": "fig02", "5": "fig05", "7": "fig07", "10": "fig10", "12": "fig12", "13": "fig13", "14": "fig14", "16": "fig16",
    "17": "fig17", "18": "fig18", "19": "fig18", "20": "fig20", "a100": "a100", "table1": "table1", "budget": "budget",
    "separation": "separation", "measured": "measured", "fidelity": "fidelity",
}  # fmt: skip
MEASURED = "benchmarks.real.run"
# What the paper leaves open and we chose; printed above the table.
CHOICES = (
    f"rates: ours, the shares {LOADS} of the rate at which the simulated RServe saturates; {NUM_REQUESTS} requests, "
    f"{len(SEEDS)} seeds",
    "token budget B = 2048 for all schemes, C = 1024, output of 1 token, no prefix cache; see `budget` for others",
    f"a number holds within {RELATIVE:.0%} of the paper's, or {100 * POINTS:.0f} points of a percentage; all but the "
    "two fitted numbers is predicted",
)


def figure(name: str) -> FigureModule:
    """Raises UnknownName, which lists the known figures."""
    if name not in FIGURES:
        raise UnknownName(f"unknown figure {name!r}; known: {', '.join(FIGURES)}")
    module: FigureModule = importlib.import_module(f"benchmarks.figures.{FIGURES[name]}")
    return module


def exists(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def run_measured(args: argparse.Namespace) -> list[Row]:
    """Start the measured runs where there are any; a row for each part that is skipped or failed."""
    skipped = []
    if args.vllm_python is None:
        skipped.append(_skipped("vLLM's CPU server beside ours", "no --vllm-python"))
    if not exists(MEASURED):
        return [*skipped, _skipped("measured runs of all schemes", f"this checkout has no {MEASURED}")]
    command = [sys.executable, "-m", MEASURED, "--results", str(args.results)]
    command += ["--full"] if args.full else []
    command += ["--vllm-python", args.vllm_python] if args.vllm_python else []
    command += ["--model-path", args.model_path] if args.model_path else []
    answer = subprocess.run(command, check=False)
    if answer.returncode:
        skipped.append(_skipped("measured runs of all schemes", f"{MEASURED} ended with {answer.returncode}"))
    return skipped


def _skipped(claim: str, reason: str) -> Row:
    return Row(figure="measured", claim=claim, paper="-", ours="skipped", holds=None, kind="measured", note=reason)


def draw_all(modules: Sequence[FigureModule], folder: Path) -> list[Row]:
    """Rows of all figures whose results are there; a row that names what is missing for the others."""
    rows = []
    for module in modules:
        try:
            rows += module.draw(folder)
        except MissingResult as error:
            missing = sum(load(folder, point) is None for point in module.points())
            rows.append(
                Row(figure=module.NUMBER, claim="not drawn", paper="-", ours="-", holds=None,
                    note=f"{missing} of {len(module.points())} runs are missing: {error}")
            )  # fmt: skip
    return rows


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sim-only", action="store_true", help="no measured runs (results that are there are drawn)")
    parser.add_argument("--full", action="store_true", help="the measured part in its long form")
    parser.add_argument("--figure", action="append", metavar="N", help=f"only these: {', '.join(FIGURES)}")
    parser.add_argument("--vllm-python", metavar="PYTHON", help="a Python that has vLLM, to measure it as well")
    parser.add_argument("--model-path", metavar="DIR", help="a real checkpoint for the measured runs")
    parser.add_argument("--results", type=Path, default=results.RESULTS, metavar="DIR", help="folder of result files")
    args = parser.parse_args(argv)
    args.figure = args.figure or list(FIGURES)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        modules = list(dict.fromkeys(figure(name) for name in args.figure))
    except UnknownName as error:
        print(error, file=sys.stderr)
        return 2
    interrupted = False
    try:
        run_all(args.results, [point for module in modules for point in module.points()])
        skipped = [] if args.sim_only else run_measured(args)
    except KeyboardInterrupt:
        interrupted, skipped = True, []
    rows = draw_all(modules, args.results) + skipped
    results.write_json(args.results / "summary.json", [asdict(row) for row in rows])
    print("\n".join([*describe(), *CHOICES]))
    print(table(rows))
    print(f"{args.results / 'summary.json'}", file=sys.stderr)
    return 130 if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
