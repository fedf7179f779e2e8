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
from benchmarks.real.servers import MODEL_NAME, Server, Setting, our_command, process_cpu_seconds, start
from benchmarks.sim.images import Image
from gllm.config import EngineConfig
from gllm.media.loader import MediaLoader
from gllm.media.processor import ImageProcessor
from gllm.media.source import Source
from gllm.worker.process import settle
from rserve.transport.shm import ShmReceiver, ShmSender

PADDING = 400_000  # bytes of a large body
SIDES = (112, 224, 448)


def measure_servers(setting: Setting, folder: Path, repeats: int) -> dict[str, Any]:
    """From a live baseline server and one with an encoder. All values in seconds unless their name says otherwise."""
    with start("gllm", our_command("gllm", setting), setting.cores, folder) as server:
        text = _texts(server, repeats)
        large = _texts(server, repeats, padding=PADDING)
        found = {
            "text_ttft": text["ttft"],
            "text_prompt_tokens": text["prompt_tokens"],
            "per_body_byte": max(0.0, large["ttft"] - text["ttft"]) / PADDING,
            "request_cpu": text["cpu"],
            "decode": _decode_gap(server, max(2, repeats // 4)),
            "health": _health(server, repeats),
        }
    with start("rserve", our_command("rserve", setting), setting.cores, folder) as server:
        found["health_with_encoder"] = _health(server, repeats)
    return found


def _texts(server: Server, repeats: int, padding: int = 0) -> dict[str, float]:
    """Text-only requests of one output token, one by one. cpu: of the API process and the client, a request."""
    request = _text_request(1, padding)
    client.run(server.url, [request], slo=1.0, max_seconds=60.0)
    before = process_cpu_seconds(server.process.pid) + time.process_time()
    bodies = [client.run(server.url, [request], slo=1.0, max_seconds=60.0) for _ in range(repeats)]
    cpu = process_cpu_seconds(server.process.pid) + time.process_time() - before
    return {
        "ttft": statistics.median(body["summary"]["ttft_mean"] for body in bodies),
        "prompt_tokens": bodies[0]["prompt_tokens_mean"],
        "cpu": cpu / repeats,
    }


def _decode_gap(server: Server, repeats: int) -> dict[str, float]:
    """Seconds from token to token of one request alone, and the mean context of these steps."""
    bodies = [client.run(server.url, [_text_request(65)], slo=1.0, max_seconds=120.0) for _ in range(repeats)]
    gap = statistics.median(body["summary"]["tpot_mean"] for body in bodies)
    return {"gap": gap, "context": bodies[0]["prompt_tokens_mean"] + 32}


def _text_request(max_tokens: int, padding: int = 0) -> Prepared:
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
    return Prepared(0.0, json.dumps(body).encode())


def _health(server: Server, repeats: int) -> float:
    """Median of a health probe: to the driver and back, and with encoders on to each of them and back."""
    taken = []
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            http.get("/health").raise_for_status()
            taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


# ---- images -------------------------------------------------------------------------------------------------------


def measure_preprocessing(checkpoint: Path, cores: Sequence[int], repeats: int) -> list[dict[str, float]]:
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
