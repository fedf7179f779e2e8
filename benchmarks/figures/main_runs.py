"""The runs behind figures 12, 13, 14 and 17: all schemes over the rates, 72B on H100, 1K and 2K."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.figures.curves import MAIN, Curves, Metric, grid, rates
from benchmarks.figures.points import Point
from benchmarks.sim.deployment import Deployment

WORKLOADS = ("1K", "2K")
TP4, PP4, GLLM, EPD, INTRA, RSERVE, ELASTIC = MAIN
SETTING = "72B, H100, simulated"


def points() -> list[Point]:
    return [point for workload in WORKLOADS for point in grid(MAIN, workload, rates(workload))]


def curves(folder: Path, metric: Metric, deployments: Sequence[Deployment] = MAIN) -> dict[str, Curves]:
    """By workload."""
    found = [point for point in points() if point.deployment in deployments]
    return {w: Curves(folder, [point for point in found if point.workload == w], metric) for w in WORKLOADS}


def panels(curves_by_workload: dict[str, Curves], what: str, log: bool = False) -> Figure:
    picture = Figure(figsize=(11, 3.8))
    for index, (workload, found) in enumerate(curves_by_workload.items()):
        found.draw(picture.add_subplot(1, 2, index + 1), f"{workload}, {SETTING}", what, log)
    picture.axes[0].legend(fontsize=7)
    picture.tight_layout()
    return picture


def devices(*deployments: Deployment) -> str:
    return " / ".join(str(d.num_devices) for d in deployments)
