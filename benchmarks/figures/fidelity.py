"""Fidelity: mean TTFTs that the simulator predicts, with this machine's costs, against those that were measured.

Reads `real-fidelity.json`, which `benchmarks.real.fidelity` writes after the measured runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.figures.frame import Row, main, save
from benchmarks.figures.points import MissingResult, Point
from benchmarks.systems import system

NUMBER = "fidelity"
KIND = "simulated against measured"


def points() -> list[Point]:
    return []


def draw(folder: Path) -> list[Row]:
    path = folder / "real-fidelity.json"
    claim = "predicted mean TTFT within 15 % of measured, each scheme at three rates"
    if not path.exists():
        rows = [Row(figure=NUMBER, claim=claim, paper="- (ours)", ours="-", holds=None, kind=KIND,
                    note="no measured results: run without --sim-only")]  # fmt: skip
        save(folder, NUMBER, None, [], rows)
        return rows
    found = json.loads(path.read_text())
    if "scatter" not in found:
        raise MissingResult(f"{path.name} is of an older version: run benchmarks.real.run again")
    predictions: list[dict[str, Any]] = found["predictions"]
    errors = [p["error"] for p in predictions]
    good = sum(abs(error) <= found["goal"] for error in errors)
    rows = [Row(figure=NUMBER, claim=claim, paper="- (ours)", ours=f"{good} of {len(errors)}, largest error "
                f"{100 * max(errors, key=abs):+.0f} %", holds=good == len(errors) > 0, kind=KIND,
                devices=found["machine"], note="pace of the cores in each run known; "
                f"single requests: {found['scatter']}")]  # fmt: skip
    save(folder, NUMBER, _scatter(predictions, found["machine"]), predictions, rows)
    return rows


def _scatter(predictions: list[dict[str, Any]], machine: str) -> Figure:
    """One mark a scheme and rate, the diagonal, and the 15 % band; behind them a dot for every request."""
    picture = Figure(figsize=(4.6, 4.2))
    axes = picture.add_subplot()
    for name in dict.fromkeys(p["system"] for p in predictions):
        mine = [p for p in predictions if p["system"] == name]
        look = system(name)
        pairs = [pair for p in mine for pair in p["requests"]]
        axes.plot([m for _, m in pairs], [p for p, _ in pairs], ".", color=look.color, alpha=0.5, ms=4, mec="none")
        axes.plot([p["measured"] for p in mine], [p["predicted"] for p in mine], look.marker, color=look.color,
                  label=look.label)  # fmt: skip
    top = 1.05 * max(max(pair) for p in predictions for pair in [(p["measured"], p["predicted"]), *p["requests"]])
    axes.plot([0, top], [0, top], color="black", lw=0.8)
    axes.fill_between([0, top], [0, 0.85 * top], [0, 1.15 * top], color="#dddddd", zorder=0)
    axes.set(
        xlim=(0, top),
        ylim=(0, top),
        title=f"TTFT, s, mean and of each request: {machine}",
        xlabel="MEASURED",
        ylabel="SIMULATED with this machine's costs",
    )
    axes.title.set_fontsize(8)
    axes.legend(fontsize=7)
    return picture


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
