"""One simulated run as a value: what is served, on what, how often; and its result, made once and kept on disk."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import metrics, results, workloads
from benchmarks.results import Result
from benchmarks.sim.cluster import Cluster, Preprocessing
from benchmarks.sim.cost import CostModel, Efficiency
from benchmarks.sim.deployment import Deployment
from benchmarks.sim.fitted import load_efficiency
from benchmarks.sim.hardware import load_hardware
from benchmarks.sim.model_spec import load_model
from gllm.core import eventlog
from gllm.core.eventlog import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """rate: requests a second (Poisson), None: all at once. preprocess_s: CPU seconds per megapixel before an image
    can be encoded; 0 in the paper's figures, since the paper gives no such cost and all schemes share it."""

    deployment: Deployment
    workload: str
    rate: float | None
    num_requests: int
    seed: int = 0
    model: str = "qwen2.5-vl-72b"
    hardware: str = "h100-sxm"
    output_tokens: int = 1
    preprocess_s: float = 0.0
    limit_pixels: bool = True
    log: bool = False

    @property
    def name(self) -> str:
        """File name of the result: readable, and different for different points."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:10]
        rate = "once" if self.rate is None else f"{self.rate:g}"
        layout = self.deployment.layout.replace(" ", "").replace("+", "-")
        return f"{self.workload}/{self.deployment.scheme}-{layout}-{rate}-s{self.seed}-{digest}"


@cache
def cost_model(model: str, hardware: str, efficiency: Efficiency | None = None) -> CostModel:
    return CostModel(load_model(model), load_hardware(hardware), efficiency or load_efficiency())


def simulate(point: Point, efficiency: Efficiency | None = None) -> dict[str, Any]:
    """Run a point; the body of its result. With `log`, the event log is in it."""
    cost = cost_model(point.model, point.hardware, efficiency)
    if point.rate is None:
        arrivals = workloads.at_once(point.num_requests)
    else:
        arrivals = workloads.poisson(point.rate, point.num_requests, point.seed)
    shapes = workloads.shapes(point.workload, arrivals, point.seed, point.output_tokens)
    jobs = workloads.jobs(shapes, cost.model, point.limit_pixels)
    log: list[dict[str, Any]] = []
    cluster = Cluster(
        point.deployment,
        cost,
        Preprocessing(seconds_per_megapixel=point.preprocess_s),
        sink=log.append if point.log else None,
    )
    run = cluster.run(jobs)
    ttfts = [round(s.first_token - s.arrival, 6) for s in run.served]
    body: dict[str, Any] = {
        "summary": metrics.summarise(run.served),
        "prompt_tokens_mean": metrics.mean(s.prompt_tokens for s in run.served),
        "busy": run.busy,
        "num_batches": run.num_batches,
        "preemptions": run.preemptions,
        "ttfts": ttfts,
    }
    return body | ({"log": log} if point.log else {})


class MissingResult(LookupError):
    """A run that a figure reads was not made (with the code as it is now)."""


def need(folder: Path, point: Point) -> dict[str, Any]:
    """The body of a point's result. Raises MissingResult, which names the run."""
    body = load(folder, point)
    if body is None:
        raise MissingResult(f"no current result of {point.name}")
    return body


def load(folder: Path, point: Point) -> dict[str, Any] | None:
    """The body of a point's result, or None when it was not run with the code as it is now."""
    result = results.read(folder, "simulated", point.name)
    return result.body if result is not None and result.sources == results.sources() else None


def event_log(folder: Path, point: Point) -> list[Record]:
    """The event log of a point with `log`, in the format that the engine's --event-log writes."""
    need(folder, point)
    with _log_path(folder, point).open() as lines:
        return list(eventlog.read(lines))


def _log_path(folder: Path, point: Point) -> Path:
    return folder / "simulated" / f"{point.name}.events.jsonl"


def run_and_write(folder: Path, point: Point) -> None:
    """Make a point's result; its event log stands beside it."""
    body = simulate(point)
    if point.log:
        path = _log_path(folder, point)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(eventlog.dump(record) + "\n" for record in body.pop("log")))
    config = {"system": point.deployment.scheme, **asdict(point), "efficiency": asdict(load_efficiency())}
    results.write(
        folder,
        Result(
            kind="simulated",
            name=point.name,
            config=config,
            seed=point.seed,
            commit=results.commit(),
            machine=f"simulated: {point.deployment.num_devices} x {point.hardware}",
            body=body,
            sources=results.sources(),
        ),
    )


def run_all(folder: Path, points: Iterable[Point], workers: int | None = None) -> None:
    """Run the points that have no current result, in parallel, with progress on stderr. Interrupted, what is finished
    stays."""
    wanted = list(dict.fromkeys(points))
    results.sources()  # once, here: the workers inherit it, whatever happens to the files meanwhile
    missing = [point for point in wanted if load(folder, point) is None]
    print(f"{len(wanted)} simulated runs, {len(wanted) - len(missing)} of them finished before", file=sys.stderr)
    if not missing:
        return
    begin = time.monotonic()
    with ProcessPoolExecutor(workers or min(2, os.cpu_count() or 1)) as pool:
        futures = [pool.submit(run_and_write, folder, point) for point in missing]
        try:
            for count, future in enumerate(as_completed(futures), 1):
                future.result()
                if count % 50 == 0 or count == len(missing):
                    seconds = time.monotonic() - begin
                    print(f"  {count} of {len(missing)} runs, {seconds:.0f} s", file=sys.stderr, flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
