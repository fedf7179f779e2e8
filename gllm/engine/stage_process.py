"""The process of a stage's rank, other than the driver's: a loop for messages, a thread that computes."""

from __future__ import annotations

import os
import traceback
from typing import Any

import zmq

from gllm.config import EngineConfig
from gllm.engine.control import Endpoint, Keys, connect, disconnects
from gllm.engine.messages import (
    Codec,
    Forget,
    Hello,
    MakeCache,
    Message,
    Ping,
    Pong,
    RunStep,
    Shutdown,
    StepDone,
    ToStage,
)
from gllm.errors import StartupError
from gllm.models.registry import model_info
from gllm.worker.layout import Layout
from gllm.worker.process import Compute, settle
from gllm.worker.stage import Done, Stage


def main(
    name: str, address: str, config: dict[str, Any], device: str, cores: list[int], threads: int, rank: int,
    rendezvous: str, colocated: bool, keys: dict[str, str] | None = None,
) -> None:  # fmt: skip
    """The process. It says Hello once its weights are loaded, or why they are not."""
    settle(cores, threads)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoint = Endpoint(address, Keys(**keys) if keys else None)
    socket = connect(context, endpoint, f"{name}.{os.getpid()}")
    codec = Codec(ToStage)

    def say(message: Message) -> None:
        socket.send(codec.encode(message))

    engine = EngineConfig(**config)
    try:
        info = model_info(engine.checkpoint)
        stage = Stage(engine, info, Layout(engine.pp, engine.tp, rank), rendezvous, device, colocated=colocated)
        kv_blocks = stage.num_kv_blocks()
    except StartupError as error:
        say(Hello(name, os.getpid(), str(error)))
        context.term()
        raise SystemExit(1) from None
    say(Hello(name, os.getpid(), None, kv_blocks))
    try:
        compute = Compute(zmq.Context.instance(), name, _crash)
        gone = disconnects(socket, endpoint)
        serve(socket, codec, stage, compute, reports=rank % engine.tp == 0, gone=gone)
    except ConnectionError as error:
        print(f"{name}: {error}", flush=True)
        os._exit(1)
    except Exception:
        traceback.print_exc()
        os._exit(1)


def serve(
    socket: zmq.Socket[bytes], codec: Codec, stage: Stage, compute: Compute, *, reports: bool,
    gone: zmq.Socket[bytes] | None = None,
) -> None:  # fmt: skip
    """Until told to shut down. reports: the first rank of a stage tells the driver of every micro-batch. gone: see
    `disconnects`; raises ConnectionError then."""
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(compute.socket, zmq.POLLIN)
    if gone is not None:
        poller.register(gone, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if gone in ready and socket not in ready:
            raise ConnectionError("the connection to the driver is broken")
        if compute.socket in ready:
            done: Done = compute.take()
            if reports:
                socket.send(codec.encode(StepDone(done.batch_id, done.start, done.end, done.output)))
        if socket not in ready:
            continue
        match codec.decode(socket.recv()):
            case RunStep(step):
                compute.submit(lambda step=step: compute.post(stage.run(step)))
            case Forget(request_ids):
                compute.submit(lambda ids=request_ids: stage.runner.forget(ids))
            case MakeCache(num_blocks):
                compute.submit(lambda count=num_blocks: stage.make_cache(count))
            case Ping():
                socket.send(codec.encode(Pong()))
            case Shutdown():
                return


def _crash(trace: str) -> None:
    print(f"the stage failed:\n{trace}", flush=True)
    os._exit(1)
