"""Shared by figures 5, 7 and 10: a few requests at once, the same for every case, as timelines; drawn from the event
logs of simulated runs and, in a picture of its own, from those of the real system (benchmarks/real/timelines.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import results
from benchmarks.figures import timeline
from benchmarks.figures.frame import Row, figure_stem, write_picture
from benchmarks.figures.points import Point, event_log, need
from benchmarks.systems import deploy, label
from gllm.core import eventlog
from gllm.core.eventlog import Record


@dataclass(frozen=True, slots=True)
class Panel:
    """One run. title: what and where; devices: as in a row of claims."""

    case: str
    title: str
    summary: dict[str, float]
    log: list[Record]
    devices: str

    def numbers(self) -> dict[str, Any]:
        idle, bubbles = timeline.idle_shares(self.log), timeline.bubbles(self.log)
        stages = [name for name in idle if name.startswith("stage")]
        first = [span for span in timeline.spans(self.log)[stages[0]] if span["kind"] != "encode"]
        return {
            "devices": self.devices,
            "ttft_mean_s": self.summary["ttft_mean"],
            "seconds": self.summary["seconds"],
            "num_batches": len(first),
            "idle": idle,
            "bubbles": bubbles,
            "stage_idle_mean": sum(idle[name] for name in stages) / len(stages),
            "stage_bubble_mean": sum(bubbles[name] for name in stages) / len(stages),
        }


def point(scheme: str, num_requests: int, layout: str = "PP4", workload: str = "2K-interleaved") -> Point:
    """All arrive at once; two images each."""
    deployment = deploy(scheme, layout)
    return Point(deployment=deployment, workload=workload, rate=None, num_requests=num_requests, log=True)


def simulated(folder: Path, points: Iterable[Point]) -> list[Panel]:
    """Raises MissingResult."""
    return [
        Panel(
            point.deployment.scheme,
            f"{label(point.deployment)}, simulated",
            need(folder, point)["summary"],
            event_log(folder, point),
            str(point.deployment.num_devices),
        )
        for point in points
    ]


def measured(folder: Path, number: str, cases: Sequence[str]) -> list[Panel]:
    """The real system's runs for this figure, in the order of `cases`; none unless all of them are there."""
    panels = {}
    for result in results.measured(folder):
        log = folder / "measured" / f"{result.name}.events.jsonl"
        if result.config.get("figure") == f"timeline-{number}" and log.exists():
            case, devices, workload = (result.config[key] for key in ("case", "devices", "workload"))
            with log.open() as lines:
                records = list(eventlog.read(lines))
            title = f"{case}, MEASURED: {devices}, {result.machine}; {workload}"
            panels[case] = Panel(case, title, result.body["summary"], records, devices)
    return [panels[case] for case in cases] if {*cases} <= panels.keys() else []


def picture(panels: Sequence[Panel]) -> Figure:
    """One panel a case, on the same time axis."""
    drawn = Figure(figsize=(10, 1.75 * len(panels)))
    first = None
    for index, panel in enumerate(panels):
        axes = drawn.add_subplot(len(panels), 1, index + 1, sharex=first)
        first = first or axes
        summary = panel.summary
        times = f"mean TTFT {summary['ttft_mean']:.2f} s, all done {summary['seconds']:.2f} s"
        timeline.draw(axes, panel.log, f"{panel.title}: {times}")
    if first is not None:
        axes.set_xlabel("s (colour: request; hatched: encoding)")
    drawn.tight_layout()
    return drawn


def numbers(panels: Iterable[Panel]) -> dict[str, Any]:
    return {panel.case: panel.numbers() for panel in panels}


def draw_measured(folder: Path, number: str, cases: Sequence[str]) -> dict[str, Any]:
    """Draws the real system's runs beside the figure; returns their numbers, none when they are not there."""
    panels = measured(folder, number, cases)
    if panels:
        write_picture(folder, f"{figure_stem(number)}-measured", picture(panels))
    return numbers(panels)


def not_measured(number: str) -> Row:
    return Row(figure=number, claim="MEASURED: the same, from logs of the real system", paper="-", ours="-", holds=None,
               kind="measured", note="no measured timelines: run without --sim-only")  # fmt: skip
