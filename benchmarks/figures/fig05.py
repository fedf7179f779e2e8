"""Figure 5: chunked pipeline parallelism against vanilla PP, a timeline of one long prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.figures import schemes_timeline, timeline
from benchmarks.figures.frame import Row, main, near, percent, save
from benchmarks.figures.points import Point, event_log, need
from benchmarks.systems import deploy

NUMBER = "5"
STAGES = 4
CASES = {"vanilla PP": False, "CPP": True}
MEASURED = ("vanilla", "cpp")


def point(chunked: bool) -> Point:
    deployment = deploy("gllm", f"PP{STAGES}", chunked_pipeline=chunked, token_budget=1024)
    return Point(deployment=deployment, workload="1K", rate=None, num_requests=1, log=True)


def points() -> list[Point]:
    return [point(chunked) for chunked in CASES.values()]


def draw(folder: Path) -> list[Row]:
    picture = Figure(figsize=(9, 4))
    numbers: dict[str, Any] = {}
    for index, (name, chunked) in enumerate(CASES.items()):
        body = need(folder, point(chunked))
        # The encode precedes every chunk and is not part of the pipeline.
        log = [r for r in event_log(folder, point(chunked)) if r["e"] == "span" and r["kind"] == "prefill"]
        axes = picture.add_subplot(2, 1, index + 1, sharex=picture.axes[0] if index else None)
        timeline.draw(axes, log, f"{name}, simulated, 72B on {STAGES} x H100, one request in chunks of 1,024 tokens")
        shares = timeline.idle_shares(log)
        numbers[name] = {
            "ttft_s": body["summary"]["ttft_mean"],
            "chunks": len({span["args"]["batch"] for span in log}),
            "idle": shares,
            "idle_mean": sum(shares.values()) / len(shares),
        }
    axes.set_xlabel("s")
    picture.tight_layout()
    cpp, vanilla = numbers["CPP"], numbers["vanilla PP"]
    formula = bubble(STAGES, cpp["chunks"])
    rows = [
        Row(figure=NUMBER, claim="bubble of CPP is (P-1)/(P-1+M)", paper=f"{formula:.2f}",
            ours=f"{cpp['idle_mean']:.2f}", holds=near(cpp["idle_mean"], formula), devices="4",
            note="the last chunk is shorter than the others"),
        Row(figure=NUMBER, claim="TTFT of CPP against vanilla PP, one request", paper="lower",
            ours=percent(cpp["ttft_s"] / vanilla["ttft_s"] - 1), holds=cpp["ttft_s"] < vanilla["ttft_s"], devices="4"),
    ]  # fmt: skip
    real = schemes_timeline.draw_measured(folder, NUMBER, MEASURED)
    rows += measured_rows(real)
    save(folder, NUMBER, picture, numbers | {"measured": real}, rows)
    return rows


def bubble(stages: int, chunks: int) -> float:
    """paper.md, section 1."""
    return (stages - 1) / (stages - 1 + chunks)


def measured_rows(real: dict[str, Any]) -> list[Row]:
    if not real:
        return [schemes_timeline.not_measured(NUMBER)]
    vanilla, cpp = (real[case] for case in MEASURED)
    formula = bubble(2, cpp["num_batches"])
    return [
        Row(figure=NUMBER, claim="MEASURED: TTFT of CPP against vanilla PP, one text prompt on 2 stages", paper="lower",
            ours=percent(cpp["ttft_mean_s"] / vanilla["ttft_mean_s"] - 1), kind="measured", devices=cpp["devices"],
            holds=cpp["ttft_mean_s"] < vanilla["ttft_mean_s"],
            note=f"mean idle share of the stages {vanilla['stage_idle_mean']:.2f} / {cpp['stage_idle_mean']:.2f}; "
            f"the formula gives {formula:.2f} for chunks that take equally long on cores of their own"),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
