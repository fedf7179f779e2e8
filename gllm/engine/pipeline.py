"""The stages as the driver sees them: its own, in a thread beside the loop, and those in processes of their own."""

from __future__ import annotations

from dataclasses import dataclass

import zmq

from gllm.engine.liveness import Liveness
from gllm.engine.messages import Codec, Forget, MakeCache, Message, Ping, RunStep, StepDone, ToStage
from gllm.worker.process import Compute
from gllm.worker.stage import Done, Fed, Stage
from gllm.worker.step import StepInput


@dataclass(frozen=True, slots=True)
class Span:
    """When a stage was busy with a micro-batch, in seconds on the monotonic clock."""

    stage: int
    batch_id: int
    start: float
    end: float


class Pipeline:
    """workers: name -> identity of the ranks in other processes. Micro-batches go to all ranks at once, ahead of the
    hidden states, which travel from stage to stage."""

    def __init__(
        self, stage: Stage, compute: Compute, socket: zmq.Socket[bytes], workers: dict[str, bytes], heartbeat: float
    ) -> None:
        self.compute = compute
        self.liveness = Liveness(heartbeat, lambda name: self._send(workers[name], Ping()))
        self.num_stages = stage.layout.pp
        self._stage = stage
        self._socket = socket
        self._codec = Codec(ToStage)
        self._identities = list(workers.values())
        self._names = {identity: name for name, identity in workers.items()}
        self._in_flight = 0

    def start(self, num_blocks: int, now: float) -> None:
        """Every rank makes its KV cache; this one is done when it returns."""
        for name in self._names.values():
            self.liveness.add(name, now)
        self._send_all(MakeCache(num_blocks))
        self._stage.make_cache(num_blocks)

    def submit(self, step: StepInput, now: float) -> None:
        self._in_flight += 1
        for name in self._names.values():
            self.liveness.work(name, True, now)
        self._send_all(RunStep(step))
        self.compute.submit(lambda: self._run(step))

    def forget(self, request_ids: tuple[int, ...]) -> None:
        """These requests are gone, and no micro-batch will say so soon."""
        self._send_all(Forget(request_ids))
        self.compute.submit(lambda: self._stage.runner.forget(request_ids))

    def take(self) -> Fed | Done:
        """What the own stage has to say; called when `compute.socket` is readable."""
        return self.compute.take()

    def knows(self, identity: bytes) -> bool:
        return identity in self._names

    def on_pong(self, identity: bytes, now: float) -> None:
        self.liveness.heard(self._names[identity], now)

    def on_step_done(self, identity: bytes, message: StepDone, now: float) -> Span:
        name = self._names[identity]
        self.liveness.heard(name, now)
        return Span(int(name.split()[1]), message.batch_id, message.start, message.end)

    def finished(self, now: float) -> None:
        """A micro-batch has left the last stage."""
        self._in_flight -= 1
        if not self._in_flight:
            for name in self._names.values():
                self.liveness.work(name, False, now)

    def _run(self, step: StepInput) -> None:
        batch_id = step.batch.batch_id
        self.compute.post(self._stage.run(step, on_fed=lambda: self.compute.post(Fed(batch_id))))

    def _send_all(self, message: Message) -> None:
        if self._identities:
            data = self._codec.encode(message)
            for identity in self._identities:
                self._socket.send_multipart([identity, data])

    def _send(self, identity: bytes, message: Message) -> None:
        self._socket.send_multipart([identity, self._codec.encode(message)])
