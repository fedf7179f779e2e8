"""A100 PCIe (paper, section 5.4.2): four 40 GB devices without NVLink.

The 72B does not fit on them; ours is the 32B. All four devices are in use: the co-located scheme on PP4, the separate
ones on PP3+E1; co-located PP3 stands beside them, for a comparison with the same number of LLM stages.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.figures.curves import Curves, grid, rates, throughput, ttft
from benchmarks.figures.frame import Row, main, percent, save
from benchmarks.figures.points import Point
from benchmarks.systems import deploy

NUMBER = "a100"
MODEL, HARDWARE = "qwen2.5-vl-32b", "a100-pcie"
EQUAL, GLLM, EPD, RSERVE, ELASTIC = (
    deploy("gllm", "PP4"),
    *(deploy(name, "PP3") for name in ("gllm", "gllm-epd", "rserve", "rserve-elastic")),
)


def points() -> list[Point]:
    at = rates("1K", deployment=RSERVE, model=MODEL, hardware=HARDWARE)
    return grid((EQUAL, GLLM, EPD, RSERVE, ELASTIC), "1K", at, model=MODEL, hardware=HARDWARE)


def draw(folder: Path) -> list[Row]:
    latency, rate = (Curves(folder, points(), metric) for metric in (ttft, throughput))
    picture = Figure(figsize=(11, 3.8))
    latency.draw(picture.add_subplot(1, 2, 1), "1K, 32B, A100 PCIe, simulated", "mean TTFT, s", log=True)
    rate.draw(picture.add_subplot(1, 2, 2), "1K, 32B, A100 PCIe, simulated", "input tokens/s")
    picture.axes[0].legend(fontsize=7)
    picture.tight_layout()
    rows = claims(latency)
    save(folder, NUMBER, picture, {"ttft_s": latency.numbers(), "tokens_per_s": rate.numbers()}, rows)
    return rows


def claims(latency: Curves) -> list[Row]:
    same_devices, same_stages = latency.change(EPD, EQUAL), latency.change(EPD, GLLM)
    best = [min(e, q) >= r for r, e, q in zip(*(latency.of(d) for d in (RSERVE, EPD, EQUAL)), strict=True)]
    return [
        Row(figure=NUMBER, claim="gLLM-epd PP3+E1 about gLLM PP4, mean TTFT", paper="no clear advantage",
            ours=percent(same_devices), holds=abs(same_devices) <= 0.15, devices="4 / 4",
            note=f"against co-located PP3 (3 devices) {percent(same_stages)}; the mean is over rates up to 1.3 of what "
            "PP3+E1 saturates at"),
        Row(figure=NUMBER, claim="RServe has the lowest TTFT (rates at which it has)", paper="always",
            ours=f"{sum(best)} of {len(best)}", holds=all(best), devices="4 / 4",
            note="" if all(best) else "the device given to the encoder is missing in the LLM's pipeline"),
        Row(figure=NUMBER, claim="RServe-elastic against RServe, mean TTFT", paper="- (ours)",
            ours=percent(latency.change(ELASTIC, RSERVE)), holds=latency.change(ELASTIC, RSERVE) <= 0.005, devices="4"),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
