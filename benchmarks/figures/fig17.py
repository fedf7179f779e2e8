"""Figure 17: RServe-intra (no packing across requests) against RServe."""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.figures.curves import throughput, ttft
from benchmarks.figures.frame import Row, main, near, percent, save
from benchmarks.figures.main_runs import INTRA, RSERVE, SETTING, curves, devices, points

NUMBER = "17"

__all__ = ["NUMBER", "draw", "points"]


def draw(folder: Path) -> list[Row]:
    latency, rate = (curves(folder, metric, (INTRA, RSERVE))["1K"] for metric in (ttft, throughput))
    picture = Figure(figsize=(10, 3.6))
    latency.draw(picture.add_subplot(1, 2, 1), f"1K, {SETTING}", "mean TTFT, s", log=True)
    rate.draw(picture.add_subplot(1, 2, 2), f"1K, {SETTING}", "input tokens/s")
    picture.axes[0].legend(fontsize=8)
    picture.tight_layout()
    slower = max(a / b - 1 for a, b in zip(latency.of(INTRA), latency.of(RSERVE), strict=True))
    less = min(a / b - 1 for a, b in zip(rate.of(INTRA), rate.of(RSERVE), strict=True))
    rows = [
        Row(figure=NUMBER, claim="RServe-intra against RServe at high rates: throughput", paper="-32 %",
            ours=percent(less), holds=near(less, -0.32), devices=devices(INTRA, RSERVE),
            note="" if near(less, -0.32) else "the direction agrees; how much is lost depends on "
            "how many micro-batches a request is cut into, so on B, layout and number of images (unknown)"),
        Row(figure=NUMBER, claim="RServe-intra against RServe at high rates: TTFT", paper="+172 %",
            ours=percent(slower), holds=near(slower, 1.72), devices=devices(INTRA, RSERVE),
            note="" if near(slower, 1.72) else "the direction agrees; once intra is saturated and RServe is not, the "
            "ratio grows with the number of requests served"),
    ]  # fmt: skip
    save(folder, NUMBER, picture, {"ttft_s": latency.numbers(), "tokens_per_s": rate.numbers()}, rows)
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
