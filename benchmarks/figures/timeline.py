"""Timelines drawn from event logs, simulated and real alike: a row for each worker, a bar for each span."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from matplotlib.axes import Axes

from gllm.core.eventlog import Record

COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c")
ENCODE_HATCH = "////"


def spans(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Busy spans by worker, encoders first, each in order of time."""
    by_worker: dict[str, list[Record]] = {}
    for record in records:
        if record["e"] == "span":
            by_worker.setdefault(record["worker"], []).append(record)
    ordered = sorted(by_worker, key=lambda name: (not name.startswith("encoder"), name))
    return {name: sorted(by_worker[name], key=lambda span: span["start"]) for name in ordered}


def idle_shares(records: Iterable[Record]) -> dict[str, float]:
    """Idle share of every worker between the first and the last span of any stage."""
    by_worker = spans(records)
    stages = [span for name, found in by_worker.items() if name.startswith("stage") for span in found]
    begin, end = min(s["start"] for s in stages), max(s["end"] for s in stages)
    shares = {}
    for name, found in by_worker.items():
        busy = sum(max(0.0, min(s["end"], end) - max(s["start"], begin)) for s in found)
        shares[name] = 1 - busy / (end - begin)
    return shares


def bubbles(records: Iterable[Record]) -> dict[str, float]:
    """Idle share of every stage between its own first and last span: what is lost once the pipeline has filled."""
    shares = {}
    for name, found in spans(records).items():
        busy = sum(s["end"] - s["start"] for s in found)
        shares[name] = 1 - busy / (found[-1]["end"] - found[0]["start"])
    return shares


def draw(axes: Axes, records: list[Record], title: str) -> None:
    """Bars in the colour of the (first) request; encoding is hatched."""
    by_worker, shares = spans(records), idle_shares(records)
    origin = min(found[0]["start"] for found in by_worker.values())
    for row, found in enumerate(by_worker.values()):
        for span in found:
            is_encode = span["kind"] == "encode"
            axes.barh(
                row, span["end"] - span["start"], left=span["start"] - origin, height=0.8, linewidth=0.4,
                color=color_of(span), edgecolor="black", hatch=ENCODE_HATCH if is_encode else None,
            )  # fmt: skip
    labels = [f"{name}  idle {100 * shares[name]:.0f} %" for name in by_worker]
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=8, loc="left")
    axes.tick_params(axis="x", labelsize=7)


def color_of(span: dict[str, Any]) -> str:
    """Requests are told apart by colour; a micro-batch of several has the colour of its first."""
    args = span["args"]
    request_id: int = (args.get("items") or args["chunks"])[0][0]
    return COLORS[request_id % len(COLORS)]
