"""What `gpu_check` measures: FLOP/s of encode, prefill and attention beside a large matrix product, and the schemes.

On one GPU the encoder and the language model share the device, so the schemes' times show that they run, and what they
cost there; the paper's gain needs an encoder with a device of its own. No GPU has run any of this yet. The engine is
imported late: what needs no sockets also runs where their packages are missing.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.real.conformance import KV_HEADS, Case, Mix, make_problem, setting_of
from benchmarks.real.dummy import published_7b, tiny, write_dummy
from benchmarks.real.flops import attention_flops, encode_flops, prefill_flops
from benchmarks.real.gpu_correct import FLASH_PAGE, Failed, device_of
from benchmarks.real.kernels import PAGE, decode_work, prefill
from gllm.layers.attention.base import BACKENDS, load_backend
from gllm.sampling_params import SamplingParams
from gllm.worker.runner import StageRunner

# Of the whole check, and of its dry run on a CPU: matrix size, prompt tokens, chunk, images, their (height, width) in
# pixels, decoding requests and their context, prompts at once in the throughput run, output tokens.
REAL = {
    "matrix": 8192, "prompt": 8192, "chunk": 2048, "images": 8, "size": (1092, 1932), "decodes": 64, "context": 1024,
    "requests": 16, "outputs": 32, "repeats": 5,
}  # fmt: skip
TINY = {
    "matrix": 256, "prompt": 64, "chunk": 32, "images": 2, "size": (112, 168), "decodes": 4, "context": 32,
    "requests": 3, "outputs": 3, "repeats": 1,
}  # fmt: skip


def seconds(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median seconds, after two runs that compile and warm up."""
    times = []
    for turn in range(repeats + 2):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if turn > 1:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def matrix_flops(size: int, device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square product of random values, many in a row: the yardstick."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out, count = torch.empty_like(a), 10

    def work() -> None:
        for _ in range(count):
            torch.mm(a, b, out=out)

    return 2 * size**3 * count / seconds(work, device, 3)


@torch.inference_mode()
def flops(is_tiny: bool) -> dict[str, Any]:
    """Encode and prefill of the 7B model with random weights, each as a share of the matrix product's FLOP/s."""
    setting, device = (TINY if is_tiny else REAL), device_of(is_tiny)
    model, dtype = (tiny(), "float32") if is_tiny else (published_7b(), "bfloat16")
    peak = matrix_flops(setting["matrix"], device, getattr(torch, dtype))
    with tempfile.TemporaryDirectory() as folder:
        pages = max(setting["prompt"], setting["decodes"] * (setting["context"] + PAGE)) // PAGE + 1
        runner = StageRunner.build(
            write_dummy(Path(folder), model), num_blocks=pages, page_size=PAGE, dtype=dtype, device=device,
            load_format="dummy", with_vision=True,
        )  # fmt: skip
    assert runner.vision is not None
    images = list(torch.randint(0, 256, (setting["images"], *setting["size"], 3), dtype=torch.uint8))
    grids = [runner.vision.grid_of(image) for image in images]
    ids = tuple(torch.randint(0, model.vocab_size, (setting["prompt"],)).tolist())
    figures: dict[str, Any] = {"attention": type(runner.model.backend).__name__, "matrix_tflops": _tera(peak)}
    work: dict[str, tuple[Callable[[], Any], float]] = {
        "encode": (lambda: runner.vision.encode(images, grids), encode_flops(model, grids)),
        "prefill": (lambda: prefill(runner, ids, len(ids)), prefill_flops(model, len(ids))),
        "prefill_chunked": (lambda: prefill(runner, ids, setting["chunk"]), prefill_flops(model, len(ids))),
    }
    for name, (function, count) in work.items():
        taken = seconds(function, device, setting["repeats"])
        figures[name] = {"seconds": round(taken, 5), "tflops": _tera(count / taken)}
        figures[name]["share"] = round(count / taken / peak, 3)
    step = decode_work(runner, setting["decodes"], setting["context"])["ours"]
    figures["decode_step_s"] = round(seconds(step, device, setting["repeats"]), 5)
    return figures


@torch.inference_mode()
def attention(is_tiny: bool) -> dict[str, Any]:
    """Each backend alone, one layer, heads of 128 in groups of 7: the last chunk of a long prompt in TFLOP/s, and a
    step of many decodes in GB/s of keys and values."""
    device, setting = device_of(is_tiny), (TINY if is_tiny else REAL)
    dtype = torch.float32 if is_tiny else torch.bfloat16
    chunk: Mix = ((setting["chunk"], setting["prompt"]),)
    decodes: Mix = ((1, 4 * setting["context"]),) * setting["decodes"]
    figures: dict[str, Any] = {}
    for name in BACKENDS:
        case = Case(128, 7, FLASH_PAGE if name == "flash" else PAGE)
        try:
            backend = load_backend(name, setting_of(case, dtype, device))
        except ValueError as error:
            figures[name] = str(error)
            continue
        taken = []
        for mix in (chunk, decodes):
            problem = make_problem(case, mix).to(dtype, device)
            call, plan = problem.bound(backend), backend.plan(problem.inputs, dtype, device)
            taken.append(seconds(lambda call=call, plan=plan: call(plan), device, setting["repeats"]))
        count = attention_flops(*chunk[0], KV_HEADS * case.group, case.head_dim)
        read = sum(context for _, context in decodes) * 2 * KV_HEADS * case.head_dim * dtype.itemsize
        figures[name] = {"chunk_tflops": _tera(count / taken[0]), "decode_gb_per_s": round(read / taken[1] / 1e9, 1)}
    return figures


def _tera(value: float) -> float:
    return round(value / 1e12, 4)


# ---- schemes --------------------------------------------------------------------------------------------------------


def scheme(name: str, is_tiny: bool) -> dict[str, Any]:
    """The whole engine under one scheme, 7B with random weights: time to first token of a request with many images, and
    throughput of requests with two images each that come at once."""
    from benchmarks.real.overlap import SCHEMES

    setting = TINY if is_tiny else REAL
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_dummy(Path(folder), tiny() if is_tiny else published_7b())
        options: dict[str, Any] = {"model_path": str(checkpoint), "load_format": "dummy", "startup_timeout": 150.0}
        options |= {"device": device_of(is_tiny).type, "dtype": "float32" if is_tiny else "bfloat16"}
        # Room for an encoder on the same device; images at their own size, not the demo's limit.
        options |= {"gpu_memory_utilization": 0.6, "mm_processor_kwargs": {"max_pixels": published_7b().max_pixels}}
        return asyncio.run(_serve(options | SCHEMES[name], setting))


async def _serve(options: dict[str, Any], setting: dict[str, Any]) -> dict[str, Any]:
    from gllm.config import EngineConfig
    from gllm.engine.async_engine import AsyncEngine

    rng = np.random.default_rng(0)
    begin = time.perf_counter()
    engine = AsyncEngine(EngineConfig(**options))
    await engine.start()
    try:
        figures: dict[str, Any] = {"start_s": round(time.perf_counter() - begin, 1)}
        await _request(engine, rng, setting, setting["images"], 2)  # compiles and warms up
        ttfts = [(await _request(engine, rng, setting, setting["images"], 1))[0] for _ in range(3)]
        figures |= {"ttft_s": [round(t, 4) for t in ttfts], "ttft_median_s": round(statistics.median(ttfts), 4)}
        begin = time.perf_counter()
        answers = await asyncio.gather(
            *(_request(engine, rng, setting, 2, setting["outputs"]) for _ in range(setting["requests"]))
        )
        taken = time.perf_counter() - begin
        figures["input_tokens_per_s"] = round(sum(prompt for _, prompt, _ in answers) / taken, 1)
        figures["output_tokens_per_s"] = round(sum(out for _, _, out in answers) / taken, 1)
        missing = sum(out != setting["outputs"] for _, _, out in answers)
        if missing:
            raise Failed(f"{missing} of {len(answers)} requests have too few output tokens", figures)
        return figures
    finally:
        await engine.close()


async def _request(
    engine: Any, rng: np.random.Generator, setting: dict[str, Any], num_images: int, num_outputs: int
) -> tuple[float, int, int]:
    """Seconds to the first token, prompt tokens, output tokens."""
    from benchmarks.real.overlap import random_image

    height, width = setting["size"]
    images = [random_image(rng, max(height, width)).crop((0, 0, width, height)) for _ in range(num_images)]
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "which picture shows a star? " * 8}]}]
    begin = time.perf_counter()
    prompt = engine.processor.chat(messages, trusted=True)
    stream = await engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True))
    first, count = float("nan"), 0
    try:
        async for delta in stream:
            first = first if count else time.perf_counter() - begin
            count += len(delta.token_ids)
    finally:
        await stream.aclose()
    return first, len(stream.prompt_token_ids), count
