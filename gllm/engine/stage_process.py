"""The process of a stage's rank, other than the driver's: a loop for messages, a thread that computes."""

from __future__ import annotations

from typing import Any

from gllm.config import EngineConfig
from gllm.engine.driver_link import DriverLink
from gllm.engine.messages import Forget, MakeCache, RunStep, StepDone, ToStage
from gllm.models.registry import model_info
from gllm.worker.layout import Layout
from gllm.worker.process import settle
from gllm.worker.stage import Done, Stage


def main(
    name: str, address: str, config: dict[str, Any], device: str, cores: list[int], threads: int, rank: int,
    rendezvous: str, colocated: bool, keys: dict[str, str] | None = None,
) -> None:  # fmt: skip
    """The process. It says Hello once its weights are loaded, or why they are not. The first rank of a stage tells the
    driver of every micro-batch."""
    settle(cores, threads)
    link = DriverLink(name, address, keys, ToStage)
    engine = EngineConfig(**config)
    with link.loading():
        info = model_info(engine.checkpoint)
        stage = Stage(engine, info, Layout(engine.pp, engine.tp, rank), rendezvous, device, colocated=colocated)
        kv_blocks = stage.num_kv_blocks()
    link.hello(kv_blocks)
    compute = link.compute()

    def on_message(message: Any, frames: list[Any]) -> None:
        match message:
            case RunStep(step):
                compute.submit(lambda: compute.post(stage.run(step)))
            case Forget(request_ids):
                compute.submit(lambda: stage.runner.forget(request_ids))
            case MakeCache(num_blocks):
                compute.submit(lambda: stage.make_cache(num_blocks))

    def on_result(done: Done) -> None:
        if rank % engine.tp == 0:
            link.send(StepDone(done.batch_id, done.start, done.end, done.output))

    link.serve(compute, on_message, on_result)
