"""Figure 10: packing tokens of several requests into a micro-batch removes the bubbles of RServe-intra."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.figures import schemes_timeline
from benchmarks.figures.frame import Row, main, save
from benchmarks.figures.points import Point

NUMBER = "10"
SCHEMES = ("rserve-intra", "rserve")


def points() -> list[Point]:
    return [schemes_timeline.point(scheme, num_requests=6, workload="1K") for scheme in SCHEMES]


def draw(folder: Path) -> list[Row]:
    panels = schemes_timeline.simulated(folder, points())
    numbers = schemes_timeline.numbers(panels)
    real = schemes_timeline.draw_measured(folder, NUMBER, SCHEMES)
    rows = [claim(numbers, "simulated")]
    rows.append(claim(real, "measured") if real else schemes_timeline.not_measured(NUMBER))
    save(folder, NUMBER, schemes_timeline.picture(panels), numbers | {"measured": real}, rows)
    return rows


def claim(numbers: dict[str, Any], kind: str) -> Row:
    intra, both = (numbers[name] for name in SCHEMES)
    prefix = "MEASURED: " if kind == "measured" else ""
    return Row(
        figure=NUMBER, claim=f"{prefix}idle share of the stages once filled: RServe-intra / RServe",
        paper="lower with packing",
        ours=f"{100 * intra['stage_bubble_mean']:.0f} % / {100 * both['stage_bubble_mean']:.0f} %",
        holds=both["stage_bubble_mean"] < intra["stage_bubble_mean"], kind=kind, devices=both["devices"],
        note=f"micro-batches: {intra['num_batches']} / {both['num_batches']}; all six requests done after "
             f"{intra['seconds']:.2f} / {both['seconds']:.2f} s",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
