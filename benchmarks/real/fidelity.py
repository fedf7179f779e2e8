"""Predicted against measured: the simulator, with this machine's costs, serves the very requests of the measured runs.

    python -m benchmarks.real.fidelity [--results DIR]     # after `compare` in the same folder

Costs come from `profile`, which put other requests to the same servers in between the runs; nothing is fitted to the
runs that are predicted. What is known of a run are its requests, and the pace of the cores while it lasted, which a
meter beside the servers tells (`pace`); what the same prediction would be without that, at the mean pace of the passes,
stands beside it. vLLM is measured but not predicted: its kernels are not ours.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.real.bench import allow_pixels
from benchmarks.real.checkpoint import write_checkpoint
from benchmarks.real.compare import of_plan, requests_of
from benchmarks.real.cost import Delays, MeasuredCost, WorkerCost, dot
from benchmarks.real.pace import Pace
from benchmarks.real.plan import Plan
from benchmarks.real.profile import FILE, pool
from benchmarks.real.requests import Prepared
from benchmarks.real.servers import KV_GIB
from benchmarks.results import Result
from benchmarks.sim.cluster import Cluster
from benchmarks.sim.deployment import SEPARATE, Deployment
from benchmarks.sim.job import Job
from benchmarks.sim.model_spec import ModelSpec, load_model
from gllm.config import EngineConfig
from gllm.core.request import Request
from gllm.engine.processor import Processor
from gllm.models.registry import model_info
from rserve.engine import BATCH_TOKENS

GOAL = 0.15


@dataclass(frozen=True, slots=True)
class Prediction:
    """Mean TTFTs in seconds, over the same runs. steady: predicted at the passes' mean pace. requests: (predicted,
    measured) of every single one."""

    system: str
    rate: float
    predicted: float
    steady: float
    measured: float
    runs: int
    requests: tuple[tuple[float, float], ...] = ()

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


class Preprocessing:
    """The API process's way from a data URL to pixels, in place of `benchmarks.sim.servers.PreprocessPool`: so many
    seconds for an image and for a megapixel, as the images of one request take it; those of the next wait for them."""

    def __init__(self, image_s: float, megapixel_s: float) -> None:
        self._free_at = 0.0
        self._image_s, self._megapixel_s = image_s, megapixel_s

    def done_at(self, now: float, num_pixels: int) -> float:
        self._free_at = max(now, self._free_at) + self._image_s + self._megapixel_s * num_pixels / 1e6
        return self._free_at


@dataclass(frozen=True, slots=True)
class Machine:
    """The cost file, read. workers: by `profile.pool`, and then "stage" and "encoder"; delays: by system."""

    workers: dict[str, dict[str, WorkerCost]]
    delays: dict[str, Delays]
    pace_unit_s: float

    @classmethod
    def read(cls, costs: dict[str, Any]) -> Machine:
        return cls(
            {name: {w: WorkerCost.read(one) for w, one in found.items()} for name, found in costs["workers"].items()},
            {name: Delays.read(found) for name, found in costs["delays"].items()},
            costs["pace_unit_s"],
        )

    def cost(self, system: str, model: ModelSpec, pace: Pace) -> MeasuredCost:
        workers = self.workers[pool(system)]
        kv_bytes = model.num_layers * model.kv_bytes_per_layer
        return MeasuredCost(
            model, workers["stage"], workers.get("encoder"), delays=self.delays[system], pace=pace,
            num_kv_tokens=(KV_GIB << 30) // kv_bytes,
        )  # fmt: skip

    def pace(self, run: Result) -> Pace:
        """Of the cores while a run lasted."""
        return Pace({int(core): samples for core, samples in run.body["pace"].items()}, self.pace_unit_s)


class Layout:
    """Bodies as our server lays them out: the same template, tokenizer and image sizes."""

    def __init__(self, checkpoint: Path) -> None:
        self._processor = Processor(checkpoint, model_info(checkpoint), EngineConfig(model_path=str(checkpoint)))
        self.model = model_spec(checkpoint)
        self._requests: dict[tuple[int, float], tuple[list[Prepared], list[Request]]] = {}

    def request(self, number: int, prepared: Prepared) -> Request:
        """A body in the core's terms."""
        body = json.loads(prepared.body)
        prompt = self._processor.chat(body["messages"])
        grids = [self._processor.images.grid(*size) for size in prepared.sizes]
        token_ids, items = self._processor.layout(prompt, grids)
        return Request(number, token_ids, items, body["max_tokens"])

    def requests(self, chosen: Plan, seed: int, rate: float) -> tuple[list[Prepared], list[Request]]:
        """Those of a measured run; remembered, since every system got the same."""
        if (seed, rate) not in self._requests:
            prepared = requests_of(chosen, seed, rate)
            self._requests[seed, rate] = prepared, [self.request(*numbered) for numbered in enumerate(prepared)]
        return self._requests[seed, rate]


