"""What turns gLLM's driver into RServe: the orchestrator as its core, and separate encoders fed from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from gllm.config import EngineConfig
from gllm.core.batch import EncodeBatch
from gllm.core.eventlog import Record, encode_span
from gllm.core.policy import TokenPolicy
from gllm.core.scheduler import Scheduler, SchedulerConfig
from gllm.engine.liveness import Liveness
from gllm.engine.messages import Codec, Encode, Encoded, EncodeItem, Hello, Message, Ping, ToEncoder
from gllm.errors import StartupError
from gllm.worker.pixels import Pixels
from rserve.config import RServeConfig
from rserve.core.encoder_scheduler import MAX_LOSSES
from rserve.core.orchestrator import Orchestrator, build, describe
from rserve.embeddings import ReceivedEmbeddings
from rserve.transport.base import Place, Receiver

BATCH_TOKENS = {"cuda": 1024, "cpu": 256}  # C: the paper's on a GPU; a core is busy with less


def rserve_config(config: EngineConfig, device: str, embedding_capacity: int) -> RServeConfig:
    """The scheme that the engine's configuration asks for. Without --rserve encoders work as in gLLM-epd: all items of
    a request are one batch, and prefill starts when all are encoded."""
    overlap = config.rserve and config.intra_request_overlap
    batch_tokens = config.encoder_batch_tokens or BATCH_TOKENS[device]
    return RServeConfig(
        num_encoders=config.num_encoders,
        encoder_batch_tokens=batch_tokens if config.rserve else None,
        intra_request_overlap=overlap,
        inter_request_batching=config.inter_request_batching,
        embedding_capacity=embedding_capacity,
        min_chunk_tokens=config.min_chunk_tokens or 1,
    )


def make_core(
    scheduler: SchedulerConfig, policy: TokenPolicy, config: RServeConfig
) -> tuple[Orchestrator | Scheduler, Record]:
    """The core, and the record that describes it at the head of an event log."""
    return build(scheduler, policy, config), describe(scheduler, policy, config)


@dataclass(slots=True)
class _Encoder:
    """A running encoder. `batches`: what it has, with the places of the items' rows, in the batch's order."""

    name: str
    encoder_id: int
    identity: bytes
    batches: dict[int, tuple[EncodeBatch, tuple[Place, ...]]] = field(default_factory=dict)


class EncoderFleet:
    """The driver's `Encoders`: gives out encode batches, binds what comes back, and watches for signs of life.

    Embeddings of a batch are allocated when it is given out. An encoder counts as lost only once its process has ended
    or can reach this one no more, so memory that is freed then is written by nobody.
    """

    def __init__(
        self,
        core: Any,
        names: list[str],
        receiver: Receiver,
        embeddings: ReceivedEmbeddings,
        pixels: Pixels,
        socket: zmq.Socket[bytes],
        heartbeat_timeout: float,
        log: Callable[[Record], None] | None = None,
    ) -> None:
        self._core = core
        self._ids = {name: index for index, name in enumerate(names)}
        self._receiver = receiver
        self._embeddings = embeddings
        self._pixels = pixels
        self._socket = socket
        self._codec = Codec(ToEncoder)
        self._log = log
        self._up: dict[str, _Encoder] = {}
        self._foretold: dict[str, int] = {}  # losses that are known before WorkerLost tells them
        self._liveness = Liveness(heartbeat_timeout, lambda name: self._send(self._up[name], Ping()))
        self.probe, self.hung, self.next_check = self._liveness.probe, self._liveness.hung, self._liveness.next_check

    # ---- coming and going ---------------------------------------------------------------------------------------

    def on_hello(self, identity: bytes, hello: Hello) -> dict[int, str]:
        if hello.error:
            return {}  # it ends, and WorkerLost follows
        failures: dict[int, str] = {}
        if hello.name in self._up:
            # Its forerunner has ended, or it would not be here; the word of that comes from another process, later.
            failures = self.on_lost(hello.name, time.monotonic())
            self._foretold[hello.name] = self._foretold.get(hello.name, 0) + 1
        self._up[hello.name] = _Encoder(hello.name, self._ids[hello.name], identity)
        self._liveness.add(hello.name, time.monotonic())
        return failures

    def on_lost(self, name: str, now: float) -> dict[int, str]:
        if self._foretold.get(name):
            self._foretold[name] -= 1
            return {}
        self._liveness.remove(name)
        encoder = self._up.pop(name, None)
        if encoder is None:
            return {}
        for _, places in encoder.batches.values():
            for place in places:
                self._receiver.free(place)
        fatal = self._core.on_encoder_lost(encoder.encoder_id, now)
        return {
            ref.request_id: f"image {ref.index + 1} cannot be encoded: the encoder ended {MAX_LOSSES} times at it"
            for ref in fatal
        }

    # ---- work -----------------------------------------------------------------------------------------------------

    def dispatch(self, now: float) -> bool:
        moved = False
        # Who has least to do asks first, so that a second batch goes to nobody while another encoder is idle.
        for encoder in sorted(self._up.values(), key=lambda encoder: len(encoder.batches)):
            while (batch := self._core.next_encode(encoder.encoder_id, now)) is not None:
                self.settle()  # room for this batch may have been taken from others
                self._give(encoder, batch, now)
                moved = True
                if len(self._up) > 1:
                    break
        return moved

    def _give(self, encoder: _Encoder, batch: EncodeBatch, now: float) -> None:
        request = self._core.request(batch.items[0].request_id)
        places = tuple(self._receiver.allocate(ref.num_tokens) for ref in batch.items)
        items: list[EncodeItem] = []
        frames: list[Any] = []
        for ref, place in zip(batch.items, places, strict=True):
            frames += self._pixels.frames(ref.request_id, ref.index)
            source = self._pixels.file(ref.request_id, ref.index)
            grid = request.items[ref.index].grid
            items.append(EncodeItem(source.file, source.height, source.width, grid, place))
        encoder.batches[batch.batch_id] = (batch, places)
        self._liveness.work(encoder.name, True, now)
        self._send(encoder, Encode(batch.batch_id, tuple(items)), frames)

    def on_encoded(self, message: Encoded, frames: Sequence[Any], now: float) -> dict[int, str]:
        encoder = next((e for e in self._up.values() if message.batch_id in e.batches), None)
        if encoder is None:
            return {}  # an encoder that was given up
        batch, places = encoder.batches.pop(message.batch_id)
        self._liveness.heard(encoder.name, now)
        self._liveness.work(encoder.name, bool(encoder.batches), now)
        wanted = set(self._core.on_encoded(message.batch_id, now))
        for position, (ref, place) in enumerate(zip(batch.items, places, strict=True)):
            if ref in wanted:
                if position not in message.errors:
                    self._receiver.deliver(place, frames[position] if frames else None)
                self._embeddings.bind(ref.request_id, ref.index, place)
            else:
                self._receiver.free(place)
        if self._log is not None:
            self._log(encode_span(encoder.name, batch.batch_id, batch.items, message.start, message.end))
        return {batch.items[index].request_id: error for index, error in message.errors.items()}

    def settle(self) -> None:
        for ref in self._core.take_released():
            self._embeddings.release(ref.request_id, ref.index)

    # ---- signs of life ----------------------------------------------------------------------------------------------

    def on_pong(self, identity: bytes, now: float) -> None:
        for encoder in self._up.values():
            if encoder.identity == identity:
                self._liveness.heard(encoder.name, now)

    def statuses(self, since: float) -> dict[str, str]:
        return dict.fromkeys(self._ids, "down") | self._liveness.statuses(since)

    def gauges(self) -> dict[str, float]:
        return {
            "encoders_up": float(len(self._up)),
            "encode_batches_at_encoders": float(sum(len(encoder.batches) for encoder in self._up.values())),
            "embedding_items_bound": float(len(self._embeddings)),
        }

    def _send(self, encoder: _Encoder, message: Message, frames: Sequence[Any] = ()) -> None:
        self._socket.send_multipart([encoder.identity, self._codec.encode(message), *frames], copy=not frames)


def make_embeddings(
    run_dir: Path | None, capacity: int, hidden: int, dtype: Any
) -> tuple[Receiver, ReceivedEmbeddings]:
    """The stage's source of embeddings: an arena of `capacity` rows of `hidden` elements, in the run directory where
    there is one (shared memory), else its own. Raises StartupError when there is no memory for it."""
    from rserve.transport.shm import ARENA, ShmReceiver
    from rserve.transport.wire import WireReceiver

    receiver: Receiver
    try:
        if run_dir is not None:
            receiver = ShmReceiver(run_dir / ARENA, capacity, hidden, dtype)
        else:
            receiver = WireReceiver(capacity, hidden, dtype)
    except (OSError, MemoryError) as error:
        size = capacity * hidden * dtype.itemsize
        raise StartupError(f"no {size:,} bytes for embeddings ({error}): lower --embedding-capacity") from None
    return receiver, ReceivedEmbeddings(receiver)
