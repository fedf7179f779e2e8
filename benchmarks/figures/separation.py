"""When does a separate encoder pay? Model size x images x rate, at EQUAL device count: the best co-located
layout on N devices against N - 1 devices and one encoder, for RServe and RServe-elastic. Not in the paper.

Co-located layouts: one pipeline over all devices, tensor parallelism, or replicas that share the requests evenly at
random (each then sees a Poisson stream of its own).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.figures.curves import rates, ttft
from benchmarks.figures.frame import Row, main, percent, save
from benchmarks.figures.points import Point, need
from benchmarks.metrics import mean
from benchmarks.systems import deploy

NUMBER = "separation"
# Images of 1K a request, and the other extreme: two images of 4K, whose encode costs a small model more than prefill.
WORKLOADS = ("images-1", "images-4", "images-16", "4K")
LOADS = (0.2, 0.6, 0.9)  # shares of the rate at which one co-located pipeline over all devices is saturated
SEEDS = (0, 1)
SEPARATE = ("rserve", "rserve-elastic")


@dataclass(frozen=True, slots=True)
class Size:
    """devices: N for all. colocated: layouts with their numbers of replicas; separate: the layout of the LLM beside
    one encoder."""

    devices: int
    colocated: tuple[tuple[str, int], ...]
    separate: str


SIZES = {
    "3b": Size(2, (("PP2", 1), ("TP2", 1), ("", 2)), ""),
    "7b": Size(2, (("PP2", 1), ("TP2", 1), ("", 2)), ""),
    "32b": Size(4, (("PP4", 1), ("TP4", 1), ("PP2", 2)), "PP3"),
    "72b": Size(5, (("PP5", 1), ("TP4", 1)), "PP4"),  # TP needs a divisor of the heads: one device stays idle
}


def point(size: str, workload: str, share: float, scheme: str, layout: str, replicas: int, seed: int) -> Point:
    """One replica, with its part of the rate."""
    model = f"qwen2.5-vl-{size}"
    pipeline = deploy("gllm", SIZES[size].colocated[0][0])
    (rate,) = rates(workload, (share,), deployment=pipeline, model=model)
    return Point(
        deployment=deploy(scheme, layout), workload=workload, rate=rate / replicas, seed=seed, model=model,
        num_requests=120 if workload == "images-1" else 60,
    )  # fmt: skip


def choices(size: str) -> list[tuple[str, str, int]]:
    """(scheme, layout, replicas), co-located first."""
    own = SIZES[size]
    return [("gllm", *layout) for layout in own.colocated] + [(scheme, own.separate, 1) for scheme in SEPARATE]


def points() -> list[Point]:
    return [
        point(size, workload, share, *choice, seed)
        for size in SIZES for workload in WORKLOADS for share in LOADS for choice in choices(size) for seed in SEEDS
    ]  # fmt: skip


def cell(folder: Path, size: str, workload: str, share: float) -> dict[str, Any]:
    """TTFT of each separate scheme against the best co-located layout, as a share; and which layout that is."""
    means = {
        choice: mean(ttft(need(folder, point(size, workload, share, *choice, seed))) for seed in SEEDS)
        for choice in choices(size)
    }
    best = min((choice for choice in means if choice[0] == "gllm"), key=means.__getitem__)
    name = f"{best[2]} x {best[1] or '1 GPU'}" if best[2] > 1 else best[1]
    return {"best_colocated": name, "colocated_ttft_s": means[best]} | {
        choice[0]: means[choice] / means[best] - 1 for choice in means if choice[0] in SEPARATE
    }


def draw(folder: Path) -> list[Row]:
    found = {(s, i, share): cell(folder, s, i, share) for s in SIZES for i in WORKLOADS for share in LOADS}
    picture = Figure(figsize=(14, 6.5))
    for row, scheme in enumerate(SEPARATE):
        for column, (size, own) in enumerate(SIZES.items()):
            axes = picture.add_subplot(2, len(SIZES), row * len(SIZES) + column + 1)
            values = [[100 * found[size, workload, share][scheme] for share in LOADS] for workload in WORKLOADS]
            axes.imshow(values, cmap="RdYlGn_r", vmin=-60, vmax=60, aspect="auto")
            for y, workload in enumerate(WORKLOADS):
                for x, share in enumerate(LOADS):
                    text = f"{values[y][x]:+.0f} %\n{found[size, workload, share]['best_colocated']}"
                    axes.text(x, y, text, ha="center", va="center", fontsize=7)
            axes.set_xticks(range(len(LOADS)), [f"{share:g}" for share in LOADS])
            axes.set_yticks(range(len(WORKLOADS)), WORKLOADS, fontsize=7)
            layout = deploy(scheme, own.separate).layout
            axes.set_title(f"{scheme} {layout}, {size}, {own.devices} GPUs each", fontsize=8)
            axes.set_xlabel("load, share of the co-located pipeline's capacity", fontsize=7)
    picture.suptitle("mean TTFT against the best co-located layout on as many devices, simulated, H100", fontsize=9)
    picture.tight_layout()
    rows = [*(claim(scheme, found) for scheme in SEPARATE), elastic_claim(found)]
    numbers = [{"size": s, "workload": i, "load": share} | values for (s, i, share), values in found.items()]
    save(folder, NUMBER, picture, numbers, rows)
    return rows


def claim(scheme: str, found: dict[tuple[str, str, float], dict[str, Any]]) -> Row:
    wins = [key for key, value in found.items() if value[scheme] < 0]
    values = [value[scheme] for value in found.values()]
    where = []
    for size in SIZES:
        cells = " ".join(f"{workload}@{share:g}" for s, workload, share in wins if s == size)
        where.append(f"{size}: {cells or 'nowhere'}")
    return Row(
        figure=NUMBER, claim=f"{scheme} beats the best co-located layout at equal device count", paper="- (ours)",
        ours=f"{len(wins)} of {len(found)} cells, {percent(min(values))} to {percent(max(values))}",
        holds=len(wins) > len(found) / 2, devices="2 / 2 / 4 / 5", note=f"pays at (workload@load) {'; '.join(where)}",
    )  # fmt: skip


def elastic_claim(found: dict[tuple[str, str, float], dict[str, Any]]) -> Row:
    """Elastic against plain RServe, over the same cells."""
    changes = {key: (1 + v["rserve-elastic"]) / (1 + v["rserve"]) - 1 for key, v in found.items()}
    best, worst = min(changes, key=changes.__getitem__), max(changes, key=changes.__getitem__)
    return Row(
        figure=NUMBER, claim="rserve-elastic against rserve, the same devices", paper="- (ours)",
        ours=f"{percent(changes[best])} to {percent(changes[worst])}", holds=max(changes.values()) <= 0.02,
        devices="2 / 2 / 4 / 5", note=f"best {_name(best)}, worst {_name(worst)}; pays where the encoder is slower",
    )  # fmt: skip


def _name(key: tuple[str, str, float]) -> str:
    size, workload, share = key
    return f"{size} {workload}@{share:g}"


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
