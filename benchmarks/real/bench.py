"""The bench of a measured comparison: a checkpoint, and a server for every entrant, warmed up and ready to be asked."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.real import client
from benchmarks.real.checkpoint import write_checkpoint
from benchmarks.real.plan import Entrant
from benchmarks.real.requests import Mix, Prepared, prepare
from benchmarks.real.servers import KV_GIB, MODEL_NAME, Server, ServerFailed, Setting, our_command, start, vllm_command
from gllm.config import usable_cores

WARM_UP_SEED = 1_000_001
MAX_RUN_SECONDS = 300.0
CPU_MIX = Mix()
GPU_MIX = Mix(images=(1, 8), side=(448, 1792), text=(200, 3000))


@dataclass(slots=True)
class Bench:
    """Servers that answer, who they are, and their event logs. skipped: entrants that did not start, and why."""

    setting: Setting
    servers: dict[str, Server]
    entrants: dict[str, Entrant]
    logs: dict[str, Path]
    skipped: dict[str, str]
    out: Path

    def load(self, name: str, requests: Sequence[Prepared], slo: float) -> dict[str, Any]:
        """One run; with the CPU seconds that the servers not asked have used meanwhile. Raises ServerFailed."""
        return self.timed_load(name, requests, slo)[1]

    def timed_load(self, name: str, requests: Sequence[Prepared], slo: float = 1.0) -> tuple[float, dict[str, Any]]:
        """The same, and when it started on the monotonic clock."""
        others = [server for other, server in self.servers.items() if other != name]
        self.pause_all_but([name])
        before = sum(server.cpu_seconds() for server in others)
        started, body = client.timed_run(self.servers[name].url, requests, slo=slo, max_seconds=MAX_RUN_SECONDS)
        self.servers[name].check()
        used = sum(server.cpu_seconds() for server in others) - before
        return started, body | {"bystanders_cpu_s": round(used, 3)}

    def pause_all_but(self, names: Collection[str]) -> None:
        """Only these use the CPU from here on."""
        for name, server in self.servers.items():
            if name in names:
                server.resume()
            else:
                server.pause()


def make_setting(
    scratch: Path, model_path: Path | None, mix: Mix, cores: Sequence[int] | None = None, token_budget: int = 2048
) -> Setting:
    """Random weights run on two cores, so that results of larger machines compare; a real checkpoint on all."""
    checkpoint = model_path or scratch / "checkpoint"
    if model_path is None:
        write_checkpoint(checkpoint)
        allow_pixels(checkpoint, mix.side[1])
    return Setting(
        checkpoint=checkpoint.resolve(),
        cores=tuple(cores or (usable_cores() if model_path else usable_cores()[:2])),
        token_budget=token_budget,
        max_images=mix.images[1],
        kv_gib=None if model_path else KV_GIB,
    )


def allow_pixels(checkpoint: Path, side: int) -> None:
    """Let a written checkpoint take images of side x side pixels without shrinking them; all systems read this file."""
    path = checkpoint / "preprocessor_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(settings | {"max_pixels": (side + 28) ** 2}) + "\n")


def mix_of(args: argparse.Namespace) -> Mix:
    mix = GPU_MIX if args.model_path else CPU_MIX
    given = {"images": args.images, "side": args.sides, "text": args.text}
    return replace(mix, **{name: tuple(value) for name, value in given.items() if value})


@contextlib.contextmanager
def open_bench(
    setting: Setting,
    wanted: Sequence[Entrant],
    mix: Mix,
    scratch: Path,
    out: Path,
    *,
    vllm_python: str | None = None,
    max_tokens: int = 1,
    logged: bool = True,
) -> Iterator[Bench]:
    """All servers, warmed up; ours write event logs when they are `logged`. What does not start is named, and the
    others go on."""
    bench = Bench(setting, {}, {}, {}, {}, out)
    warm_up = prepare(mix.shapes([0.0] * 4, WARM_UP_SEED, max_tokens), MODEL_NAME, WARM_UP_SEED)
    with contextlib.ExitStack() as stack:
        for entrant in wanted:
            say(f"starting {entrant.name}")
            log = scratch / f"{entrant.name}.events.jsonl" if logged and entrant.system != "vllm" else None
            command = (
                vllm_command(str(vllm_python), setting)
                if entrant.system == "vllm"
                else our_command(entrant.system, setting, log)
            )
            try:
                server = stack.enter_context(start(entrant.name, command, entrant.cores, scratch))
                answer = client.run(server.url, warm_up, slo=1.0, max_seconds=MAX_RUN_SECONDS)
                if answer["failed"]:
                    raise ServerFailed(f"warm-up: {answer['errors']}")
            except (ServerFailed, OSError) as error:
                bench.skipped[entrant.name] = str(error)
                say(f"{entrant.name} is skipped: {error}")
                continue
            bench.servers[entrant.name], bench.entrants[entrant.name] = server, entrant
            if log is not None:
                bench.logs[entrant.name] = log
        yield bench


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
