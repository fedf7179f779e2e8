"""What can happen in a simulated run. An event handles itself and returns the events it causes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from benchmarks.sim.images import num_pixels
from benchmarks.sim.job import Job
from benchmarks.sim.servers import Encoder, Stage
from gllm.core.batch import Batch, EncodeBatch

if TYPE_CHECKING:
    from benchmarks.sim.cluster import Cluster


class Event(Protocol):
    """time: seconds of virtual time. Events of one time are handled in the order in which they were caused."""

    time: float

    def handle(self, cluster: Cluster) -> list[Event]: ...


@dataclass(slots=True)
class Arrival:
    """A request reached the API: it enters the core, and its images enter preprocessing."""

    time: float
    job: Job

    def handle(self, cluster: Cluster) -> list[Event]:
        request = self.job.request
        cluster.open(self.job)
        cluster.core.on_request(request, self.time)
        vision = cluster.cost.model.vision
        ready: list[Event] = [
            ItemReady(cluster.preprocess.done_at(self.time, num_pixels(item.grid, vision)), request.request_id, index)
            for index, item in enumerate(request.items)
        ]
        return ready + cluster.dispatch(self.time)


@dataclass(slots=True)
class ItemReady:
    """The pixels of an image are there."""

    time: float
    request_id: int
    index: int

    def handle(self, cluster: Cluster) -> list[Event]:
        cluster.core.on_item_ready(self.request_id, self.index, self.time)
        return cluster.dispatch(self.time)


@dataclass(slots=True)
class EncodeDone:
    """An encoder finished a batch: the embeddings go to stage 0, and its next batch starts."""

    time: float
    encoder: Encoder
    batch: EncodeBatch

    def handle(self, cluster: Cluster) -> list[Event]:
        self.encoder.worker.is_busy = False
        seconds = cluster.cost.embedding_seconds(self.batch.num_tokens, cluster.deployment.tp)
        arrival: Event = EmbeddingsArrived(self.encoder.send(self.time, seconds), self.batch.batch_id)
        return [arrival, *cluster.start_encoder(self.encoder, self.time)]


@dataclass(slots=True)
class EmbeddingsArrived:
    """Stage 0 holds the embeddings of an encode batch."""

    time: float
    batch_id: int

    def handle(self, cluster: Cluster) -> list[Event]:
        cluster.encoded(self.batch_id, self.time)
        return cluster.dispatch(self.time)


@dataclass(slots=True)
class StageEncodeDone:
    """Stage 0 finished an encode batch that it took because it was idle: the embeddings are where they are needed."""

    time: float
    stage: Stage
    batch: EncodeBatch

    def handle(self, cluster: Cluster) -> list[Event]:
        self.stage.worker.is_busy = False
        cluster.encoded(self.batch.batch_id, self.time)
        return cluster.dispatch(self.time)


@dataclass(slots=True)
class StageDone:
    """A stage finished a micro-batch: it goes to the next stage, or back to the driver."""

    time: float
    stage: Stage
    batch: Batch

    def handle(self, cluster: Cluster) -> list[Event]:
        self.stage.worker.is_busy = False
        if self.stage.is_last:
            cluster.finish(self.batch, self.time)
            return cluster.start_stage(self.stage, self.time) + cluster.dispatch(self.time)
        arrival: Event = MicroBatchArrived(
            self.time + cluster.cost.activation_seconds(self.batch.num_tokens),
            cluster.stages[self.stage.index + 1],
            self.batch,
        )
        started = cluster.start_stage(self.stage, self.time)
        return [arrival, *started, *(cluster.dispatch(self.time) if self.stage.index == 0 else [])]


@dataclass(slots=True)
class MicroBatchArrived:
    """Hidden states of a micro-batch reached a later stage."""

    time: float
    stage: Stage
    batch: Batch

    def handle(self, cluster: Cluster) -> list[Event]:
        self.stage.queue.append(self.batch)
        return cluster.start_stage(self.stage, self.time)
