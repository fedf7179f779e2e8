"""Times of the real workers on given cores: encode over images and batch, prefill over chunk and prefix, decode over
batch and context. A seat lives in a process of its own, bound and threaded as the engine does it, and is measured in
passes: each piece of work once."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
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
Size = tuple[int, int]  # height and width of an image, pixels

# What is measured. In the range of the requests that two cores are asked: images of 84 to 336 pixels a side, which as a
# rule are no whole number of attention windows (112 pixels).
IMAGES: tuple[tuple[Size, ...], ...] = (
    ((112, 140), (84, 168), (140, 112)),
    ((252, 196), (224, 224), (168, 280)),
    ((308, 336), (280, 252), (336, 280)),
)
IMAGE_COUNTS = (1, 3, 8)
CHUNKS = (1, 32, 128, 256, 512, 1024, 2048)
PREFIXED: tuple[Span, ...] = ((256, 32), (256, 256), (1024, 256))
PAIRS = (64, 512)  # two prompts of so many tokens in one micro-batch
DECODES: tuple[Span, ...] = ((128, 1), (1024, 1), (256, 8))  # context, requests
SAMPLES = (1, 8)  # prompts of 16 tokens, with and without sampling


@dataclass(frozen=True, slots=True)
class Seat:
    """cores: what the process is bound to; threads: of its products."""

    cores: tuple[int, ...]
    threads: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of work. sizes: of images that are encoded as one batch, else `spans`, the chunks of a micro-batch;
    sample: their last positions are sampled."""

    kind: str
    sizes: tuple[Size, ...] = ()
    spans: tuple[Span, ...] = ()
    sample: bool = False

    def row(self, seconds: float) -> dict[str, Any]:
        """As it stands in the cost file."""
        what, shapes = ("sizes", self.sizes) if self.sizes else ("spans", self.spans)
        return {what: [list(shape) for shape in shapes], "seconds": seconds}


PIECES = (
    *[Piece("encode", sizes=tuple(islice(cycle(sizes), n))) for sizes in IMAGES for n in IMAGE_COUNTS],
    *[Piece("prefill", spans=((0, n),)) for n in CHUNKS],
    *[Piece("prefixed", spans=(span,)) for span in PREFIXED],
    *[Piece("pairs", spans=((0, n),) * 2) for n in PAIRS],
    *[Piece("sampled", spans=((0, 16),) * count, sample=True) for count in SAMPLES],
    *[Piece("unsampled", spans=((0, 16),) * count) for count in SAMPLES],
    *[Piece("decode", spans=((context - 1, 1),) * count, sample=True) for context, count in DECODES],
)


class Worker:
    """A stage with its own vision encoder, and the work that is timed."""

    def __init__(self, checkpoint: Path) -> None:
        tokens = max(sum(start + new + PAGE for start, new in piece.spans) for piece in PIECES)
        self.runner = StageRunner.build(checkpoint, num_blocks=tokens // PAGE + 64, page_size=PAGE, with_vision=True)
        assert self.runner.vision is not None
        self.vision = self.runner.vision
        self.pieces = {piece: self.work(piece) for piece in PIECES}

    def work(self, piece: Piece) -> Callable[[], Any]:
        return self._encode(piece.sizes) if piece.sizes else self._step(piece.spans, piece.sample)

    def _encode(self, sizes: Sequence[Size]) -> Callable[[], Any]:
        images = [torch.randint(0, 256, (*size, 3), dtype=torch.uint8) for size in sizes]
        grids = [self.vision.grid_of(image) for image in images]
        return lambda: self.vision.encode(images, grids)

    def _step(self, spans: Sequence[Span], sample: bool) -> Callable[[], Any]:
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


# ---- in the seat's process ----------------------------------------------------------------------------------------

_worker: Worker | None = None
BESIDE = {"encode": Piece("encode", sizes=((308, 336),)), "prefill": Piece("prefill", spans=((0, 256),))}


def open_seat(checkpoint: Path, seat: Seat) -> None:
    """Bind this process and build its worker; everything is run once, uncounted."""
    global _worker
    settle(list(seat.cores), seat.threads)
    torch.manual_seed(0)
    _worker = Worker(checkpoint)
    one_pass(0)


def one_pass(number: int) -> list[float]:
    """Seconds of every piece of PIECES, in their order. They are run in another order in every pass, so that a slow
    moment of the machine does not meet the same piece each time."""
    assert _worker is not None
    order = list(PIECES)
    random.Random(number).shuffle(order)
    taken = {}
    with torch.inference_mode():
        _worker.pieces[order[0]]()  # what the process left cold since the last pass
        for piece in order:
            begin = time.perf_counter()
            _worker.pieces[piece]()
            taken[piece] = time.perf_counter() - begin
    return [taken[piece] for piece in PIECES]


def keep_busy(kind: str, seconds: float) -> float:
    """Mean seconds of one piece of work of BESIDE, over and over for so many seconds: alone, or beside another seat
    that does the same."""
    assert _worker is not None
    work = _worker.pieces.get(BESIDE[kind]) or _worker.work(BESIDE[kind])
    with torch.inference_mode():
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            work()
            count += 1
    return (time.perf_counter() - begin) / count


# ---- what passes say together -------------------------------------------------------------------------------------


def collect(passes: Sequence[Sequence[float]], paces: Sequence[float], seat: Seat) -> dict[str, Any]:
    """The seat's entry in the cost file: every piece's median over the passes, by kind. paces: how many times slower
    than usual the machine was during each pass."""
    usual = [[seconds / pace for seconds in times] for times, pace in zip(passes, paces, strict=True)]
    medians = [statistics.median(times) for times in zip(*usual, strict=True)]
    found: dict[str, Any] = {"cores": len(seat.cores), "threads": seat.threads, "passes": len(passes)}
    for piece, seconds in zip(PIECES, medians, strict=True):
        found.setdefault(piece.kind, []).append(piece.row(seconds))
    return found
