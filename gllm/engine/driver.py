"""The driver worker's loop: messages and results go into the core, its decisions go to the stage and the encoders.

The loop does nothing that takes long. The stage computes in a thread beside it; encoders are a plug-in (`Encoders`),
absent in the baseline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import zmq

from gllm.core.batch import Batch
from gllm.core.eventlog import Record, batch_span, encode_span
from gllm.core.readiness import NeverFits
from gllm.core.scheduler import Sampled
from gllm.engine.control import receive
from gllm.engine.messages import (
    Abort,
    AddRequest,
    Codec,
    Encoded,
    GetStatus,
    Hello,
    ItemPixels,
    Message,
    Output,
    Outputs,
    Pong,
    Refused,
    Shutdown,
    Status,
    StepDone,
    ToDriver,
    WorkerHung,
    WorkerLost,
)
from gllm.engine.pipeline import Pipeline, Span
from gllm.sampling_params import SamplingParams
from gllm.worker.pixels import PixelFile, Pixels
from gllm.worker.stage import Fed
from gllm.worker.step import RequestSpec, StepInput, StepOutput, TokenLogprobs

logger = logging.getLogger(__name__)

API = b"api"
PROBE_SECONDS = 2.0  # in which a worker has to answer a health probe


class Encoders(Protocol):
    """Separate encoders, as the driver sees them. What happens to them may cost requests: these are returned, with the
    reason why an item of theirs cannot be encoded."""

    def on_hello(self, identity: bytes, hello: Hello) -> dict[int, str]: ...

    def on_encoded(self, message: Encoded, frames: Sequence[Any], now: float) -> dict[int, str]:
        """frames: what came with the message."""
        ...

    def on_pong(self, identity: bytes, now: float) -> None: ...

    def on_lost(self, name: str, now: float) -> dict[int, str]: ...

    def dispatch(self, now: float) -> bool:
        """Give encoders what the core has for them. Returns whether something was given."""
        ...

    def settle(self) -> None:
        """Free the embeddings that the core does not need any more."""
        ...

    def probe(self, now: float) -> None:
        """Ask every encoder for a sign of life."""
        ...

    def hung(self, now: float) -> list[str]:
        """Encoders that have work and gave no sign of life for too long; each is named once."""
        ...

    def next_check(self, now: float) -> float | None:
        """Seconds until `hung` should be asked again; None while no encoder has work."""
        ...

    def statuses(self, since: float) -> dict[str, str]:
        """ "ok", or what is wrong, for each encoder; "silent" for those not heard of since then."""
        ...

    def gauges(self) -> dict[str, float]: ...


@dataclass(slots=True)
class _Live:
    sampling: SamplingParams
    known_to_workers: bool = False


@dataclass(frozen=True, slots=True)
class _Probe:
    query: int
    started: float


class Driver:
    """core: a Scheduler or Orchestrator (or a Recorder around one). log: takes records of workers' busy times."""

    def __init__(
        self,
        core: Any,
        pipeline: Pipeline,
        pixels: Pixels,
        socket: zmq.Socket[bytes],
        encoders: Encoders | None = None,
        log: Callable[[Record], None] | None = None,
    ) -> None:
        self.core = core
        self.pipeline = pipeline
        self.encoders = encoders
        self._pixels = pixels
        self._socket = socket
        self._codec = Codec(ToDriver)
        self._log = log
        self._live: dict[int, _Live] = {}
        self._batches: dict[int, Batch] = {}
        self._fed: dict[int, float] = {}
        self._to_log: dict[int, tuple[Batch, int]] = {}  # with the number of stages that have still to report
        self._own_done: set[int] = set()  # micro-batches that stage 0 is done with
        self._outputs: dict[int, StepOutput] = {}
        self._probes: list[_Probe] = []
        self._stopping = False

    # ---- the loop -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until told to shut down."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self.pipeline.compute.socket, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll(self._timeout()))
            if self.pipeline.compute.socket in ready:
                self._on_own_stage()
            while self._socket.poll(0):
                identity, data, *frames = receive(self._socket, 2)
                try:
                    message = self._codec.decode(data)
                except msgspec.DecodeError as error:
                    logger.error("a message from %r is dropped: %s", identity, error)
                else:
                    self._on_message(identity, message, frames)
            self._pump()

    def send(self, message: Message) -> None:
        """To the API process."""
        self._socket.send_multipart([API, self._codec.encode(message)])

    def _timeout(self) -> int | None:
        """Milliseconds to sleep at most; None: until something happens."""
        now = time.monotonic()
        waits = [probe.started + PROBE_SECONDS - now for probe in self._probes]
        watched = [self.pipeline.liveness, *([self.encoders] if self.encoders is not None else [])]
        waits += [check for check in (group.next_check(now) for group in watched) if check is not None]
        return max(0, int(min(waits) * 1000) + 1) if waits else None

    def _pump(self) -> None:
        """Start whatever can be started."""
        now = time.monotonic()
        moved = True
        while moved:
            moved = False
            if self.encoders is not None:
                self.encoders.settle()
                moved = self.encoders.dispatch(now)
            while (batch := self.core.next_batch(now)) is not None:
                self._submit(batch, now)
                moved = True
        if not self._batches and (dropped := self.core.take_dropped(now)):
            self._forget(dropped)
            self.pipeline.forget(dropped)
        hung = self.pipeline.liveness.hung(now)
        if self.encoders is not None:
            hung += self.encoders.hung(now)
        for name in hung:
            self.send(WorkerHung(name))
        self._answer_probes(now)

    # ---- micro-batches ------------------------------------------------------------------------------------------

    def _submit(self, batch: Batch, now: float) -> None:
        self._forget(batch.dropped)
        tokens: list[int] = []
        new = []
        for chunk in batch.chunks:
            tokens += self.core.tokens(chunk.request_id, chunk.start, chunk.num_tokens)
            live = self._live[chunk.request_id]
            if not live.known_to_workers:
                live.known_to_workers = True
                new.append(self._spec(chunk.request_id, live.sampling))
        self._batches[batch.batch_id] = batch
        if self._log is not None:
            self._to_log[batch.batch_id] = (batch, self.pipeline.num_stages)
        self.pipeline.submit(StepInput(batch, tuple(tokens), tuple(new)), now)

    def _spec(self, request_id: int, sampling: SamplingParams) -> RequestSpec:
        request = self.core.request(request_id)
        tokens = request.token_ids + self.core.outputs(request_id)
        return RequestSpec(request_id, len(request.token_ids), tokens, request.items, sampling)

    def _forget(self, dropped: tuple[int, ...]) -> None:
        for request_id in dropped:
            if request_id in self._live:
                self._live[request_id].known_to_workers = False

    def _on_own_stage(self) -> None:
        """Stage 0 has gathered the embeddings of a micro-batch, or is done with it."""
        result = self.pipeline.take()
        now = time.monotonic()
        if isinstance(result, Fed):
            self._fed[result.batch_id] = now
            self.core.on_batch_fed(result.batch_id, now)
            return
        self._refuse_all(result.failures)
        fed = self._fed.pop(result.batch_id, result.start)
        start = fed if self._log_encode(result.batch_id, result.start, fed) else result.start
        self._log_span(Span(0, result.batch_id, start, result.end))
        self._own_done.add(result.batch_id)
        if result.output is not None:
            self._outputs[result.batch_id] = result.output
        self._finish(result.batch_id, now)

    def _on_step_done(self, identity: bytes, message: StepDone, now: float) -> None:
        """Another stage is done with a micro-batch; the last one has sampled."""
        self._log_span(self.pipeline.on_step_done(identity, message, now))
        if message.output is not None:
            self._outputs[message.batch_id] = message.output
            self._finish(message.batch_id, now)

    def _finish(self, batch_id: int, now: float) -> None:
        """Once the output is there and this stage, too, has said how it went (its word may come second)."""
        if batch_id not in self._outputs or batch_id not in self._own_done:
            return
        self._own_done.remove(batch_id)
        output, batch = self._outputs.pop(batch_id), self._batches.pop(batch_id)
        self.pipeline.finished(now)
        sampled = self.core.on_batch_done(batch_id, dict(output.tokens), now)
        logprobs = dict(zip((request_id for request_id, _ in output.tokens), output.logprobs, strict=False))
        if sampled:
            self.send(Outputs(tuple(_output(token, logprobs) for token in sampled)))
        for request_id in {chunk.request_id for chunk in batch.chunks}:
            self._clean(request_id)

    def _log_encode(self, batch_id: int, start: float, fed: float) -> bool:
        """Whether stage 0 encoded items itself before it was fed."""
        batch = self._batches[batch_id]
        if self._log is not None and batch.encode:
            self._log(encode_span("stage 0", batch.batch_id, batch.encode, start, fed))
        return bool(batch.encode)

    def _log_span(self, span: Span) -> None:
        if self._log is None:
            return
        batch, stages_left = self._to_log[span.batch_id]
        if stages_left > 1:
            self._to_log[span.batch_id] = (batch, stages_left - 1)
        else:
            del self._to_log[span.batch_id]
        self._log(batch_span(f"stage {span.stage}", batch, span.start, span.end))

    # ---- messages -----------------------------------------------------------------------------------------------

    def _on_message(self, identity: bytes, message: Any, frames: Sequence[Any]) -> None:
        now = time.monotonic()
        match message:
            case AddRequest():
                self._add(message, now)
            case ItemPixels():
                self._add_pixels(message, frames, now)
            case Abort(request_id):
                self.core.on_abort(request_id, now)
                self._clean(request_id)
            case GetStatus(query, probe):
                self._start_probe(query, probe, now)
            case Shutdown():
                self._stopping = True
            case StepDone():
                self._on_step_done(identity, message, now)
            case Pong() if self.pipeline.knows(identity):
                self.pipeline.on_pong(identity, now)
            case _ if self.encoders is None:
                pass  # an encoder of an engine that has none
            case Hello():
                self._refuse_all(self.encoders.on_hello(identity, message))
            case Encoded():
                self._refuse_all(self.encoders.on_encoded(message, frames, now))
            case Pong():
                self.encoders.on_pong(identity, now)
            case WorkerLost(name):
                self._refuse_all(self.encoders.on_lost(name, now))

    def _add(self, message: AddRequest, now: float) -> None:
        request_id = message.request.request_id
        try:
            self.core.on_request(message.request, now)
        except NeverFits as error:
            self.send(Refused(request_id, str(error), retry=False))
            return
        self._live[request_id] = _Live(message.sampling)

    def _add_pixels(self, message: ItemPixels, frames: Sequence[Any], now: float) -> None:
        if message.request_id in self._live:
            source = PixelFile(message.file, message.height, message.width)
            self._pixels.put(message.request_id, message.index, source, frames)
            self.core.on_item_ready(message.request_id, message.index, now)

    def _refuse_all(self, failures: Mapping[int, str]) -> None:
        for request_id, reason in failures.items():
            self._refuse(request_id, reason, retry=False)

    def _refuse(self, request_id: int, reason: str, retry: bool) -> None:
        if request_id in self._live:
            self.core.on_abort(request_id, time.monotonic())
            self.send(Refused(request_id, reason, retry))
            self._clean(request_id)

    def _clean(self, request_id: int) -> None:
        if request_id in self._live and not self.core.is_live(request_id):
            del self._live[request_id]
            self._pixels.drop(request_id)

    # ---- status -------------------------------------------------------------------------------------------------

    def _start_probe(self, query: int, probe: bool, now: float) -> None:
        self._probes.append(_Probe(query, now))
        if probe:
            self.pipeline.liveness.probe(now)
            if self.encoders is not None:
                self.encoders.probe(now)
        else:
            self._answer(self._probes.pop())

    def _answer_probes(self, now: float) -> None:
        for probe in list(self._probes):
            silent = "silent" in self._workers(probe.started).values()
            if not silent or now >= probe.started + PROBE_SECONDS:
                self._probes.remove(probe)
                self._answer(probe)

    def _workers(self, since: float) -> dict[str, str]:
        workers = {"driver": "ok", "stage 0": "ok"} | self.pipeline.liveness.statuses(since)
        return workers | (self.encoders.statuses(since) if self.encoders is not None else {})

    def _answer(self, probe: _Probe) -> None:
        stats = self.core.stats()
        gauges = {
            "requests_running": stats.running,
            "requests_waiting": stats.waiting,
            "micro_batches_in_flight": stats.in_flight,
            "kv_blocks_used": stats.blocks_used,
            "kv_blocks_total": stats.blocks_total,
            "preemptions_total": stats.preemptions,
            "pixel_bytes_in_driver": self._pixels.num_bytes,
        }
        embeddings = self.core.embedding_stats()
        gauges |= {
            "embedding_tokens_held": embeddings.held,
            "embedding_tokens_held_peak": embeddings.peak_held,
            "embedding_tokens_encoding": embeddings.encoding,
            "embedding_tokens_capacity": embeddings.capacity,
        }
        if self.encoders is not None:
            gauges |= self.encoders.gauges()
        self.send(
            Status(probe.query, self._workers(probe.started), {name: float(value) for name, value in gauges.items()})
        )


def _output(token: Sampled, logprobs: dict[int, TokenLogprobs | None]) -> Output:
    return Output(token.request_id, token.token_id, logprobs.get(token.request_id), token.finish_reason)
