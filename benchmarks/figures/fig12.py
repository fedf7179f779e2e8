"""Figure 12: TTFT over the request rate."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.figures.curves import LOADS, Curves, ttft
from benchmarks.figures.frame import Row, main, near, percent, save
from benchmarks.figures.main_runs import ELASTIC, EPD, GLLM, PP4, RSERVE, TP4, curves, devices, panels, points

NUMBER = "12"
# The paper's means: gLLM-epd below gLLM, RServe below gLLM-epd.
PAPER = {"1K": (-0.16, -0.18), "2K": (-0.20, -0.19)}

__all__ = ["NUMBER", "draw", "points"]


def draw(folder: Path) -> list[Row]:
    found = curves(folder, ttft, (TP4, PP4, GLLM, EPD, RSERVE, ELASTIC))
    rows = [row for workload, by_rate in found.items() for row in claims(workload, by_rate)]
    save(folder, NUMBER, panels(found, "mean TTFT, s", log=True), {w: c.numbers() for w, c in found.items()}, rows)
    return rows


def claims(workload: str, found: Curves) -> list[Row]:
    by_rate = {d: found.of(d) for d in (TP4, PP4, GLLM, EPD, RSERVE, ELASTIC)}
    worst = max(a / min(b, c) for a, b, c in zip(by_rate[TP4], by_rate[PP4], by_rate[GLLM], strict=True))
    against_pp4 = found.change(GLLM, PP4)
    epd, rserve = found.change(EPD, GLLM), found.change(RSERVE, EPD)
    each = [a / b - 1 for a, b in zip(by_rate[EPD], by_rate[GLLM], strict=True)]
    gaps = [a / b - 1 for a, b in zip(by_rate[RSERVE], by_rate[EPD], strict=True)]
    headline = min(a / b - 1 for a, b in zip(by_rate[RSERVE], by_rate[TP4], strict=True))
    elastic = found.change(ELASTIC, RSERVE)
    paper_epd, paper_rserve = PAPER[workload]
    return [
        Row(figure=NUMBER, claim=f"{workload}: largest TTFT ratio vLLM-TP4 / PP systems", paper="up to 3.77",
            ours=f"{worst:.2f}", holds=near(worst, 3.77), devices=devices(TP4, PP4),
            note=_because(worst, 3.77, "TP4 saturates only a little before PP4 here (figure 13), so few rates lie "
                          "between; all-reduces at NVLink's measured bandwidth do not explain the paper's gap")),
        Row(figure=NUMBER, claim=f"{workload}: gLLM against vLLM-PP4, mean TTFT", paper="within 2-4 %",
            ours=percent(against_pp4), holds=abs(against_pp4) <= 0.045, devices=devices(GLLM, PP4),
            note="" if abs(against_pp4) <= 0.045 else "gLLM encodes all of a request's items in one step of stage 0, "
            "vLLM spreads them over the steps that need them: a 4 % lower plateau, felt at high rates"),
        Row(figure=NUMBER, claim=f"{workload}: gLLM-epd against gLLM, mean TTFT", paper=percent(paper_epd),
            ours=percent(epd), holds=near(epd, paper_epd), devices=devices(EPD, GLLM),
            note=f"lowest rate {percent(each[0])}, 0.7 of the capacity {percent(each[LOADS.index(0.7)])}; between the "
            "two capacities gLLM's queue grows and EPD's does not, so the mean depends on the rates chosen"),
        Row(figure=NUMBER, claim=f"{workload}: RServe against gLLM-epd, mean TTFT", paper=percent(paper_rserve),
            ours=percent(rserve), holds=near(rserve, paper_rserve), devices=devices(RSERVE, EPD),
            note=_because(rserve, paper_rserve, "overlap can hide at most the encode time, and with images first "
                          "(SGLang's layout) only that of the second image; see `budget` for interleaved text")),
        Row(figure=NUMBER, claim=f"{workload}: the gap to gLLM-epd closes with the rate (lowest, highest rate)",
            paper="closes", ours=f"{percent(gaps[0])}, {percent(gaps[-1])}", holds=abs(gaps[-1]) < abs(gaps[0]),
            devices=devices(RSERVE, EPD)),
        Row(figure="12, headline", claim=f"{workload}: largest TTFT reduction of RServe against vLLM-TP4",
            paper="up to 66 %", ours=percent(headline), holds=headline <= -0.66 * 0.75, devices=devices(RSERVE, TP4),
            note="the paper's sources do not name the baseline; [I] vLLM-TP4. Between the two capacities the ratio "
            "grows with the rate and with the number of requests"),
        Row(figure=NUMBER, claim=f"{workload}: RServe-elastic against RServe, mean TTFT", paper="- (ours)",
            ours=percent(elastic), holds=elastic <= 0.005, devices=devices(ELASTIC, RSERVE),
            note="the encoder is no bottleneck here: an encode in stage 0 can only delay prefill; see `separation`"),
    ]  # fmt: skip


def _because(ours: float, paper: float, reason: str) -> str:
    return "" if near(ours, paper) else reason


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
