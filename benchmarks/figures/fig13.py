"""Figure 13: input-token throughput over the request rate."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.figures.curves import Curves, throughput
from benchmarks.figures.frame import Row, main, near, percent, save
from benchmarks.figures.main_runs import ELASTIC, EPD, GLLM, PP4, RSERVE, TP4, curves, devices, panels, points

NUMBER = "13"
# TP4 below PP, gLLM-epd above gLLM, RServe's plateau in tokens/s.
PAPER = {"1K": (-0.26, 0.06, 10600.0), "2K": (-0.28, 0.085, 11100.0)}

__all__ = ["NUMBER", "draw", "points"]


def draw(folder: Path) -> list[Row]:
    found = curves(folder, throughput, (TP4, PP4, GLLM, EPD, RSERVE, ELASTIC))
    rows = [row for workload, by_rate in found.items() for row in claims(workload, by_rate)]
    save(folder, NUMBER, panels(found, "input tokens/s"), {w: c.numbers() for w, c in found.items()}, rows)
    return rows


def claims(workload: str, found: Curves) -> list[Row]:
    top = {d: max(found.of(d)) for d in (TP4, PP4, GLLM, EPD, RSERVE, ELASTIC)}
    paper_tp, paper_epd, paper_top = PAPER[workload]
    tp, epd, same = top[TP4] / top[PP4] - 1, top[EPD] / top[GLLM] - 1, top[GLLM] / top[PP4] - 1
    headline = top[RSERVE] / top[TP4] - 1
    return [
        Row(figure=NUMBER, claim=f"{workload}: plateau of vLLM-TP4 against vLLM-PP4", paper=percent(paper_tp),
            ours=percent(tp), holds=near(tp, paper_tp), devices=devices(TP4, PP4),
            note="" if near(tp, paper_tp) else "all-reduces at datasheet bandwidth and narrower products are all that "
            "TP pays for here; co-located encoding costs PP more (one stage) than TP (sharded over four)"),
        Row(figure=NUMBER, claim=f"{workload}: plateau of gLLM against vLLM-PP4", paper="about equal",
            ours=percent(same), holds=abs(same) <= 0.04, devices=devices(GLLM, PP4)),
        Row(figure=NUMBER, claim=f"{workload}: plateau of gLLM-epd against gLLM", paper=percent(paper_epd),
            ours=percent(epd), holds=near(epd, paper_epd), devices=devices(EPD, GLLM),
            note="" if near(epd, paper_epd) else "larger than the paper's: a ViT that takes 11 % of a single TTFT "
            "(figure 2) takes more than that of stage 0's time, which is the bottleneck of co-located PP"),
        Row(figure=NUMBER, claim=f"{workload}: plateau of RServe, tokens/s", paper=f"{paper_top:.0f}",
            ours=f"{top[RSERVE]:.0f}", holds=abs(top[RSERVE] / paper_top - 1) < 0.1, devices=devices(RSERVE),
            note="fitted: the LLM efficiency is chosen so that RServe saturates at this number" if workload == "1K" else
            "predicted from the 1K fit; more attention for each token makes 2K slower, not faster as in the paper"),
        Row(figure="13, headline", claim=f"{workload}: largest throughput gain of RServe, against vLLM-TP4",
            paper="up to +109 %", ours=percent(headline), holds=headline >= 1.09 * 0.75, devices=devices(RSERVE, TP4),
            note="the paper's sources do not name the baseline; with the paper's own -26 % for TP4 and +6 % for EPD, "
            "no baseline of figure 13 is 2.09 times below RServe's plateau"),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
