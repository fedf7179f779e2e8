"""Event logs of the real system for the timelines of figures 5, 7 and 10: a few requests at once, one server a scheme.

    python -m benchmarks.real.timelines [--results DIR] [--model-path DIR]

Each server is warmed up with requests of the same shapes; its log, from the first request that is shown, stands beside
the result. Without a checkpoint: random weights, about 80 M parameters.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import results
from benchmarks.real import client
from benchmarks.real.bench import CPU_MIX, MAX_RUN_SECONDS, make_setting, say
from benchmarks.real.requests import prepare
from benchmarks.real.servers import MODEL_NAME, ServerFailed, Setting, our_command, start
from benchmarks.results import Result
from benchmarks.sim.deployment import SEPARATE
from benchmarks.sim.images import Image
from benchmarks.workloads import Part, Shape
from gllm.core import eventlog
from gllm.core.eventlog import Record

WARM_UP_SEED, SEED = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a timeline shows: one server, and `num_requests` requests of the same parts that arrive at once."""

    figure: str
    case: str  # a name of its own within the figure
    system: str
    parts: tuple[Part, ...]
    num_requests: int
    token_budget: int
    pp: int = 1
    chunked_pipeline: bool = True

    @property
    def name(self) -> str:
        return f"timeline-{self.figure}-{self.case}"

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--pp", str(self.pp), *(() if self.chunked_pipeline else ("--no-chunked-pipeline",)))

    @property
    def num_workers(self) -> int:
        return self.pp + (self.system in SEPARATE)

    def shapes(self) -> list[Shape]:
        return [Shape(0.0, self.parts)] * self.num_requests


# Sizes that two CPU cores serve within seconds. Figure 5: text alone, since an encode is no part of the pipeline.
# Figure 7: encoding takes longer than prefill, as with an encoder on one core. Figure 10: prompts of a third of the
# budget.
PROMPT = (4096,)
PAIR = (128, Image(336, 336)) * 4
SHORT = (200, Image(224, 224), 300, Image(224, 224), 64)
SCENES = (
    *[
        Scene(figure="5", case=case, system="gllm", parts=PROMPT, num_requests=1, token_budget=512, pp=2,
              chunked_pipeline=chunked)
        for case, chunked in (("vanilla", False), ("cpp", True))
    ],
    *[
        Scene(figure="7", case=name, system=name, parts=PAIR, num_requests=2, token_budget=512)
        for name in ("gllm", "gllm-epd", "rserve-intra", "rserve")
    ],
    *[
        Scene(figure="10", case=name, system=name, parts=SHORT, num_requests=6, token_budget=2048, pp=2)
        for name in ("rserve-intra", "rserve")
    ],
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 when a scene could not be shown; the others are kept."""
    args = parse(argv)
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        setting = make_setting(Path(scratch), args.model_path, CPU_MIX)
        for scene in SCENES:
            try:
                result, log = show(scene, setting, Path(scratch))
            except ServerFailed as error:
                failed.append(scene.name)
                say(f"{scene.name}: {error}")
                continue
            path = results.write(args.results, result)
            log_path(path).write_text("".join(eventlog.dump(record) + "\n" for record in log))
            say(f"{scene.name}: mean TTFT {result.body['summary']['ttft_mean']:.2f} s, {len(log)} records")
    return 1 if failed else 0


def log_path(result: Path) -> Path:
    """Where the event log of a result file lies."""
    return result.with_suffix(".events.jsonl")


def show(scene: Scene, setting: Setting, scratch: Path) -> tuple[Result, list[Record]]:
    """Serve the scene once warm. Raises ServerFailed."""
    events = scratch / f"{scene.name}.jsonl"
    settings = replace(setting, token_budget=scene.token_budget, extra=(*setting.extra, *scene.flags))
    warm_up, requests = (prepare(scene.shapes(), MODEL_NAME, seed) for seed in (WARM_UP_SEED, SEED))
    command = our_command(scene.system, settings, events)
    with start(scene.name, command, setting.cores, scratch) as server:
        for batch in (warm_up, requests):
            body = client.run(server.url, batch, slo=1.0, max_seconds=MAX_RUN_SECONDS)
            if body["failed"]:
                raise ServerFailed(f"{scene.name}: {body['errors']}")
    with events.open() as lines:
        log = since_request(eventlog.read(lines), len(warm_up))
    config = {
        "figure": f"timeline-{scene.figure}",
        "case": scene.case,
        "system": scene.system,
        "workload": f"{scene.num_requests} requests at once: {describe(scene.parts)}",
        "rate": None,
        "devices": f"{scene.num_workers} workers on {len(setting.cores)} cores",
        "token_budget": scene.token_budget,
        "pp": scene.pp,
    }
    return (
        Result(
            kind="measured", name=scene.name, config=config, seed=SEED, commit=results.commit(),
            machine=results.this_machine(), body=body,
        ),
        log,
    )  # fmt: skip


def since_request(records: Iterable[Record], count: int) -> list[Record]:
    """The log from the moment at which the request after the first `count` came. Spans are logged when they end, so
    one of before may stand behind it: it is left out."""
    kept: list[Record] = []
    seen, begin = 0, 0.0
    for record in records:
        seen += record["e"] == "on_request"
        if seen > count:
            begin = begin or record["t"]
            if record["e"] != "span" or record["start"] >= begin:
                kept.append(record)
    return kept


def describe(parts: Sequence[Part]) -> str:
    words = [f"{part.width}x{part.height}" if isinstance(part, Image) else f"{part} words" for part in parts]
    return ", ".join(words)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", type=Path, help="default: random weights, written for this run")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="folder of result files")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
