"""Figure 20: the LLM on one GPU with one encoder GPU. Measured runs of the same shape (one encoder process, one LLM
process on this machine's cores) stand in a panel of their own."""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.figures import measured
from benchmarks.figures.curves import Curves, grid, rates, ttft
from benchmarks.figures.frame import Row, main, near, percent, save
from benchmarks.figures.points import Point
from benchmarks.systems import deploy

NUMBER = "20"
MODEL = "qwen2.5-vl-7b"  # the 72B does not fit on one H100
GLLM, EPD, RSERVE, ELASTIC = (deploy(name) for name in ("gllm", "gllm-epd", "rserve", "rserve-elastic"))
EQUAL = deploy("gllm", "PP2")


def points() -> list[Point]:
    at = rates("1K", deployment=RSERVE, model=MODEL)
    return grid((GLLM, EQUAL, EPD, RSERVE, ELASTIC), "1K", at, model=MODEL)


def draw(folder: Path) -> list[Row]:
    found = Curves(folder, points(), ttft)
    real = measured.runs(folder, measured.NUMBER)
    picture = Figure(figsize=(6 * (1 + bool(real)), 3.8))
    found.draw(picture.add_subplot(1, 1 + bool(real), 1), "1K, 7B, H100, simulated", "mean TTFT, s", log=True)
    picture.axes[0].legend(fontsize=7)
    if real:
        measured.panel(picture.add_subplot(1, 2, 2), real, "ttft_mean", "mean TTFT, s")
    picture.tight_layout()
    rows = claims(found) + measured.rows(real, NUMBER)
    save(folder, NUMBER, picture, {"simulated": found.numbers(), "measured": measured.numbers(real)}, rows)
    return rows


def claims(found: Curves) -> list[Row]:
    rserve, epd = found.of(RSERVE), found.of(EPD)
    against = [a / b - 1 for a, b in zip(rserve, epd, strict=True)]
    co = found.change(RSERVE, GLLM)
    return [
        Row(figure=NUMBER, claim="LLM on one GPU: largest TTFT reduction by RServe (against gLLM-epd)",
            paper="up to 26 %", ours=percent(min(against)), holds=near(min(against), -0.26), devices="2 / 2",
            note=f"against gLLM on one GPU, mean {percent(co)}; against gLLM PP2 (equal devices) "
            f"{percent(found.change(RSERVE, EQUAL))}"),
        Row(figure=NUMBER, claim="the advantage is larger at low rates (lowest, highest)", paper="larger",
            ours=f"{percent(against[0])}, {percent(against[-1])}", holds=against[0] < against[-1], devices="2 / 2"),
        Row(figure=NUMBER, claim="RServe-elastic against RServe, mean TTFT", paper="- (ours)",
            ours=percent(found.change(ELASTIC, RSERVE)), holds=found.change(ELASTIC, RSERVE) <= 0.005, devices="2",
            note="two 1K images cost less than their prefill: an encode on the LLM's only device delays prefill"),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
