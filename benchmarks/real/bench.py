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

from benchmarks.real import client, plan
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
    """Servers that answer, and what all of them are asked. skipped: entrants that did not start, and why."""

    setting: Setting
    servers: dict[str, Server]
    entrants: dict[str, Entrant]
    skipped: dict[str, str]
    out: Path

    def load(self, name: str, requests: Sequence[Prepared], slo: float) -> dict[str, Any]:
        """One run; with the CPU seconds that the servers not asked have used meanwhile. Raises ServerFailed."""
        others = [server for other, server in self.servers.items() if other != name]
        self.pause_all_but([name])
        before = sum(server.cpu_seconds() for server in others)
        body = client.run(self.servers[name].url, requests, slo=slo, max_seconds=MAX_RUN_SECONDS)
        self.servers[name].check()
        return body | {"bystanders_cpu_s": round(sum(server.cpu_seconds() for server in others) - before, 3)}

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
def open_bench(args: argparse.Namespace, setting: Setting, scratch: Path) -> Iterator[Bench]:
    """All servers, warmed up. What does not start is named, and the others go on."""
    wanted = plan.entrants(setting.cores, args.systems, one_core=not args.no_one_core and args.model_path is None)
    skipped = {} if args.vllm_python else {"vllm": "no Python with vLLM was named (--vllm-python)"}
    if args.vllm_python:
        wanted.append(Entrant("vllm", setting.cores, "vllm"))
    bench = Bench(setting, {}, {}, skipped, args.results)
    warm_up = prepare(mix_of(args).shapes([0.0] * 4, WARM_UP_SEED, args.max_tokens), MODEL_NAME, WARM_UP_SEED)
    with contextlib.ExitStack() as stack:
        for entrant in wanted:
            say(f"starting {entrant.name}")
            command = (
                vllm_command(args.vllm_python, setting)
                if entrant.system == "vllm"
                else our_command(entrant.system, setting)
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
        yield bench


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
