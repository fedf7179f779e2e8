"""The encoder worker: holds the ViT and nothing else; encodes what it is given, left to right."""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import zmq

from gllm.config import EngineConfig
from gllm.engine.messages import Codec, Encode, Encoded, EncodeItem, Hello, Message, Ping, Pong, Shutdown, ToEncoder
from gllm.errors import StartupError
from gllm.models.loader import resolve_dtype
from gllm.worker.pixels import PixelFile, read_pixels
from gllm.worker.process import Compute, settle
from gllm.worker.vision import VisionEncoder
from rserve.transport.base import Sender
from rserve.transport.shm import ShmSender


class EncoderWorker:
    def __init__(self, vision: VisionEncoder, sender: Sender, run_dir: Path, compute: Compute) -> None:
        self._vision = vision
        self._sender = sender
        self._run_dir = run_dir
        self._compute = compute

    def run(self, socket: zmq.Socket[bytes]) -> None:
        """Until told to shut down."""
        codec = Codec(ToEncoder)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._compute.socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._compute.socket in ready:
                socket.send(codec.encode(self._compute.take()))
            if socket in ready:
                match codec.decode(socket.recv()):
                    case Encode() as batch:
                        self._compute.submit(lambda batch=batch: self._compute.post(self.encode(batch)))
                    case Ping():
                        socket.send(codec.encode(Pong()))
                    case Shutdown():
                        return

    def encode(self, batch: Encode) -> Encoded:
        """One broken item does not take the others with it."""
        start = time.monotonic()
        errors: dict[int, str] = {}
        images: dict[int, torch.Tensor] = {}
        for position, item in enumerate(batch.items):
            try:
                images[position] = self._read(item)
            except (LookupError, ValueError) as error:
                errors[position] = str(error)
        if images:
            grids = [batch.items[position].grid for position in images]
            rows = self._vision.encode(list(images.values()), grids)
            for position, item_rows in zip(images, rows, strict=True):
                self._sender.write(batch.items[position].place, item_rows)
        return Encoded(batch.batch_id, start, time.monotonic(), errors)

    def _read(self, item: EncodeItem) -> torch.Tensor:
        image = read_pixels(self._run_dir, PixelFile(item.file, item.height, item.width))
        self._vision.check(image, item.grid, sum(count for _, count in item.place))
        return image

    def warm_up(self) -> None:
        """The first run of every kernel is slow: let it be on no request's account."""
        side = 4 * self._vision.config.patch_size * self._vision.config.merge_size
        image = torch.zeros(side, side, 3, dtype=torch.uint8)
        self._vision.encode([image], [self._vision.grid_of(image)])


def main(
    name: str, address: str, run_dir: str, config: dict[str, Any], device: str, cores: list[int], threads: int,
    arena: str, arena_rows: int, hidden: int,
) -> None:  # fmt: skip
    """The process. It says Hello once it can encode, or why it cannot."""
    settle(cores, threads)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, f"{name}.{os.getpid()}".encode())
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(address)
    codec = Codec(ToEncoder)

    def say(message: Message) -> None:
        socket.send(codec.encode(message))

    engine = EngineConfig(**config)
    try:
        vision = VisionEncoder(
            engine.checkpoint, dtype=engine.dtype, device=device, load_format=engine.load_format, seed=engine.seed
        )
    except StartupError as error:
        say(Hello(name, os.getpid(), str(error)))
        context.term()
        raise SystemExit(1) from None

    def crash(trace: str) -> None:
        print(f"{name} failed:\n{trace}", flush=True)
        os._exit(1)

    compute = Compute(context, name, crash)
    dtype = resolve_dtype(engine.checkpoint, engine.dtype)
    worker = EncoderWorker(vision, _LateSender(run_dir, arena, arena_rows, hidden, dtype), Path(run_dir), compute)
    worker.warm_up()
    say(Hello(name, os.getpid()))
    try:
        worker.run(socket)
    except Exception:
        traceback.print_exc()
        os._exit(1)


class _LateSender:
    """Opens the arena with the first batch: stage 0 makes it while this process starts."""

    def __init__(self, run_dir: str, arena: str, num_rows: int, hidden: int, dtype: torch.dtype) -> None:
        self._arguments = (Path(run_dir) / arena, num_rows, hidden, dtype)
        self._sender: ShmSender | None = None

    def write(self, place: Any, rows: torch.Tensor) -> None:
        if self._sender is None:
            self._sender = ShmSender(*self._arguments)
        self._sender.write(place, rows)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
