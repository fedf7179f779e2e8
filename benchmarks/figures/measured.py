"""Measured runs in figures: their curves, their rows, and the figure of all measured rates and image counts.

A measured result file has in its `config`: "figure" (the figure it belongs to; "measured" for the general comparison),
"system" (a name of benchmarks/systems.py), "workload", "rate" (requests a second) and "devices"; its `body` has the
"summary" of benchmarks/metrics.py. Runs that differ in the seed alone are repetitions: means are shown with their
spread.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import results
from benchmarks.figures.frame import Row, main, percent, save
from benchmarks.figures.points import Point
from benchmarks.metrics import mean
from benchmarks.results import Result
from benchmarks.systems import SYSTEMS, system

NUMBER = "measured"
Cell = dict[float, list[float]]


def points() -> list[Point]:
    return []


def runs(folder: Path, figure: str) -> list[Result]:
    """Measured results of a figure, of known systems; runs in which nothing finished have no summary."""
    found = (r for r in results.measured(folder) if r.config.get("figure") == figure and "summary" in r.body)
    return [result for result in found if result.config.get("system") in SYSTEMS]


def curves(found: Sequence[Result], metric: str) -> dict[str, Cell]:
    """By system: values of all repetitions by rate."""
    by_system: dict[str, Cell] = {}
    for result in found:
        by_rate = by_system.setdefault(result.config["system"], {})
        by_rate.setdefault(float(result.config["rate"]), []).append(result.body["summary"][metric])
    return by_system


def panel(axes: Axes, found: Sequence[Result], metric: str, what: str) -> None:
    for name, by_rate in curves(found, metric).items():
        rates, look = sorted(by_rate), system(name)
        means = [mean(by_rate[rate]) for rate in rates]
        below = [m - min(by_rate[rate]) for m, rate in zip(means, rates, strict=True)]
        above = [max(by_rate[rate]) - m for m, rate in zip(means, rates, strict=True)]
        axes.errorbar(rates, means, yerr=[below, above], color=look.color, marker=look.marker, ms=4, lw=1.3, capsize=2,
                      label=f"{look.label} ({_devices(found, name)})")  # fmt: skip
    machines = ", ".join(sorted({result.machine for result in found}))
    axes.set(title=f"MEASURED: {machines}", xlabel="requests/s", ylabel=what)
    axes.title.set_fontsize(8)
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)


def _devices(found: Sequence[Result], name: str) -> str:
    return str(next((r.config.get("devices", "?") for r in found if r.config["system"] == name), "?"))


def rows(found: Sequence[Result], figure: str) -> list[Row]:
    """RServe against each other system: mean TTFT of runs of the same requests at the same rate, one row a workload. A
    claim holds when the mean ratio is below 1 by more than two standard errors."""
    made = []
    for workload in sorted({result.config["workload"] for result in found}):
        here = [result for result in found if result.config["workload"] == workload]
        for base in ("gllm-epd", "gllm", "gllm-1core", "vllm"):
            ratios = paired(here, "rserve", base)
            if not ratios:
                continue
            logs = [math.log(ratio) for by_seed in ratios.values() for ratio in by_seed]
            middle = mean(logs)
            error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
            by_rate = [math.exp(mean(map(math.log, by_seed))) - 1 for by_seed in ratios.values()]
            noise = "; within the noise" if abs(middle) <= 2 * error else ""
            made.append(
                Row(figure=figure, claim=f"MEASURED {workload}: RServe against {system(base).label}, mean TTFT",
                    paper="lower", ours=f"{percent(math.exp(middle) - 1)} \u00b1 {100 * error:.0f}",
                    holds=middle + 2 * error < 0, kind="measured",
                    devices=f"{_devices(here, 'rserve')} / {_devices(here, base)}",
                    note=f"{len(logs)} pairs of runs, \u00b1 a standard error; by rate {percent(min(by_rate))} to "
                    f"{percent(max(by_rate))} over {len(by_rate)} rates{noise}")
            )  # fmt: skip
    return made


def paired(found: Sequence[Result], ours: str, base: str) -> dict[float, list[float]]:
    """By rate: ratios of the mean TTFTs of runs that were asked the same."""
    ttfts = {
        (r.config["system"], float(r.config["rate"]), r.seed): float(r.body["summary"]["ttft_mean"]) for r in found
    }
    ratios: dict[float, list[float]] = {}
    for (name, rate, seed), ttft in sorted(ttfts.items()):
        if name == ours and (base, rate, seed) in ttfts:
            ratios.setdefault(rate, []).append(ttft / ttfts[base, rate, seed])
    return ratios


def numbers(found: Sequence[Result]) -> list[dict[str, Any]]:
    keys = ("system", "workload", "rate", "devices")
    return [
        {key: r.config.get(key) for key in keys} | {"seed": r.seed, "machine": r.machine} | r.body["summary"]
        for r in found
    ]


def draw(folder: Path) -> list[Row]:
    found = runs(folder, NUMBER)
    if not found:
        row = Row(figure=NUMBER, claim="MEASURED: rserve against gllm-epd and gllm here", paper="lower TTFT", ours="-",
                  holds=None, kind="measured", note="no measured results: run without --sim-only")  # fmt: skip
        save(folder, NUMBER, None, [], [row])
        return [row]
    workloads = sorted({result.config["workload"] for result in found})
    picture = Figure(figsize=(5.5 * len(workloads), 3.8))
    for index, workload in enumerate(workloads):
        here = [result for result in found if result.config["workload"] == workload]
        axes = picture.add_subplot(1, len(workloads), index + 1)
        panel(axes, here, "ttft_mean", f"{workload}: mean TTFT, s")
    picture.tight_layout()
    made = rows(found, NUMBER)
    save(folder, NUMBER, picture, numbers(found), made)
    return made


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
