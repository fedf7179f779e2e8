"""Figure 7: timelines of the co-located encoder, EPD, RServe-intra and RServe (and ours: elastic), two requests."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.figures import schemes_timeline
from benchmarks.figures.frame import Row, main, percent, save
from benchmarks.figures.points import Point

NUMBER = "7"
SCHEMES = ("gllm", "gllm-epd", "rserve-intra", "rserve", "rserve-elastic")


def points() -> list[Point]:
    return [schemes_timeline.point(scheme, num_requests=2) for scheme in SCHEMES]


def draw(folder: Path) -> list[Row]:
    picture, numbers = schemes_timeline.draw(folder, points())
    colocated, separate, overlapped = (numbers[name] for name in ("gllm", "gllm-epd", "rserve"))
    rows = [
        Row(figure=NUMBER, claim="EPD overlaps request 2's encode with request 1's prefill: time of two requests",
            paper="shorter", ours=percent(separate["seconds"] / colocated["seconds"] - 1),
            holds=separate["seconds"] < colocated["seconds"], devices="4 / 5"),
        Row(figure=NUMBER, claim="RServe overlaps encode and prefill of one request: mean TTFT against EPD",
            paper="lower", ours=percent(overlapped["ttft_mean_s"] / separate["ttft_mean_s"] - 1),
            holds=overlapped["ttft_mean_s"] < separate["ttft_mean_s"], devices="5"),
    ]  # fmt: skip
    save(folder, NUMBER, picture, numbers, rows)
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
