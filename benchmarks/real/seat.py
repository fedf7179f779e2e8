"""Times of the real workers on given cores: encode over images and batch, prefill over chunk and prefix, decode over
batch and context. Each seat is measured in a process of its own, bound and threaded as the engine does it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gllm.core.batch import Batch, Chunk
from gllm.sampling_params import SamplingParams
from gllm.worker.process import settle
from gllm.worker.runner import StageRunner
from gllm.worker.step import RequestSpec, StepInput

PAGE = 16
Span = tuple[int, int]  # tokens before the chunk, tokens of the chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is measured. repeats: of which the median counts, after one that does not."""

    sides: tuple[int, ...] = (112, 224, 336, 448)
    image_counts: tuple[int, ...] = (1, 2, 4, 8)
    chunks: tuple[int, ...] = (1, 8, 32, 64, 128, 256, 512, 1024, 2048)
    prefixed: tuple[Span, ...] = ((256, 32), (256, 256), (1024, 32), (1024, 256), (1024, 1024), (2048, 256))
    pairs: tuple[int, ...] = (64, 256, 512)  # two prompts of so many tokens in one micro-batch
    decodes: tuple[Span, ...] = ((128, 1), (1024, 1), (128, 8), (1024, 8), (512, 32))  # context, requests
    repeats: int = 5


QUICK = Grid(
    sides=(112, 224, 448), image_counts=(1, 4), chunks=(1, 32, 128, 512, 1024, 2048),
    prefixed=((256, 32), (256, 256), (1024, 256)), pairs=(64, 512), decodes=((128, 1), (1024, 1), (256, 8)), repeats=3,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Seat:
    """cores: what the process is bound to; threads: of its products."""

    cores: tuple[int, ...]
    threads: int


class Worker:
    """A stage with its own vision encoder, and the work that is timed."""

    def __init__(self, checkpoint: Path, grid: Grid) -> None:
        longest = max([*grid.chunks, *(prefix + new for prefix, new in grid.prefixed), *(2 * n for n in grid.pairs)])
        tokens = max(longest, *(context * count + count for context, count in grid.decodes))
        blocks = tokens // PAGE + 64
        self.runner = StageRunner.build(checkpoint, num_blocks=blocks, page_size=PAGE, with_vision=True)
        assert self.runner.vision is not None
        self.vision = self.runner.vision

    def encode(self, sides: Sequence[int]) -> Callable[[], Any]:
        images = [torch.randint(0, 256, (side, side, 3), dtype=torch.uint8) for side in sides]
        grids = [self.vision.grid_of(image) for image in images]
        return lambda: self.vision.encode(images, grids)

    def step(self, spans: Sequence[Span], sample: bool) -> Callable[[], Any]:
        """A micro-batch of one chunk for each span; what lies in the KV cache does not matter."""
        chunks, specs, next_block = [], [], 0
        for request_id, (start, new) in enumerate(spans):
            count = -(-(start + new) // PAGE)
            blocks = tuple(range(next_block, next_block + count))
            next_block += count
            chunks.append(Chunk(request_id, start, new, blocks, sample))
            tokens = (1,) * (start + new)
            specs.append(RequestSpec(request_id, len(tokens), tokens, (), SamplingParams(temperature=0.0)))
        ids = tuple(range(len(spans)))
        total = sum(new for _, new in spans)
        work = StepInput(Batch(0, tuple(chunks), ids), (1,) * total, tuple(specs))
        return lambda: self.runner.execute(work)


def measure(checkpoint: Path, seat: Seat, grid: Grid) -> dict[str, Any]:
    """Seconds of everything in the grid on this seat. Binds the calling process: run it in one of its own."""
    settle(list(seat.cores), seat.threads)
    torch.manual_seed(0)
    worker = Worker(checkpoint, grid)
    clock = Clock(grid.repeats)
    with torch.inference_mode():
        encode = [
            {"sides": [side] * count, "seconds": clock.seconds(worker.encode([side] * count))}
            for side in grid.sides
            for count in grid.image_counts
        ]
        return {
            "cores": len(seat.cores),
            "threads": seat.threads,
            "encode": encode,
            "prefill": [_timed(clock, worker, [(0, n)]) for n in grid.chunks],
            "prefixed": [_timed(clock, worker, [span]) for span in grid.prefixed],
            "pairs": [_timed(clock, worker, [(0, n), (0, n)]) for n in grid.pairs],
            "sampled": [_timed(clock, worker, [(0, 16)] * count, sample=True) for count in (1, 8)],
            "unsampled": [_timed(clock, worker, [(0, 16)] * count) for count in (1, 8)],
            "decode": [_timed(clock, worker, [(ctx - 1, 1)] * count, sample=True) for ctx, count in grid.decodes],
        }


def _timed(clock: Clock, worker: Worker, spans: Sequence[Span], sample: bool = False) -> dict[str, Any]:
    return {"spans": list(spans), "seconds": clock.seconds(worker.step(spans, sample))}


class Clock:
    """Medians over repeats."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats

    def seconds(self, work: Callable[[], Any]) -> float:
        work()
        taken = []
        for _ in range(self.repeats):
            begin = time.perf_counter()
            work()
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken)


# ---- how two workers slow each other down -------------------------------------------------------------------------


def measure_beside(checkpoint: Path, seat: Seat, kind: str, seconds: float) -> float:
    """Mean seconds of one piece of work ("encode": an image of 448 pixels a side, "prefill": 512 tokens), over and over
    for so many seconds. Alone or beside another process that does the same on its own seat."""
    settle(list(seat.cores), seat.threads)
    worker = Worker(checkpoint, Grid(chunks=(512,), prefixed=(), pairs=(), decodes=((1, 1),)))
    with torch.inference_mode():
        work = worker.encode([448]) if kind == "encode" else worker.step([(0, 512)], sample=True)
        work()
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            work()
            count += 1
        return (time.perf_counter() - begin) / count
