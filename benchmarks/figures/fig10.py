"""Figure 10: packing tokens of several requests into a micro-batch removes the bubbles of RServe-intra."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.figures import schemes_timeline
from benchmarks.figures.frame import Row, main, save
from benchmarks.figures.points import Point

NUMBER = "10"


def points() -> list[Point]:
    return [schemes_timeline.point(scheme, num_requests=6, workload="1K") for scheme in ("rserve-intra", "rserve")]


def draw(folder: Path) -> list[Row]:
    picture, numbers = schemes_timeline.draw(folder, points())
    intra, both = numbers["rserve-intra"], numbers["rserve"]
    row = Row(
        figure=NUMBER, claim="idle share of the stages once filled: RServe-intra / RServe", paper="lower with packing",
        ours=f"{100 * intra['stage_bubble_mean']:.0f} % / {100 * both['stage_bubble_mean']:.0f} %",
        holds=both["stage_bubble_mean"] < intra["stage_bubble_mean"], devices="5",
        note=f"micro-batches: {intra['num_batches']} / {both['num_batches']}; all six requests done after "
             f"{intra['seconds']:.2f} / {both['seconds']:.2f} s",
    )  # fmt: skip
    save(folder, NUMBER, picture, numbers, [row])
    return [row]


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
