"""A simulated run: virtual time around the engine's own core. The core decides, servers take the time that the cost
model says, and nothing here knows a scheme's rules.

When decisions are asked for: encoders whenever something changed (Algorithm 1 keeps at most two batches at each);
micro-batches when stage 0 could start one. Co-located encoding runs in stage 0 before the micro-batch's chunks, on all
of its TP devices (weights sharded, as vLLM does by default). Messages between stages overlap with computing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.sim.cost import CostModel
from benchmarks.sim.deployment import Deployment, build_core, describe_core
from benchmarks.sim.events import Arrival, EncodeDone, Event, StageDone, StageEncodeDone
from benchmarks.sim.job import Job
from benchmarks.sim.servers import Encoder, PreprocessPool, SpanSink, Stage, Worker
from gllm.core.batch import Batch, EncodeBatch, ItemRef
from gllm.core.eventlog import Recorder
from gllm.core.scheduler import Sampled


@dataclass(slots=True)
class Served:
    """What became of one request; times in seconds of virtual time."""

    request_id: int
    arrival: float
    prompt_tokens: int
    first_token: float = 0.0
    finish: float = 0.0
    output_tokens: int = 0


@dataclass(slots=True)
class RunResult:
    """served: in order of arrival. busy: seconds that each worker computed, by kind ("encode", "prefill", which stands
    for decodes as well). end: when the last request finished."""

    served: list[Served]
    busy: dict[str, dict[str, float]]
    end: float
    num_batches: int
    preemptions: int


@dataclass(slots=True, kw_only=True)
class Preprocessing:
    """CPU work per image in the API process; 0 seconds: not counted."""

    num_workers: int = 8
    seconds_per_megapixel: float = 0.0


class Cluster:
    """Servers, and the core that directs them. `sink`: gets every core event and busy span (the event log). `now`:
    virtual time, in seconds."""

    def __init__(
        self,
        deployment: Deployment,
        cost: CostModel,
        preprocessing: Preprocessing | None = None,
        sink: SpanSink | None = None,
    ) -> None:
        preprocessing = preprocessing or Preprocessing()
        self.deployment = deployment
        self.cost = cost
        core = build_core(deployment, cost)
        self.core: Any = core if sink is None else Recorder(core, sink)
        if sink is not None:
            sink(describe_core(deployment, cost))
        self.preprocess = PreprocessPool(preprocessing.num_workers, preprocessing.seconds_per_megapixel)
        layers = cost.model.layers_of(deployment.pp)
        self.stages = [
            Stage(Worker(f"stage {index}", sink), index, count, index == deployment.pp - 1)
            for index, count in enumerate(layers)
        ]
        self.encoders = [Encoder(Worker(f"encoder {index}", sink), index) for index in range(deployment.encoders)]
        self._served: dict[int, Served] = {}
        self._jobs: dict[int, Job] = {}
        self._num_batches = 0
        self.now = 0.0

    # ---- the loop -----------------------------------------------------------------------------------------------

    def run(self, jobs: Iterable[Job]) -> RunResult:
        """Serve all jobs to their end. Raises RuntimeError when requests are left and nothing happens any more."""
        heap: list[tuple[float, int, Event]] = []
        for count, job in enumerate(jobs):
            heap.append((job.arrival, count, Arrival(job.arrival, job)))
        heapq.heapify(heap)
        count = len(heap)
        while heap:
            self.now, _, event = heapq.heappop(heap)
            for caused in event.handle(self):
                heapq.heappush(heap, (caused.time, count, caused))
                count += 1
        if self._jobs:
            raise RuntimeError(f"{len(self._jobs)} requests never finished, the first is {min(self._jobs)}")
        workers = [stage.worker for stage in self.stages] + [encoder.worker for encoder in self.encoders]
        served = sorted(self._served.values(), key=lambda s: (s.arrival, s.request_id))
        busy = {worker.name: worker.busy for worker in workers}
        return RunResult(served, busy, self.now, self._num_batches, self.core.stats().preemptions)

    # ---- what events do ---------------------------------------------------------------------------------------------

    def open(self, job: Job) -> None:
        request = job.request
        self._jobs[request.request_id] = job
        self._served[request.request_id] = Served(request.request_id, job.arrival, len(request.token_ids))

    def encoded(self, batch_id: int, now: float) -> None:
        self.core.on_encoded(batch_id, now)
        self._drain()

    def finish(self, batch: Batch, now: float) -> None:
        """A micro-batch left the last stage: tokens come out."""
        tokens = {chunk.request_id: 0 for chunk in batch.chunks if chunk.sample}
        results: tuple[Sampled, ...] = self.core.on_batch_done(batch.batch_id, tokens, now)
        for sampled in results:
            served = self._served[sampled.request_id]
            if not served.output_tokens:
                served.first_token = now
            served.output_tokens += 1
            if sampled.finish_reason:
                served.finish = now
                del self._jobs[sampled.request_id]

    def dispatch(self, now: float) -> list[Event]:
        """Ask the core for everything that could start."""
        caused: list[Event] = []
        for encoder in self.encoders:
            batch = self.core.next_encode(encoder.encoder_id, now)
            while batch is not None:
                encoder.queue.append(batch)
                batch = self.core.next_encode(encoder.encoder_id, now)
            caused += self.start_encoder(encoder, now)
        return caused + self._fill_pipeline(now)

    def _fill_pipeline(self, now: float) -> list[Event]:
        stage = self.stages[0]
        can_form = self.deployment.forms_ahead or not (stage.worker.is_busy or stage.queue)
        while can_form:
            batch = self.core.next_batch(now)
            if batch is None:
                break
            self._num_batches += 1
            stage.queue.append(batch)
            can_form = self.deployment.forms_ahead
        started = self.start_stage(stage, now)
        if not started and self.deployment.is_elastic and not stage.worker.is_busy:
            started = self._encode_in_stage(stage, now)
        self._drain()
        return started

    # ---- starting work ----------------------------------------------------------------------------------------------

    def start_encoder(self, encoder: Encoder, now: float) -> list[Event]:
        if encoder.worker.is_busy or not encoder.queue:
            return []
        batch = encoder.queue.popleft()
        seconds = self.cost.encode_seconds(self._grids(batch.items))
        encoder.worker.is_busy = True
        encoder.worker.encodes(batch.batch_id, batch.items, now, seconds)
        return [EncodeDone(now + seconds, encoder, batch)]

    def start_stage(self, stage: Stage, now: float) -> list[Event]:
        if stage.worker.is_busy or not stage.queue:
            return []
        batch = stage.queue.popleft()
        encode = 0.0
        if stage.index == 0:
            encode = self.cost.encode_seconds(self._grids(batch.encode), self.deployment.tp)
            if encode:
                stage.worker.encodes(batch.batch_id, batch.encode, now, encode)
            self.core.on_batch_fed(batch.batch_id, now)
        seconds = self.cost.stage_seconds(batch, stage.num_layers, self.deployment.tp, stage.is_last)
        stage.worker.is_busy = True
        stage.worker.runs(batch, now + encode, seconds)
        return [StageDone(now + encode + seconds, stage, batch)]

    def _encode_in_stage(self, stage: Stage, now: float) -> list[Event]:
        """Elastic encode: stage 0 asks as one encoder more; whether it gets anything is the core's decision."""
        batch: EncodeBatch | None = self.core.next_encode(len(self.encoders), now)
        if batch is None:
            return []
        seconds = self.cost.encode_seconds(self._grids(batch.items), self.deployment.tp)
        stage.worker.is_busy = True
        stage.worker.encodes(batch.batch_id, batch.items, now, seconds)
        return [StageEncodeDone(now + seconds, stage, batch)]

    def _grids(self, refs: Iterable[ItemRef]) -> list[tuple[int, int, int]]:
        return [self._jobs[ref.request_id].request.items[ref.index].grid for ref in refs]

    def _drain(self) -> None:
        """Nobody holds bytes here: what the core names as released is passed over."""
        if self.encoders:
            self.core.take_released()
