"""Times around the models' work: HTTP and admission, the driver's step, a message to an encoder and back, the way of an
image from its data URL to pixels, embeddings through shared memory. Each measured by itself, on idle cores."""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from benchmarks.real import client
from benchmarks.real.requests import Prepared, data_url, random_picture
from benchmarks.real.servers import MODEL_NAME, Server, ServerFailed, process_cpu_seconds
from benchmarks.sim.images import Image
from gllm.config import EngineConfig
from gllm.media.loader import MediaLoader
from gllm.media.processor import ImageProcessor
from gllm.media.source import Source
from gllm.worker.process import settle
from rserve.transport.shm import ShmReceiver, ShmSender

PADDING = 400_000  # bytes of a large body
REPEATS = 6
APART = 0.15  # seconds between requests, so that one is done before the next comes
DECODES = 32
SIDES = (112, 224, 448)


def measure_servers(baseline: Server, with_encoder: Server) -> dict[str, float]:
    """From the live servers of gllm and rserve, idle otherwise; a few seconds. In seconds unless the name says else.
    Raises ServerFailed."""
    text, large = _texts(baseline), _texts(baseline, padding=PADDING)
    return {
        "text_ttft": text["ttft"],
        "text_prompt_tokens": text["prompt_tokens"],
        "per_body_byte": (large["ttft"] - text["ttft"]) / PADDING,
        "request_cpu": text["cpu"],
        **_decode_gap(baseline),
        "health": _health(baseline),
        "health_with_encoder": _health(with_encoder),
    }


def _texts(server: Server, padding: int = 0) -> dict[str, float]:
    """Text-only requests of one output token, one by one. cpu: of the API process and the client, a request."""
    requests = [_text_request(number * APART, 1, padding) for number in range(REPEATS)]
    before = process_cpu_seconds(server.process.pid) + time.process_time()
    body = _served(server, requests)
    cpu = process_cpu_seconds(server.process.pid) + time.process_time() - before
    return {
        "ttft": statistics.median(body["ttfts"]),
        "prompt_tokens": body["prompt_tokens_mean"],
        "cpu": cpu / len(requests),
    }


def _decode_gap(server: Server) -> dict[str, float]:
    """Seconds from token to token of one request alone, and the mean context of these steps."""
    body = _served(server, [_text_request(0.0, 1 + DECODES)])
    return {
        "decode_gap": body["summary"]["tpot_mean"],
        "decode_context": body["prompt_tokens_mean"] + DECODES // 2,
    }


def _served(server: Server, requests: Sequence[Prepared]) -> dict[str, Any]:
    body = client.run(server.url, requests, slo=1.0, max_seconds=60.0)
    if body["failed"]:
        raise ServerFailed(f"{server.system}: {body['errors']}")
    return body


def _text_request(arrival: float, max_tokens: int, padding: int = 0) -> Prepared:
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "which picture shows a star?"}],
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": max_tokens > 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": "x" * padding,
    }
    return Prepared(arrival, json.dumps(body).encode())


def _health(server: Server) -> float:
    """Median of a health probe: to the driver and back, and with encoders on to each of them and back."""
    taken = []
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        for _ in range(REPEATS + 1):
            begin = time.perf_counter()
            http.get("/health").raise_for_status()
            taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


# ---- images -------------------------------------------------------------------------------------------------------


def measure_preprocessing(checkpoint: Path, cores: Sequence[int], repeats: int = 20) -> list[dict[str, float]]:
    """From a data URL to the pixel file that encoders read, by side: wall and CPU seconds of one image, one at a time.
    Binds the calling process."""
    settle(list(cores), 1)
    return asyncio.run(_measure_preprocessing(checkpoint, repeats))


async def _measure_preprocessing(checkpoint: Path, repeats: int) -> list[dict[str, float]]:
    config = EngineConfig(model_path=str(checkpoint))
    loader = MediaLoader(config, ImageProcessor(checkpoint))
    rng = np.random.default_rng(0)
    found = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for side in SIDES:
            walls, cpu = [], 0.0
            for number in range(repeats + 1):
                source = Source(data_url(random_picture(rng, Image(side, side))))
                begin, cpu_begin = time.perf_counter(), time.process_time()
                pixels = await loader.load(source, 1).pixels()
                await asyncio.to_thread(Path(folder, "pixels").write_bytes, pixels.tobytes())
                if number:
                    walls.append(time.perf_counter() - begin)
                    cpu += time.process_time() - cpu_begin
            megapixels = side * side / 1e6
            found.append({"megapixels": megapixels, "seconds": statistics.median(walls), "cpu": cpu / repeats})
    await loader.aclose()
    return found


def measure_transfer(hidden: int, dtype: torch.dtype, tokens: int = 256, repeats: int = 20) -> float:
    """Seconds that one embedding takes into shared memory and out of it again."""
    rows = torch.zeros(tokens, hidden, dtype=dtype)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        receiver = ShmReceiver(Path(folder, "rows"), 4 * tokens, hidden, dtype)
        sender = ShmSender(Path(folder, "rows"), 4 * tokens, hidden, dtype)
        place = receiver.allocate(tokens)
        taken = []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            sender.write(place, rows)
            receiver.read(place, 0, rows)
            taken.append(time.perf_counter() - begin)
        sender.close()
        receiver.close()
    return statistics.median(taken[1:]) / tokens


def line_through(points: Sequence[dict[str, float]], what: str) -> tuple[float, float]:
    """(seconds of an image, seconds of a megapixel) by least squares."""
    slope, constant = np.polyfit([p["megapixels"] for p in points], [p[what] for p in points], 1)
    return max(0.0, float(constant)), max(0.0, float(slope))
