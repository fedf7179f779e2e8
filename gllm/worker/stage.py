"""A stage's runner on its compute thread, as the driver's loop sees it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from gllm.worker.process import Compute
from gllm.worker.runner import StageRunner
from gllm.worker.step import StepInput, StepOutput


@dataclass(frozen=True, slots=True)
class Fed:
    """All embeddings of a micro-batch have been gathered."""

    batch_id: int


@dataclass(frozen=True, slots=True)
class Done:
    """A micro-batch has left the stage. start, end: seconds on the monotonic clock. failures: requests of which an
    item could not be used, and why."""

    output: StepOutput
    start: float
    end: float
    failures: dict[int, str]


class LocalStage:
    """The whole model in this process (one stage)."""

    def __init__(self, runner: StageRunner, compute: Compute) -> None:
        self._runner = runner
        self.compute = compute

    def submit(self, step: StepInput) -> None:
        self.compute.submit(lambda: self._run(step))

    def forget(self, request_ids: tuple[int, ...]) -> None:
        """These requests are gone, and no micro-batch will say so soon."""
        self.compute.submit(lambda: self._runner.forget(request_ids))

    def call(self, job: Callable[[], None]) -> None:
        """Run something else between micro-batches."""
        self.compute.submit(job)

    def _run(self, step: StepInput) -> None:
        start = time.monotonic()
        batch_id = step.batch.batch_id
        output = self._runner.execute(step, on_fed=lambda: self.compute.post(Fed(batch_id)))
        assert isinstance(output, StepOutput)
        self.compute.post(Done(output, start, time.monotonic(), self._runner.take_failures()))
