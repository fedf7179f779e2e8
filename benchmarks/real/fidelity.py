"""Predicted against measured: the simulator, with this machine's costs, serves the very requests of the measured runs.

    python -m benchmarks.real.fidelity [--results DIR]     # after `compare` in the same folder

Costs come from `profile`, which timed single pieces of work in between the runs; nothing is fitted to the runs that are
predicted. A shared machine is slow at times: probes before and after each run tell how much longer work takes in it.
What is modelled beside the models' work: HTTP and admission (constant, and by body size), preprocessing by two threads,
the driver's step, messages to the encoder and back, workers that slow each other down, and the share of the cores that
the API process takes. vLLM is measured but not predicted: its kernels are not ours.
"""

from __future__ import annotations

import argparse
import heapq
import json
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
from benchmarks.real.cost import MeasuredCost, SeatCost
from benchmarks.real.overheads import line_through
from benchmarks.real.plan import OURS, Plan
from benchmarks.real.profile import FILE
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
RATES = 3
MEDIA_THREADS = 2  # of the API process on two cores
NUMBER = "fidelity"


@dataclass(frozen=True, slots=True)
class Prediction:
    """Mean TTFTs in seconds, over the same seeds."""

    system: str
    rate: float
    predicted: float
    measured: float
    runs: int

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


class Preprocessing:
    """The API process's decoders, as `benchmarks.sim.servers.PreprocessPool`, with a constant for every image."""

    def __init__(self, image_s: float, megapixel_s: float) -> None:
        self._free_at = [0.0] * MEDIA_THREADS
        self._image_s, self._megapixel_s = image_s, megapixel_s

    def done_at(self, now: float, num_pixels: int) -> float:
        end = max(now, heapq.heappop(self._free_at)) + self._image_s + self._megapixel_s * num_pixels / 1e6
        heapq.heappush(self._free_at, end)
        return end


@dataclass(frozen=True, slots=True)
class Machine:
    """The cost file, read. request_s: HTTP and admission; step_s: the driver's step; api_cpu_s: of a request without
    its images, image_cpu: (an image, a megapixel)."""

    costs: dict[str, Any]
    seats: dict[str, SeatCost]
    request_s: float
    body_byte_s: float
    step_s: float
    hop_s: float
    api_cpu_s: float
    image: tuple[float, float]
    image_cpu: tuple[float, float]

    @classmethod
    def read(cls, costs: dict[str, Any]) -> Machine:
        seats = {name: SeatCost(measured) for name, measured in costs["seats"].items()}
        servers, baseline = costs["servers"], seats["baseline"]
        decode_s = baseline.chunks([(int(servers["decode_context"]), 1)]) + baseline.sample(1)
        step_s = max(0.0, servers["decode_gap"] - decode_s)
        text_s = baseline.chunks([(0, int(servers["text_prompt_tokens"]))]) + baseline.sample(1)
        return cls(
            costs=costs,
            seats=seats,
            request_s=max(0.0, servers["text_ttft"] - text_s - step_s),
            body_byte_s=servers["per_body_byte"],
            step_s=step_s,
            hop_s=max(0.0, servers["health_with_encoder"] - servers["health"]) / 2,
            api_cpu_s=servers["request_cpu"],
            image=line_through(costs["preprocessing"], "seconds"),
            image_cpu=line_through(costs["preprocessing"], "cpu"),
        )

    def pace(self, run: Result) -> float:
        """How many times slower than usual the machine was around a run."""
        probes = [probe for probe in run.body.get("probe_s", ()) if probe]
        return statistics.fmean(probes) / float(self.costs["probe_s"]) if probes else 1.0

    def cost(self, scheme: str, cores: int, model: ModelSpec, load: float, pace: float) -> MeasuredCost:
        """load: cores that the API process keeps busy. It takes from all cores alike; workers whose threads wait for
        each other lose with each of them."""
        separate = scheme in SEPARATE
        stage = self.seats["stage" if separate or cores == 1 else "baseline"]
        stolen = min(0.5, load / cores)
        kv_bytes = model.num_layers * model.kv_bytes_per_layer
        return MeasuredCost(
            model,
            stage,
            self.seats["encoder"] if separate else None,
            num_kv_tokens=(KV_GIB << 30) // kv_bytes,
            step_s=self.step_s,
            hop_s=self.hop_s,
            token_s=self.costs["transfer_token_s"],
            beside=self.costs["beside"],
            stolen=(stolen, stolen if separate else min(0.5, load)),
            pace=pace,
        )


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


