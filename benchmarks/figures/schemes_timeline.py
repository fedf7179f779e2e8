"""Shared by figures 7 and 10: a few requests close together, the same for every scheme, as timelines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.figures import timeline
from benchmarks.figures.points import Point, event_log, need
from benchmarks.systems import deploy, label


def point(scheme: str, num_requests: int, layout: str = "PP4", workload: str = "2K-interleaved") -> Point:
    """All arrive at once; two images each."""
    deployment = deploy(scheme, layout)
    return Point(deployment=deployment, workload=workload, rate=None, num_requests=num_requests, log=True)


def draw(folder: Path, points: Sequence[Point]) -> tuple[Figure, dict[str, Any]]:
    """The picture, one panel a scheme on the same time axis, and the numbers by scheme."""
    picture = Figure(figsize=(10, 1.75 * len(points)))
    numbers: dict[str, Any] = {}
    first = None
    for index, drawn in enumerate(points):
        body, log = need(folder, drawn), event_log(folder, drawn)
        axes = picture.add_subplot(len(points), 1, index + 1, sharex=first)
        first = first or axes
        summary = body["summary"]
        times = f"mean TTFT {summary['ttft_mean']:.2f} s, all done {summary['seconds']:.2f} s"
        timeline.draw(axes, log, f"{label(drawn.deployment)}, simulated: {times}")
        idle, bubbles = timeline.idle_shares(log), timeline.bubbles(log)
        stages = [name for name in idle if name.startswith("stage")]
        numbers[drawn.deployment.scheme] = {
            "devices": drawn.deployment.num_devices,
            "ttft_mean_s": summary["ttft_mean"],
            "seconds": summary["seconds"],
            "num_batches": body["num_batches"],
            "idle": idle,
            "bubbles": bubbles,
            "stage_idle_mean": sum(idle[name] for name in stages) / len(stages),
            "stage_bubble_mean": sum(bubbles[name] for name in stages) / len(stages),
        }
    if first is not None:
        axes.set_xlabel("s (colour: request; hatched: encoding)")
    picture.tight_layout()
    return picture, numbers
