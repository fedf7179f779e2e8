"""Serving metrics over the requests of one run, simulated or measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol


class Finished(Protocol):
    """One request that was served; times in seconds on one clock."""

    arrival: float
    first_token: float
    finish: float
    prompt_tokens: int
    output_tokens: int


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of the values do not exceed. Raises ValueError when empty."""
    if not values:
        raise ValueError("percentile of no values")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def attainment(ttfts: Sequence[float], slo: float) -> float:
    """Share of requests whose TTFT is within the SLO (seconds)."""
    return sum(ttft <= slo for ttft in ttfts) / len(ttfts)


def summarise(served: Sequence[Finished], slo: float = 10.0) -> dict[str, float]:
    """Means and percentiles in seconds, throughputs per second over the time from the first arrival to the last finish,
    SLO attainment and goodput (requests a second within the SLO)."""
    ttfts = [s.first_token - s.arrival for s in served]
    e2es = [s.finish - s.arrival for s in served]
    tpots = [(s.finish - s.first_token) / (s.output_tokens - 1) for s in served if s.output_tokens > 1]
    seconds = max(s.finish for s in served) - min(s.arrival for s in served)
    summary = {
        "requests": len(served),
        "seconds": seconds,
        "ttft_mean": mean(ttfts),
        "e2e_mean": mean(e2es),
        "input_tokens_per_s": sum(s.prompt_tokens for s in served) / seconds,
        "output_tokens_per_s": sum(s.output_tokens for s in served) / seconds,
        "requests_per_s": len(served) / seconds,
        "slo_s": slo,
        "attainment": attainment(ttfts, slo),
        "goodput": sum(ttft <= slo for ttft in ttfts) / seconds,
    }
    summary |= {f"ttft_p{round(100 * p)}": percentile(ttfts, p) for p in (0.5, 0.9, 0.99)}
    if tpots:
        summary |= {"tpot_mean": mean(tpots)} | {f"tpot_p{round(100 * p)}": percentile(tpots, p) for p in (0.5, 0.99)}
    return summary
