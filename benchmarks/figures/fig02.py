"""Figure 2: the encoder's share of the TTFT of one request with two images, over their resolution, on four devices."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.figures.frame import Row, main, near, save
from benchmarks.figures.points import Point, need
from benchmarks.sim.images import RESOLUTIONS
from benchmarks.systems import deploy

NUMBER = "2"
LAYOUTS = ("TP4", "PP4")


def point(layout: str, resolution: str, limit: bool) -> Point:
    return Point(
        deployment=deploy("gllm", layout), workload=resolution, rate=None, num_requests=1, limit_pixels=limit
    )  # fmt: skip


def points() -> list[Point]:
    return [point(layout, name, limit) for layout in LAYOUTS for name in RESOLUTIONS for limit in (True, False)]


def parts(folder: Path, layout: str, resolution: str, limit: bool) -> dict[str, float]:
    body = need(folder, point(layout, resolution, limit))
    encode, whole = body["busy"]["stage 0"]["encode"], body["summary"]["ttft_mean"]
    return {"encode_s": encode, "ttft_s": whole, "share": encode / whole}


def draw(folder: Path) -> list[Row]:
    found = {
        (layout, name, limit): parts(folder, layout, name, limit)
        for layout in LAYOUTS for name in RESOLUTIONS for limit in (True, False)
    }  # fmt: skip
    picture = Figure(figsize=(9, 3.2))
    for column, limit in enumerate((True, False)):
        axes = picture.add_subplot(1, 2, column + 1)
        for shift, layout in enumerate(LAYOUTS):
            cells = [found[layout, name, limit] for name in RESOLUTIONS]
            x = [i + 0.4 * shift - 0.2 for i in range(len(cells))]
            axes.bar(x, [c["encode_s"] for c in cells], 0.38, color="#dd8452", edgecolor="black", hatch="////")
            axes.bar(x, [c["ttft_s"] - c["encode_s"] for c in cells], 0.38, bottom=[c["encode_s"] for c in cells],
                     color="#4c72b0", edgecolor="black")  # fmt: skip
            for at, cell in zip(x, cells, strict=True):
                axes.text(
                    at, cell["ttft_s"], f"{layout}\n{100 * cell['share']:.0f} %", ha="center", va="bottom", fontsize=7
                )
        axes.set_xticks(range(len(RESOLUTIONS)), RESOLUTIONS)
        axes.set_ylabel("TTFT, s (encoding hatched)")
        axes.margins(y=0.2)
        axes.set_title(f"72B, 4 x H100, simulated, {'default' if limit else 'no'} pixel limit", fontsize=9)
    picture.tight_layout()
    rows = claims(found)
    numbers = [{"layout": k[0], "resolution": k[1], "default_limit": k[2], **v} for k, v in found.items()]
    save(folder, NUMBER, picture, numbers, rows)
    return rows


def claims(found: dict[tuple[str, str, bool], dict[str, float]]) -> list[Row]:
    low, high = found["PP4", "1K", True]["share"], found["PP4", "8K", True]["share"]
    unlimited, tensor = found["PP4", "8K", False]["share"], found["TP4", "8K", True]["share"]
    ratio = found["PP4", "1K", True]["ttft_s"] / found["TP4", "1K", True]["ttft_s"]
    common: dict[str, Any] = {"figure": NUMBER, "devices": "4"}
    return [
        Row(claim="encoder share of TTFT, 1K, PP4", paper="11 %", ours=f"{100 * low:.0f} %", holds=near(low, 0.11),
            note="fitted: the ViT efficiency is chosen for this number", **common),
        Row(claim="encoder share of TTFT, 8K, PP4", paper="26 %", ours=f"{100 * high:.0f} %", holds=near(high, 0.26),
            note="with the processor's default pixel limit, which scales 8K down to 12.8 megapixels; without it "
                 f"{100 * unlimited:.0f} %", **common),
        Row(claim="encoder share of TTFT, 8K, TP4", paper="26 %", ours=f"{100 * tensor:.0f} %",
            holds=near(tensor, 0.26), note="here the ViT is sharded over the four devices (vLLM's default), which "
            "divides its time", **common),
        Row(claim="PP with CPP about equals TP for one request: TTFT PP4 / TP4, 1K", paper="about 1",
            ours=f"{ratio:.2f}", holds=0.85 <= ratio <= 1.15, note="at B = 2048 a prompt is 5 chunks, of which 3 slots "
            "drain the pipeline; see `budget` for smaller B, where it holds", **common),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
