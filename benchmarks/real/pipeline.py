"""Time to first token of one long text prompt in a pipeline: chunked (CPP) against vanilla, in one run.

python -m benchmarks.real.pipeline                     # pp 2, 4,096 tokens in chunks of 512, a JSON line
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.real.checkpoint import write_checkpoint
from gllm.config import EngineConfig, usable_cores
from gllm.engine.async_engine import AsyncEngine
from gllm.sampling_params import SamplingParams

POLICIES: dict[str, dict[str, Any]] = {"cpp": {}, "vanilla": {"chunked_pipeline": False}}


async def first_token(engine: AsyncEngine, tokens: list[int]) -> float:
    """Seconds from the request to its first token."""
    start = time.perf_counter()
    stream = await engine.submit(engine.processor.completion(tokens), SamplingParams(temperature=0.0, max_tokens=1))
    try:
        async for _ in stream:
            break
        return time.perf_counter() - start
    finally:
        await stream.aclose()


async def measure(checkpoint: Path, args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(args.seed)
    options = {"model_path": str(checkpoint), "max_num_batched_tokens": args.chunk, "pp": args.pp}
    engines = {name: AsyncEngine(EngineConfig(**options, **extra)) for name, extra in POLICIES.items()}
    times: dict[str, list[float]] = {name: [] for name in engines}
    try:
        for engine in engines.values():
            await engine.start()
        for repeat in range(args.repeats + 1):
            tokens = [rng.randrange(10, 500) for _ in range(args.prompt)]
            for name, engine in engines.items():
                seconds = await first_token(engine, tokens)
                if repeat:  # the first round warms up
                    times[name].append(seconds)
    finally:
        for engine in engines.values():
            await engine.close()
    ratios = [a / b for a, b in zip(times["cpp"], times["vanilla"], strict=True)]
    return {
        "ttft_s": {name: [round(value, 4) for value in values] for name, values in times.items()},
        "ttft_median_s": {name: round(statistics.median(values), 4) for name, values in times.items()},
        "cpp_over_vanilla": round(statistics.median(ratios), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="default: a random one of about 80 M parameters")
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=4096, help="tokens")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a micro-batch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = args.checkpoint or Path(folder)
        if args.checkpoint is None:
            write_checkpoint(checkpoint)
        figures = asyncio.run(measure(checkpoint, args))
    setting = {key: value for key, value in vars(args).items() if key != "checkpoint"}
    machine = {"torch": torch.__version__, "cores": len(usable_cores()), "arch": platform.machine()}
    print(json.dumps({"benchmark": "pipeline", "kind": "measured", **setting, **figures, **machine}))


if __name__ == "__main__":
    main()
