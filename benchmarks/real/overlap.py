"""Time to first token of one request with several images, alone in the engine, under each scheme, in one run.

    python -m benchmarks.real.overlap                      # 8 images of 448x448, median of 5, a JSON line

Each scheme has the same cores: gllm's one process uses all of them, the others split them between encoder and LLM. The
schemes take turns, so that a change of the machine's speed meets all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.real.checkpoint import write_checkpoint
from gllm.config import EngineConfig, usable_cores
from gllm.engine.async_engine import AsyncEngine
from gllm.sampling_params import SamplingParams

SCHEMES: dict[str, dict[str, Any]] = {
    "gllm": {},
    "gllm-epd": {"encoders": 1},
    "rserve-intra": {"rserve": True, "inter_request_batching": False},
    "rserve": {"rserve": True},
}


def random_image(rng: np.random.Generator, side: int) -> Image.Image:
    """Smooth enough to be an image, different every time."""
    small = rng.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC)


async def first_token(engine: AsyncEngine, images: list[Image.Image]) -> float:
    """Seconds from the request to its first token."""
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "which picture shows a star?"}]}]
    start = time.perf_counter()
    prompt = engine.processor.chat(messages, trusted=True)
    stream = await engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=1))
    try:
        async for _ in stream:
            break
        return time.perf_counter() - start
    finally:
        await stream.aclose()


async def measure(checkpoint: Path, args: argparse.Namespace) -> dict[str, Any]:
    rng = np.random.default_rng(args.seed)
    times: dict[str, list[float]] = {scheme: [] for scheme in args.schemes}
    peaks: dict[str, float] = {}
    options: dict[str, Any] = {"model_path": str(checkpoint), "max_num_batched_tokens": args.token_budget}
    options["mm_processor_kwargs"] = {"max_pixels": max(args.side * args.side, 28 * 28)}
    if args.event_log:
        options["event_log"] = args.event_log
    engines = {}
    for scheme in args.schemes:
        extra = dict(SCHEMES[scheme])
        if extra.get("rserve") and args.encoder_batch_tokens:
            extra["encoder_batch_tokens"] = args.encoder_batch_tokens
        engines[scheme] = AsyncEngine(EngineConfig(**options, **extra))
        await engines[scheme].start()
    try:
        for repeat in range(args.repeats + 1):
            images = [random_image(rng, args.side) for _ in range(args.images)]
            for scheme, engine in engines.items():
                seconds = await first_token(engine, images)
                if repeat:  # the first round warms up
                    times[scheme].append(seconds)
        for scheme, engine in engines.items():
            peaks[scheme] = (await engine.stats())["embedding_tokens_held_peak"]
    finally:
        for engine in engines.values():
            await engine.close()
    median = {scheme: statistics.median(values) for scheme, values in times.items()}
    return {
        "ttft_s": {scheme: [round(value, 4) for value in values] for scheme, values in times.items()},
        "ttft_median_s": {scheme: round(value, 4) for scheme, value in median.items()},
        "ratio_to_gllm_epd": {s: round(v / median["gllm-epd"], 3) for s, v in median.items() if "gllm-epd" in median},
        "peak_embedding_tokens": peaks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="default: a random one of about 80 M parameters")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--side", type=int, default=448, help="height and width in pixels")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--token-budget", type=int, default=2048)
    parser.add_argument("--encoder-batch-tokens", type=int, help="C of the rserve schemes")
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--event-log", help="of the last scheme named")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = args.checkpoint or Path(folder)
        if args.checkpoint is None:
            write_checkpoint(checkpoint)
        figures = asyncio.run(measure(checkpoint, args))
    setting = {key: value for key, value in vars(args).items() if key != "checkpoint"}
    machine = {"torch": torch.__version__, "cores": len(usable_cores()), "arch": platform.machine()}
    print(json.dumps({"benchmark": "overlap", "kind": "measured", **setting, **figures, **machine}))


if __name__ == "__main__":
    main()
