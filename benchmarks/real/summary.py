"""Measured runs side by side: every system at every rate, mean and spread over the seeds, and ratios to gLLM-epd."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.results import Result

METRICS = ("ttft_mean", "ttft_p90", "e2e_mean", "tpot_mean", "input_tokens_per_s", "attainment", "goodput")
Key = tuple[str, float]


def rows(results: Iterable[Result]) -> list[dict[str, Any]]:
    """One row for each system and rate, in order: means over seeds, and "spread", the standard deviation over them."""
    groups: dict[Key, list[Result]] = {}
    for result in results:
        groups.setdefault((result.config["system"], result.config["rate"]), []).append(result)
    return [_row(key, group) for key, group in sorted(groups.items(), key=lambda pair: (pair[0][1], pair[0][0]))]


def _row(key: Key, group: Sequence[Result]) -> dict[str, Any]:
    good = [result.body["summary"] for result in group if "summary" in result.body]
    row: dict[str, Any] = {
        "system": key[0],
        "devices": group[0].config["devices"],
        "rate": key[1],
        "runs": len(good),
        "requests": sum(result.body["requests"] for result in group),
        "failed": sum(result.body["failed"] for result in group),
        "spread": {},
    }
    for metric in METRICS:
        values = [summary[metric] for summary in good if metric in summary]
        if values:
            row[metric] = statistics.fmean(values)
            row["spread"][metric] = statistics.stdev(values) if len(values) > 1 else 0.0
    return row


def ratios(table: Sequence[Mapping[str, Any]], metric: str, base: str) -> dict[str, dict[float, float]]:
    """Every system's metric over that of `base` at the same rate."""
    of_base = {row["rate"]: row[metric] for row in table if row["system"] == base and metric in row}
    found: dict[str, dict[float, float]] = {}
    for row in table:
        if metric in row and of_base.get(row["rate"]):
            found.setdefault(row["system"], {})[row["rate"]] = row[metric] / of_base[row["rate"]]
    return found


def text(table: Sequence[Mapping[str, Any]]) -> str:
    """The rows, one line each."""
    heads = ("rate/s", "system", "devices", "TTFT s", "p90", "tokens/s", "SLO", "failed", "runs")
    cells: list[tuple[str, ...]] = [heads]
    for row in table:
        if "ttft_mean" not in row:
            cells.append((f"{row['rate']:g}", row["system"], row["devices"], *["-"] * 4, str(row["failed"]), "0"))
            continue
        spread = row["spread"]
        cells.append(
            (
                f"{row['rate']:g}",
                row["system"],
                row["devices"],
                f"{row['ttft_mean']:.3f} ±{spread['ttft_mean']:.3f}",
                f"{row['ttft_p90']:.3f}",
                f"{row['input_tokens_per_s']:.0f} ±{spread['input_tokens_per_s']:.0f}",
                f"{100 * row['attainment']:.0f} %",
                str(row["failed"]),
                str(row["runs"]),
            )
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )
