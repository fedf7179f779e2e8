"""Figure 7: timelines of the co-located encoder, EPD, RServe-intra and RServe (and ours: elastic), two requests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.figures import schemes_timeline
from benchmarks.figures.frame import Row, main, percent, save
from benchmarks.figures.points import Point

NUMBER = "7"
MEASURED = ("gllm", "gllm-epd", "rserve-intra", "rserve")
SCHEMES = (*MEASURED, "rserve-elastic")


def points() -> list[Point]:
    return [schemes_timeline.point(scheme, num_requests=2) for scheme in SCHEMES]


def draw(folder: Path) -> list[Row]:
    panels = schemes_timeline.simulated(folder, points())
    numbers = schemes_timeline.numbers(panels)
    real = schemes_timeline.draw_measured(folder, NUMBER, MEASURED)
    rows = claims(numbers, "simulated", "4 / 5", "5")
    if real:
        devices = f"{real['gllm']['devices']} / {real['gllm-epd']['devices']}"
        rows += claims(real, "measured", devices, real["rserve"]["devices"])
    else:
        rows.append(schemes_timeline.not_measured(NUMBER))
    save(folder, NUMBER, schemes_timeline.picture(panels), numbers | {"measured": real}, rows)
    return rows


def claims(numbers: dict[str, Any], kind: str, pair: str, alone: str) -> list[Row]:
    """pair, alone: device counts of the two comparisons."""
    colocated, separate, overlapped = (numbers[name] for name in ("gllm", "gllm-epd", "rserve"))
    prefix = "MEASURED: " if kind == "measured" else ""
    return [
        Row(figure=NUMBER, claim=f"{prefix}EPD overlaps request 2's encode with request 1's prefill: time of "
            "two requests", paper="shorter", ours=percent(separate["seconds"] / colocated["seconds"] - 1), kind=kind,
            holds=separate["seconds"] < colocated["seconds"], devices=pair),
        Row(figure=NUMBER, claim=f"{prefix}RServe overlaps encode and prefill of one request: mean TTFT against EPD",
            paper="lower", ours=percent(overlapped["ttft_mean_s"] / separate["ttft_mean_s"] - 1), kind=kind,
            holds=overlapped["ttft_mean_s"] < separate["ttft_mean_s"], devices=alone),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
