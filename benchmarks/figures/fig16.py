"""Figure 16: the encode batch size C. Two requests, each 2K of text and 20 items of 1,024 or of 32 tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.figures.frame import Row, main, near, percent, save
from benchmarks.figures.points import Point, need
from benchmarks.sim.deployment import Deployment
from benchmarks.systems import deploy, label

NUMBER = "16"
ITEMS = (1, 2, 4, 5, 10, 20)  # items in a batch
TOKENS = (1024, 32)  # of an item
# The paper does not say on which model; the main one, and the smallest on one GPU, where encoding weighs most.
SETTINGS = (("qwen2.5-vl-72b", "PP4"), ("qwen2.5-vl-7b", ""))


def deployment(layout: str, batch_tokens: int) -> Deployment:
    return deploy("rserve", layout, encoder_batch_tokens=batch_tokens)


def point(model: str, layout: str, tokens: int, items: int) -> Point:
    workload = f"items-{tokens}"
    return Point(
        deployment=deployment(layout, tokens * items), workload=workload, rate=None, num_requests=2, model=model
    )


def points() -> list[Point]:
    return [point(*setting, tokens, items) for setting in SETTINGS for tokens in TOKENS for items in ITEMS]


def curve(folder: Path, model: str, layout: str, tokens: int) -> dict[str, list[float]]:
    summaries = [need(folder, point(model, layout, tokens, items))["summary"] for items in ITEMS]
    return {
        "C": [float(tokens * items) for items in ITEMS],
        "ttft_s": [s["ttft_mean"] for s in summaries],
        "tokens_per_s": [s["input_tokens_per_s"] for s in summaries],
    }


def draw(folder: Path) -> list[Row]:
    found = {(m, layout, tokens): curve(folder, m, layout, tokens) for m, layout in SETTINGS for tokens in TOKENS}
    picture = Figure(figsize=(10, 5.6))
    for index, ((model, layout, tokens), values) in enumerate(found.items()):
        axes = picture.add_subplot(2, 2, index + 1)
        axes.plot(values["C"], values["ttft_s"], "D-", color="#d62728", label="mean TTFT")
        axes.set(xlabel="C, item tokens in a batch", ylabel="mean TTFT, s", xscale="log")
        axes.set_xticks(values["C"], [f"{c:.0f}" for c in values["C"]], fontsize=7)
        axes.minorticks_off()
        other = axes.twinx()
        other.plot(values["C"], values["tokens_per_s"], "o--", color="#1f77b4")
        other.set_ylabel("input tokens/s (dashed)")
        axes.set_title(f"{model}, {label(deployment(layout, 1024))}, {tokens} tokens an item, simulated", fontsize=8)
    picture.tight_layout()
    rows = [row for key, values in found.items() for row in claims(*key, values)]
    save(folder, NUMBER, picture, {f"{m} {tokens}": v for (m, _, tokens), v in found.items()}, rows)
    return rows


def claims(model: str, layout: str, tokens: int, values: dict[str, list[float]]) -> list[Row]:
    ttft, rate = values["ttft_s"], values["tokens_per_s"]
    size = model.rpartition("-")[2]
    common: dict[str, Any] = {"figure": NUMBER, "devices": str(deployment(layout, 1).num_devices)}
    if tokens == 32:
        best = min(range(len(ttft)), key=ttft.__getitem__)
        falls, rises = ttft[best] / ttft[0] - 1, ttft[-1] / ttft[best] - 1
        return [
            Row(claim=f"{size}, items of 32 tokens: TTFT falls, then rises with C", paper="inner best C",
                ours=f"{percent(falls)} to C = {values['C'][best]:.0f}, then {percent(rises)}",
                holds=falls < -0.005 and rises > 0.005,
                note="the prefill of the 2K of text before the items takes longer than encoding all of them at once, "
                "so large batches cost nothing here", **common)
        ]  # fmt: skip
    rise, fall = ttft[-1] / ttft[0], rate[-1] / rate[0] - 1
    reason = (
        "encoding 20 such items takes a fraction of their prefill here, so waiting for all of them cannot cost more "
    )
    reason += "than that; the paper's factor needs an encoder slower than the LLM"
    return [
        Row(claim=f"{size}, items of 1,024 tokens: TTFT rises with C", paper="up to 2.91x", ours=f"{rise:.2f}x",
            holds=near(rise, 2.91), note="" if near(rise, 2.91) else reason, **common),
        Row(claim=f"{size}, items of 1,024 tokens: throughput falls with C", paper="-53 %", ours=percent(fall),
            holds=near(fall, -0.53), **common),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