def predict(machine: Machine, layout: Layout, chosen: Plan, run: Result) -> list[float]:
    """TTFTs in seconds of one measured run, in its requests' order."""
    system, rate, pace = run.config["system"], run.config["rate"], machine.pace(run)
    requests, laid_out = layout.requests(chosen, run.seed, rate)
    jobs = [
        Job(request.arrival + pace * machine.request_s + machine.body_byte_s * len(request.body), job)
        for request, job in zip(requests, laid_out, strict=True)
    ]
    scheme, cores = ("gllm", 1) if system == "gllm-1core" else (system, machine.costs["config"]["cores"])
    deployment = Deployment(
        scheme=scheme, encoders=int(scheme in SEPARATE), token_budget=chosen.token_budget,
        encoder_batch_tokens=BATCH_TOKENS["cpu"],
    )  # fmt: skip
    cost = machine.cost(scheme, cores, layout.model, pace * api_load(machine, requests, rate), pace)
    cluster = Cluster(deployment, cost)  # type: ignore[arg-type]
    cluster.preprocess = Preprocessing(*(pace * seconds for seconds in machine.image))  # type: ignore[assignment]
    cost.watch(cluster)
    served = {one.request_id: one.first_token for one in cluster.run(jobs).served}
    return [served[n] - request.arrival for n, request in enumerate(requests)]


def api_load(machine: Machine, requests: Sequence[Prepared], rate: float) -> float:
    """Cores that HTTP, admission and preprocessing keep busy while requests come."""
    image_s, megapixel_s = machine.image_cpu
    sizes = [size for request in requests for size in request.sizes]
    images = sum(image_s + megapixel_s * width * height / 1e6 for width, height in sizes)
    return rate * (machine.api_cpu_s + images / len(requests))


def compare(machine: Machine, layout: Layout, chosen: Plan, found: Iterable[Result]) -> list[Prediction]:
    """For each of our systems at three of its rates, the lowest, the middle and the highest."""
    by_key: dict[tuple[str, float], list[Result]] = {}
    for result in found:
        if result.config["system"] in (*OURS, "gllm-1core") and "summary" in result.body:
            by_key.setdefault((result.config["system"], result.config["rate"]), []).append(result)
    rates = chosen.rates
    wanted = sorted({rates[0], rates[len(rates) // 2], rates[-1]})[:RATES]
    predictions = []
    for (system, rate), runs in sorted(by_key.items()):
        if rate in wanted:
            predicted = [statistics.fmean(predict(machine, layout, chosen, run)) for run in runs]
            measured = [run.body["summary"]["ttft_mean"] for run in runs]
            predictions.append(
                Prediction(system, rate, statistics.fmean(predicted), statistics.fmean(measured), len(runs))
            )
    return predictions


def text(predictions: Sequence[Prediction]) -> str:
    lines = ["mean TTFT, s: predicted by the simulator with this machine's costs, and measured"]
    lines.append(f"{'system':14}{'rate/s':>8}{'predicted':>11}{'measured':>10}{'error':>8}  runs")
    for p in predictions:
        mark = "" if abs(p.error) <= GOAL else f"  beyond {GOAL:.0%}"
        lines.append(
            f"{p.system:14}{p.rate:8g}{p.predicted:11.3f}{p.measured:10.3f}{100 * p.error:+7.1f} %  {p.runs}{mark}"
        )
    good = sum(abs(p.error) <= GOAL for p in predictions)
    lines.append(f"{good} of {len(predictions)} within {GOAL:.0%}")
    return "\n".join(lines)


def run(folder: Path) -> list[Prediction]:
    """Raises FileNotFoundError, in one line, when the measurements are not there."""
    chosen = Plan.read(folder)
    if chosen is None or not (folder / FILE).exists():
        raise FileNotFoundError(f"{folder} has no real-plan.json and {FILE}: run compare first")
    machine = Machine.read(json.loads((folder / FILE).read_text()))
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(chosen.model_path or Path(scratch, "checkpoint"))
        if chosen.model_path is None:
            write_checkpoint(checkpoint)
            allow_pixels(checkpoint, chosen.mix.side[1])
        predictions = compare(machine, Layout(checkpoint), chosen, of_plan(chosen, folder))
    errors = {name: seat.encode_error for name, seat in machine.seats.items()}
    numbers = [{**{n: getattr(p, n) for n in Prediction.__slots__}, "error": p.error} for p in predictions]
    results.write_json(
        folder / "real-fidelity.json",
        {
            "kind": "simulated against measured",
            "machine": results.this_machine(),
            "commit": results.commit(),
            "plan_digest": chosen.digest,
            "goal": GOAL,
            "encode_fit_error": errors,
            "overheads": {
                "request_s": machine.request_s,
                "step_s": machine.step_s,
                "hop_s": machine.hop_s,
                "image_s": machine.image,
                "api_cpu_s": machine.api_cpu_s,
                "beside": machine.costs["beside"],
            },
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
    except FileNotFoundError as error:
        print(f"fidelity: {error}", file=sys.stderr)
        return 1
    print(text(predictions))
    return 0


if __name__ == "__main__":
    sys.exit(main())
