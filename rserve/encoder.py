"""The encoder worker: holds the ViT and nothing else; encodes what it is given, left to right."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gllm.config import EngineConfig
from gllm.engine.driver_link import DriverLink
from gllm.engine.messages import Encode, Encoded, EncodeItem, ToEncoder
from gllm.models.loader import resolve_dtype
from gllm.worker.pixels import PixelFile, read_pixels, view_pixels
from gllm.worker.process import settle
from gllm.worker.vision import VisionEncoder
from rserve.transport.base import Payload, Place, Sender
from rserve.transport.shm import ARENA, ShmSender
from rserve.transport.wire import WireSender


class EncoderWorker:
    """run_dir: where pixels are; None: in the frames of messages."""

    def __init__(self, vision: VisionEncoder, sender: Sender, run_dir: Path | None) -> None:
        self._vision = vision
        self._sender = sender
        self._run_dir = run_dir

    def encode(self, batch: Encode, frames: Sequence[Any] = ()) -> tuple[Encoded, list[Payload]]:
        """The report, and what travels with it. One broken item does not take the others with it."""
        start = time.monotonic()
        errors: dict[int, str] = {}
        payloads: list[Payload] = [None] * len(batch.items)
        images: dict[int, torch.Tensor] = {}
        for position, item in enumerate(batch.items):
            try:
                images[position] = self._read(item, frames[position] if self._run_dir is None else None)
            except (LookupError, ValueError) as error:
                errors[position] = str(error)
        if images:
            grids = [batch.items[position].grid for position in images]
            rows = self._vision.encode(list(images.values()), grids)
            for position, item_rows in zip(images, rows, strict=True):
                payloads[position] = self._sender.write(batch.items[position].place, item_rows)
        travels = any(payload is not None for payload in payloads)
        report = Encoded(batch.batch_id, start, time.monotonic(), errors)
        return report, [payload if payload is not None else b"" for payload in payloads] if travels else []

    def _read(self, item: EncodeItem, frame: Any) -> torch.Tensor:
        source = PixelFile(item.file, item.height, item.width)
        image = view_pixels(frame, source) if self._run_dir is None else read_pixels(self._run_dir, source)
        self._vision.check(image, item.grid, sum(count for _, count in item.place))
        return image

    def warm_up(self) -> None:
        """The first run of every kernel is slow: let it be on no request's account."""
        side = 4 * self._vision.config.patch_size * self._vision.config.merge_size
        image = torch.zeros(side, side, 3, dtype=torch.uint8)
        self._vision.encode([image], [self._vision.grid_of(image)])


def main(
    name: str, address: str, config: dict[str, Any], device: str, cores: list[int], threads: int, arena_rows: int,
    hidden: int, run_dir: str | None = None, keys: dict[str, str] | None = None,
) -> None:  # fmt: skip
    """The process. It says Hello once it can encode, or why it cannot. run_dir: None between hosts, where payloads
    travel with messages and `keys` protect these."""
    settle(cores, threads)
    link = DriverLink(name, address, keys, ToEncoder)
    engine = EngineConfig(**config)
    with link.loading():
        vision = VisionEncoder(
            engine.checkpoint, dtype=engine.dtype, device=device, load_format=engine.load_format, seed=engine.seed
        )
    folder = Path(run_dir) if run_dir else None
    sender: Sender = WireSender()
    if folder is not None:
        sender = _LateSender(folder / ARENA, arena_rows, hidden, resolve_dtype(engine.checkpoint, engine.dtype))
    worker = EncoderWorker(vision, sender, folder)
    worker.warm_up()
    link.hello()
    compute = link.compute()

    def on_message(batch: Encode, frames: list[Any]) -> None:
        compute.submit(lambda: compute.post(worker.encode(batch, frames)))

    link.serve(compute, on_message, lambda result: link.send(*result))


class _LateSender:
    """Opens the arena with the first batch: stage 0 makes it while this process starts."""

    def __init__(self, path: Path, num_rows: int, hidden: int, dtype: torch.dtype) -> None:
        self._arguments = (path, num_rows, hidden, dtype)
        self._sender: ShmSender | None = None

    def write(self, place: Place, rows: torch.Tensor) -> Payload:
        if self._sender is None:
            self._sender = ShmSender(*self._arguments)
        return self._sender.write(place, rows)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