def model_spec(checkpoint: Path) -> ModelSpec:
    """The sizes that the simulator's books need (patches, KV bytes); times do not come from them."""
    config = json.loads((checkpoint / "config.json").read_text())
    text = {**config, **(config.get("text_config") or {})}
    return replace(
        load_model("qwen2.5-vl-3b"),
        name="checkpoint",
        hidden_size=text["hidden_size"],
        num_layers=text["num_hidden_layers"],
        num_heads=text["num_attention_heads"],
        num_kv_heads=text["num_key_value_heads"],
        head_dim=text["hidden_size"] // text["num_attention_heads"],
    )


def predict(machine: Machine, layout: Layout, chosen: Plan, run: Result, pace: Pace) -> list[float]:
    """TTFTs in seconds of one measured run, in its requests' order."""
    system = run.config["system"]
    scheme = "gllm" if system == "gllm-1core" else system
    requests, laid_out = layout.requests(chosen, run.seed, run.config["rate"])
    delays = machine.delays[system]
    jobs = [
        Job(request.arrival + dot(delays.admit, (1.0, len(request.body))), job)
        for request, job in zip(requests, laid_out, strict=True)
    ]
    deployment = Deployment(
        scheme=scheme, encoders=int(scheme in SEPARATE), token_budget=chosen.token_budget,
        encoder_batch_tokens=BATCH_TOKENS["cpu"],
    )  # fmt: skip
    cost = machine.cost(system, layout.model, pace)
    cluster = Cluster(deployment, cost)  # type: ignore[arg-type]
    cluster.preprocess = Preprocessing(*delays.ready)  # type: ignore[assignment]
    cost.watch(cluster)
    served = {one.request_id: one.first_token for one in cluster.run(jobs).served}
    return [served[n] + delays.answer - request.arrival for n, request in enumerate(requests)]


