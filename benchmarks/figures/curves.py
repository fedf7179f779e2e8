"""Curves over the request rate: which points they need, their means over seeds, and how they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks.figures.points import Point, need, simulate
from benchmarks.metrics import attainment, mean
from benchmarks.sim.deployment import Deployment
from benchmarks.systems import deploy, label, system

Body = dict[str, Any]
Metric = Callable[[Body], float]

# The paper does not give its rates. Ours: these shares of the rate at which the simulated RServe is saturated.
LOADS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3)
SEEDS = (0, 1, 2)
NUM_REQUESTS = 300
MODEL, HARDWARE = "qwen2.5-vl-72b", "h100-sxm"
MAIN = (
    deploy("vllm", "TP4"),
    deploy("vllm", "PP4"),
    deploy("gllm", "PP4"),
    deploy("gllm-epd", "PP4"),
    deploy("rserve-intra", "PP4"),
    deploy("rserve", "PP4"),
    deploy("rserve-elastic", "PP4"),
)


@cache
def capacity(base: Point) -> float:
    """Requests a second that the deployment of this point finishes when all arrive at once."""
    body = simulate(replace(base, rate=None, num_requests=100))
    rate: float = body["summary"]["requests_per_s"]
    return rate


def rates(
    workload: str, loads: Sequence[float] = LOADS, deployment: Deployment | None = None, model: str = MODEL,
    hardware: str = HARDWARE,
) -> list[float]:  # fmt: skip
    """The grid of a workload: shares of the capacity of RServe on PP4+E1 (or of `deployment`), two decimals."""
    deployment = deployment or deploy("rserve", "PP4")
    full = capacity(
        Point(deployment=deployment, workload=workload, rate=None, num_requests=100, model=model, hardware=hardware)
    )
    return [max(0.01, round(load * full, 2)) for load in loads]


def grid(
    deployments: Sequence[Deployment], workload: str, at: Sequence[float], model: str = MODEL,
    hardware: str = HARDWARE,
) -> list[Point]:  # fmt: skip
    """Every deployment at every rate, with every seed."""
    return [
        Point(deployment=d, workload=workload, rate=rate, num_requests=NUM_REQUESTS, seed=seed, model=model,
              hardware=hardware)
        for d in deployments for rate in at for seed in SEEDS
    ]  # fmt: skip


def ttft(body: Body) -> float:
    value: float = body["summary"]["ttft_mean"]
    return value


def throughput(body: Body) -> float:
    value: float = body["summary"]["input_tokens_per_s"]
    return value


def attained(slo: float) -> Metric:
    return lambda body: attainment(body["ttfts"], slo)


class Curves:
    """Means over seeds of one metric, by deployment, over the rates of one workload. Raises MissingResult."""

    def __init__(self, folder: Path, points: Sequence[Point], metric: Metric) -> None:
        values: dict[Deployment, dict[float, list[float]]] = {}
        for point in points:
            body = need(folder, point)
            assert point.rate is not None
            values.setdefault(point.deployment, {}).setdefault(point.rate, []).append(metric(body))
        self.spread = values
        self.rates = sorted({rate for by_rate in values.values() for rate in by_rate})

    def of(self, deployment: Deployment) -> list[float]:
        return [mean(self.spread[deployment][rate]) for rate in self.rates]

    def change(self, ours: Deployment, base: Deployment) -> float:
        """Mean over the rates of ours / base - 1."""
        return mean(a / b - 1 for a, b in zip(self.of(ours), self.of(base), strict=True))

    def draw(self, axes: Axes, title: str, what: str, log: bool = False) -> None:
        for deployment in self.spread:
            look = system(deployment.scheme)
            style = "--" if deployment.tp > 1 else "-"
            axes.plot(self.rates, self.of(deployment), style, color=look.color, marker=look.marker, ms=4, lw=1.3,
                      label=label(deployment))  # fmt: skip
        axes.set(title=title, xlabel="requests/s", ylabel=what)
        if log:
            axes.set_yscale("log")
        axes.grid(alpha=0.3)

    def numbers(self) -> dict[str, Any]:
        return {"rates": self.rates} | {label(d): [round(v, 4) for v in self.of(d)] for d in self.spread}
