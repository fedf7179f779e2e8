"""The encoder worker: holds the ViT and nothing else; encodes what it is given, left to right."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import zmq

from gllm.config import EngineConfig
from gllm.engine.control import Endpoint, Keys, connect, disconnects, receive
from gllm.engine.messages import Codec, Encode, Encoded, EncodeItem, Hello, Message, Ping, Pong, Shutdown, ToEncoder
from gllm.errors import StartupError
from gllm.models.loader import resolve_dtype
from gllm.worker.pixels import PixelFile, read_pixels, view_pixels
from gllm.worker.process import Compute, settle
from gllm.worker.vision import VisionEncoder
from rserve.transport.base import Payload, Place, Sender
from rserve.transport.shm import ARENA, ShmSender
from rserve.transport.wire import WireSender


class EncoderWorker:
    """run_dir: where pixels are; None: in the frames of messages."""

    def __init__(self, vision: VisionEncoder, sender: Sender, run_dir: Path | None, compute: Compute) -> None:
        self._vision = vision
        self._sender = sender
        self._run_dir = run_dir
        self._compute = compute

    def run(self, socket: zmq.Socket[bytes], gone: zmq.Socket[bytes] | None = None) -> None:
        """Until told to shut down. gone: see `disconnects`; raises ConnectionError then."""
        codec = Codec(ToEncoder)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._compute.socket, zmq.POLLIN)
        if gone is not None:
            poller.register(gone, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if gone in ready and socket not in ready:
                raise ConnectionError("the connection to the driver is broken")
            if self._compute.socket in ready:
                report, payloads = self._compute.take()
                socket.send_multipart([codec.encode(report), *payloads], copy=not payloads)
            if socket in ready:
                data, *frames = receive(socket, 1)
                match codec.decode(data):
                    case Encode() as batch:
                        self._compute.submit(
                            lambda batch=batch, frames=frames: self._compute.post(self.encode(batch, frames))
                        )
                    case Ping():
                        socket.send(codec.encode(Pong()))
                    case Shutdown():
                        return

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
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoint = Endpoint(address, Keys(**keys) if keys else None)
    socket = connect(context, endpoint, f"{name}.{os.getpid()}")
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
    folder = Path(run_dir) if run_dir else None
    sender: Sender = WireSender()
    if folder is not None:
        sender = _LateSender(folder / ARENA, arena_rows, hidden, resolve_dtype(engine.checkpoint, engine.dtype))
    worker = EncoderWorker(vision, sender, folder, compute)
    worker.warm_up()
    say(Hello(name, os.getpid()))
    try:
        worker.run(socket, disconnects(socket, endpoint))
    except ConnectionError as error:
        print(f"{name}: {error}", flush=True)
        os._exit(1)
    except Exception:
        traceback.print_exc()
        os._exit(1)


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
