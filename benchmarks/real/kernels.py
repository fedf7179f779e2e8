"""Encode and prefill time, ours against transformers (sdpa), side by side in one process: prints one JSON line.

python -m benchmarks.real.kernels [--checkpoint DIR] [--dtype bfloat16] [--threads 1] [--images 4] [--prompt 2048]
Both run the same work in turn, so that a noisy machine disturbs both alike. Medians are reported, of the wall clock
and of the CPU time of this process: on a machine that others use too, the latter is the steadier comparison.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.real.checkpoint import write_checkpoint
from gllm.core.batch import Batch, Chunk
from gllm.sampling_params import SamplingParams
from gllm.worker.runner import StageRunner
from gllm.worker.step import RequestSpec, StepInput

PAGE = 16
Timed = dict[str, Callable[[], Any]]


def medians(work: Timed, repeats: int) -> dict[str, dict[str, float]]:
    """Median wall and CPU seconds of each function, run in turn `repeats` times after one run that is not counted."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
    for turn in range(repeats + 1):
        for name, function in work.items():
            wall, cpu = time.perf_counter(), time.process_time()
            function()
            if turn:
                taken[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        name: {"wall": median(wall for wall, _ in times), "cpu": median(cpu for _, cpu in times)}
        for name, times in taken.items()
    }


def median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 5)


def encode_work(runner: StageRunner, reference: Any, num_images: int, side: int) -> Timed:
    """Encoding images of side x side pixels: pixels (ours) or pixel values (theirs) in, rows out."""
    assert runner.vision is not None
    vision = runner.vision
    images = list(torch.randint(0, 256, (num_images, side, side, 3), dtype=torch.uint8))
    grids = [vision.grid_of(image) for image in images]
    pixel_values = vision.patches(images).view(-1, 3, 1, 14 * 14).expand(-1, 3, 2, 14 * 14).reshape(-1, 3 * 2 * 14 * 14)
    pixel_values = pixel_values.to(vision.dtype)
    grid_thw = torch.tensor(grids)
    return {
        "transformers": lambda: reference.model.visual(pixel_values, grid_thw=grid_thw),
        "ours": lambda: vision.encode(images, grids),
    }


def prefill(runner: StageRunner, token_ids: tuple[int, ...], chunk: int) -> None:
    """One request, chunk after chunk, up to its first token; and forget it."""
    spec = RequestSpec(0, len(token_ids), token_ids, (), SamplingParams(temperature=0.0))
    for start in range(0, len(token_ids), chunk):
        part = token_ids[start : start + chunk]
        end = start + len(part)
        blocks = tuple(range(-(-start // PAGE), -(-end // PAGE)))
        chunks = (Chunk(0, start, len(part), blocks, end == len(token_ids)),)
        dropped = (0,) if start == 0 else ()
        runner.execute(StepInput(Batch(0, chunks, dropped), part, (spec,) if start == 0 else ()))


def prefill_work(runner: StageRunner, reference: Any, num_tokens: int, chunk: int) -> Timed:
    ids = torch.randint(0, runner.model.config.vocab_size // 2, (1, num_tokens))
    token_ids = tuple(ids[0].tolist())
    return {
        "transformers": lambda: reference(input_ids=ids, use_cache=True, logits_to_keep=1),
        "ours": lambda: prefill(runner, token_ids, num_tokens),
        f"ours_chunk_{chunk}": lambda: prefill(runner, token_ids, chunk),
    }


def decode_work(runner: StageRunner, batch_size: int, context: int) -> Timed:
    """One decode step of a batch; the caches' content does not matter."""
    pages = -(-(context + 1) // PAGE)
    ids = tuple(range(1000, 1000 + batch_size))
    tokens = (1,) * context
    specs = tuple(RequestSpec(i, context, tokens, (), SamplingParams(temperature=0.0)) for i in ids)
    tables = [tuple(range(n * pages, (n + 1) * pages)) for n in range(batch_size)]
    chunks = tuple(Chunk(i, context - 1, 1, table, True) for i, table in zip(ids, tables, strict=True))
    step = StepInput(Batch(0, chunks, ids), (1,) * batch_size, specs)
    return {"ours": lambda: runner.execute(step)}


def ratio(times: dict[str, dict[str, float]]) -> dict[str, float]:
    """Our time over theirs, by each clock."""
    return {clock: round(times["ours"][clock] / times["transformers"][clock], 3) for clock in ("wall", "cpu")}


def measure(checkpoint: Path, args: argparse.Namespace) -> dict[str, Any]:
    from transformers import Qwen2_5_VLForConditionalGeneration

    dtype = getattr(torch, args.dtype)
    reference = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        checkpoint, dtype=dtype, attn_implementation="sdpa"
    ).eval()
    pages = -(-(args.context + 1) // PAGE) * args.decodes + -(-args.prompt // PAGE)
    runner = StageRunner.build(checkpoint, num_blocks=pages, page_size=PAGE, dtype=args.dtype, with_vision=True)
    with torch.inference_mode():
        encode = medians(encode_work(runner, reference, args.images, args.side), args.repeats)
        fill = medians(prefill_work(runner, reference, args.prompt, args.chunk), args.repeats)
        decode = medians(decode_work(runner, args.decodes, args.context), args.repeats)
    return {
        "encode_s": encode,
        "encode_ratio": ratio(encode),
        "prefill_s": fill,
        "prefill_ratio": ratio(fill),
        "decode_step_s": decode["ours"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="default: a random one of about 80 M parameters")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--side", type=int, default=448, help="height and width in pixels, a multiple of 28")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--chunk", type=int, default=512, help="tokens, for the chunked prefill")
    parser.add_argument("--decodes", type=int, default=32, help="requests in the decode step")
    parser.add_argument("--context", type=int, default=256, help="tokens of each of them")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = args.checkpoint or Path(folder)
        if args.checkpoint is None:
            write_checkpoint(checkpoint)
        figures = measure(checkpoint, args)
    setting = {k: v for k, v in vars(args).items() if k != "checkpoint"}
    machine = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "arch": platform.machine()}
    print(json.dumps({"benchmark": "kernels", "kind": "measured", **setting, **figures, **machine}))


if __name__ == "__main__":
    main()
