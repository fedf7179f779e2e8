"""Figure 14: share of requests whose first token comes within 10 s, over the request rate."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

from benchmarks.figures.curves import Curves, attained
from benchmarks.figures.frame import Row, main, near, percent, save
from benchmarks.figures.main_runs import ELASTIC, EPD, GLLM, PP4, RSERVE, TP4, curves, devices, panels, points
from benchmarks.metrics import mean

NUMBER = "14"
SLO = 10.0
PAPER = {"1K": (0.71, 0.61), "2K": (0.70, 0.59)}  # average over the paper's rates: RServe, gLLM-epd

__all__ = ["NUMBER", "draw", "points"]


def draw(folder: Path) -> list[Row]:
    found = curves(folder, attained(SLO), (TP4, PP4, GLLM, EPD, RSERVE, ELASTIC))
    rows = [row for workload, by_rate in found.items() for row in claims(workload, by_rate)]
    numbers = {w: c.numbers() for w, c in found.items()}
    save(folder, NUMBER, panels(found, f"share of requests with TTFT <= {SLO:g} s"), numbers, rows)
    return rows


def area(rates: list[float], values: list[float]) -> float:
    """Under the curve, by trapezoids."""
    return sum((b - a) * (u + v) / 2 for (a, u), (b, v) in pairwise(zip(rates, values, strict=True)))


def claims(workload: str, found: Curves) -> list[Row]:
    rserve, epd = found.of(RSERVE), found.of(EPD)
    gain = area(found.rates, rserve) / area(found.rates, epd) - 1
    paper_rserve, paper_epd = PAPER[workload]
    end = rserve[-1]
    reason = (
        "the paper's rates are unknown; the average depends on them. In ours both schemes saturate at the same rate, "
    )
    reason += "so their curves fall together"
    return [
        Row(figure=NUMBER, claim=f"{workload}: average SLO attainment, RServe", paper=f"{100 * paper_rserve:.0f} %",
            ours=f"{100 * mean(rserve):.0f} %", holds=near(mean(rserve), paper_rserve), devices=devices(RSERVE),
            note="the average depends on the rates, which the paper does not give"),
        Row(figure=NUMBER, claim=f"{workload}: average SLO attainment, gLLM-epd", paper=f"{100 * paper_epd:.0f} %",
            ours=f"{100 * mean(epd):.0f} %", holds=near(mean(epd), paper_epd), devices=devices(EPD),
            note="the average depends on the rates, which the paper does not give"),
        Row(figure=NUMBER, claim=f"{workload}: area under the curve, RServe against gLLM-epd", paper="+23 %",
            ours=percent(gain), holds=near(gain, 0.23), devices=devices(RSERVE, EPD),
            note="" if near(gain, 0.23) else reason),
        Row(figure=NUMBER, claim=f"{workload}: attainment falls from 100 % to below 20 %", paper="100 -> <20 %",
            ours=f"{100 * rserve[0]:.0f} -> {100 * end:.0f} %", holds=rserve[0] > 0.99 and end < 0.25,
            devices=devices(RSERVE), note="" if end < 0.25 else "our last rate overloads by 30 % for 300 requests"),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