def compare(machine: Machine, layout: Layout, chosen: Plan, found: Iterable[Result]) -> list[Prediction]:
    """For each of our systems at three of its rates, the lowest, the middle and the highest."""
    by_key: dict[tuple[str, float], list[Result]] = {}
    for result in found:
        if result.config["system"] in machine.delays and "summary" in result.body and result.body.get("pace"):
            by_key.setdefault((result.config["system"], result.config["rate"]), []).append(result)
    rates = chosen.rates
    wanted = {rates[0], rates[len(rates) // 2], rates[-1]}
    return [prediction(machine, layout, chosen, runs) for (_, rate), runs in sorted(by_key.items()) if rate in wanted]


def prediction(machine: Machine, layout: Layout, chosen: Plan, runs: Sequence[Result]) -> Prediction:
    """Of the runs of one system at one rate."""
    steady = Pace({}, machine.pace_unit_s)
    rows: list[tuple[float, float, float]] = []
    for run in runs:
        paces = (machine.pace(run), steady)
        ttfts = zip(*(predict(machine, layout, chosen, run, pace) for pace in paces), run.body["outcomes"], strict=True)
        rows += [(known, mean, o["first_token"] - o["arrival"]) for known, mean, o in ttfts if o["error"] is None]
    predicted, at_mean_pace, measured = zip(*rows, strict=True)
    return Prediction(
        system=runs[0].config["system"], rate=runs[0].config["rate"], predicted=statistics.fmean(predicted),
        steady=statistics.fmean(at_mean_pace), measured=statistics.fmean(measured), runs=len(runs),
        requests=tuple(zip(predicted, measured, strict=True)),
    )  # fmt: skip


def text(predictions: Sequence[Prediction]) -> str:
    lines = [
        "mean TTFT, s: predicted by the simulator with this machine's costs, with the pace of the cores in each run"
    ]
    lines[0] += " and at their mean pace; and measured"
    lines.append(f"{'system':14}{'rate/s':>8}{'predicted':>11}{'at mean':>9}{'measured':>10}{'error':>8}  runs")
    for p in predictions:
        mark = "" if abs(p.error) <= GOAL else f"  beyond {GOAL:.0%}"
        lines.append(
            f"{p.system:14}{p.rate:8g}{p.predicted:11.3f}{p.steady:9.3f}{p.measured:10.3f}{100 * p.error:+7.1f} %  "
            f"{p.runs}{mark}"
        )
    good = sum(abs(p.error) <= GOAL for p in predictions)
    lines.append(f"{good} of {len(predictions)} within {GOAL:.0%}; single requests: {scatter(predictions)}")
    return "\n".join(lines)


def scatter(predictions: Sequence[Prediction]) -> str:
    """How close single requests are, in words: by the logarithms of their TTFTs. The correlation is that within cells
    of one system and rate, so that differences between cells do not help."""
    cells = [[(math.log(p), math.log(m)) for p, m in cell.requests] for cell in predictions if len(cell.requests) > 1]
    if not cells:
        return "too few"
    inside = [
        (p - statistics.fmean(p for p, _ in cell), m - statistics.fmean(m for _, m in cell))
        for cell in cells
        for p, m in cell
    ]
    correlation = statistics.correlation([p for p, _ in inside], [m for _, m in inside])
    sd = statistics.stdev(p - m for cell in cells for p, m in cell)
    return f"{len(inside)}, correlation {correlation:.2f} within cells, scatter {math.expm1(sd):.0%}"


def run(folder: Path) -> list[Prediction]:
    """Raises FileNotFoundError when the measurements are not there, and ValueError when they do not belong together; in
    one line."""
    chosen = Plan.read(folder)
    if chosen is None or not (folder / FILE).exists():
        raise FileNotFoundError(f"{folder} has no real-plan.json and {FILE}: run compare first")
    costs = json.loads((folder / FILE).read_text())
    if costs.get("plan_digest", "") not in (chosen.digest, None):
        raise ValueError(f"{folder / FILE} was not measured along with these runs: run compare or profile again")
    machine = Machine.read(costs)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(chosen.model_path or Path(scratch, "checkpoint"))
        if chosen.model_path is None:
            write_checkpoint(checkpoint)
            allow_pixels(checkpoint, chosen.mix.side[1])
        predictions = compare(machine, Layout(checkpoint), chosen, of_plan(chosen, folder))
    if not predictions:
        raise ValueError(f"{folder} has no runs of this plan whose pace and costs are known: run compare again")
    numbers = [{**{n: getattr(p, n) for n in Prediction.__slots__}, "error": p.error} for p in predictions]
    results.write_json(
        folder / "real-fidelity.json",
        {
            "kind": "simulated against measured",
            "machine": results.this_machine(),
            "commit": results.commit(),
            "plan_digest": chosen.digest,
            "goal": GOAL,
            "costs": "from passes between the runs" if costs["plan_digest"] else "from passes at another time",
            "left_out": costs["left_out"],
            "scatter": scatter(predictions),
            "predictions": numbers,
        },
    )
    return predictions


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    args = parser.parse_args(argv)
    try:
        predictions = run(args.results)
    except (FileNotFoundError, ValueError) as error:
        print(f"fidelity: {error}", file=sys.stderr)
        return 1
    print(text(predictions))
    return 0


if __name__ == "__main__":
    sys.exit(main())
