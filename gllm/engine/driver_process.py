"""The driver worker's process: loads stage 0, makes the core, and runs the loop."""

from __future__ import annotations

import os
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import torch
import zmq

from gllm.config import EngineConfig, ModelInfo
from gllm.core.embeddings import EmbeddingPool
from gllm.core.eventlog import Record, Recorder, dump
from gllm.core.policy import FixedBudget
from gllm.core.readiness import ColocatedEncoder
from gllm.core.scheduler import Scheduler, SchedulerConfig
from gllm.engine.driver import API, Driver
from gllm.engine.messages import Codec, DriverReady, Hello, ToApi
from gllm.errors import StartupError
from gllm.models.loader import resolve_dtype
from gllm.models.registry import model_info
from gllm.worker.kv_cache import KVCache, KVShape
from gllm.worker.pixels import PixelFiles
from gllm.worker.process import Compute, settle
from gllm.worker.runner import StageRunner
from gllm.worker.stage import LocalStage

CPU_KV_BYTES = 512 << 20


def main(
    name: str, address: str, run_dir: str, config: dict[str, Any], device: str, cores: list[int], threads: int,
    encoders: list[str], embedding_capacity: int,
) -> None:  # fmt: skip
    """The process. It sends DriverReady once all workers are up, or Hello with what is wrong."""
    settle(cores, threads)
    engine = EngineConfig(**config)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(address)
    deadline = time.monotonic() + engine.startup_timeout
    log_file = open(engine.event_log, "w") if engine.event_log else None  # noqa: SIM115 (lives as long as the process)
    try:
        driver, ready = build(engine, name, Path(run_dir), device, encoders, embedding_capacity, socket, log_file)
        driver.wait_for_workers(ready, deadline)
    except (StartupError, TimeoutError) as error:
        _say_why(socket, name, str(error), deadline)
        raise SystemExit(1) from None
    try:
        driver.run()
    except Exception:
        traceback.print_exc()
        os._exit(1)
    finally:
        if log_file is not None:
            log_file.close()


def build(
    config: EngineConfig, name: str, run_dir: Path, device: str, encoders: list[str], embedding_capacity: int,
    socket: zmq.Socket[bytes], log_file: IO[str] | None,
) -> tuple[Driver, DriverReady]:  # fmt: skip
    """Load the stage, make the core. Raises StartupError."""
    info = model_info(config.checkpoint)
    pixels = PixelFiles(run_dir)
    log = (lambda record: _write(log_file, record)) if log_file is not None else None
    colocated = not encoders and info.image_token_id is not None
    runner = StageRunner.build(
        config.checkpoint, num_blocks=1, page_size=config.page_size, dtype=config.dtype, device=device,
        load_format=config.load_format, seed=config.seed, attention=config.attention_backend, with_vision=colocated, pixels=pixels,
        eos_token_ids=info.eos_token_ids,
    )  # fmt: skip
    scheduler = SchedulerConfig(
        num_blocks=num_kv_blocks(config, info, runner.cache.shape, device),
        block_size=config.page_size,
        max_num_seqs=config.max_num_seqs,
    )
    runner.cache = KVCache(runner.cache.shape, scheduler.num_blocks, torch.device(device))
    policy = FixedBudget(config.max_num_batched_tokens)
    core: Any = Scheduler(scheduler, ColocatedEncoder(EmbeddingPool(embedding_capacity)), policy)
    header: Record = {}
    if encoders or log is not None:
        # The one place where gLLM looks for its extension: separate encoders (and the description of a core in a log).
        rserve = import_module("rserve.engine")
        core, header = rserve.make_core(scheduler, policy, rserve.rserve_config(config, device, embedding_capacity))
    if log is not None:
        log(header)
        core = Recorder(core, log)
    fleet = None
    if encoders:
        fleet, runner.embeddings = rserve.make_encoders(
            core, encoders, run_dir, pixels, socket, capacity=embedding_capacity, hidden=info.hidden_size,
            dtype=resolve_dtype(config.checkpoint, config.dtype), heartbeat_timeout=config.heartbeat_timeout, log=log,
        )  # fmt: skip
    stage = LocalStage(runner, Compute(zmq.Context.instance(), name, _crash))
    ready = DriverReady(scheduler.num_kv_tokens, embedding_capacity)
    return Driver(core, stage, pixels, socket, fleet, log), ready


def num_kv_blocks(config: EngineConfig, info: ModelInfo, shape: KVShape, device: str) -> int:
    """KV blocks by the configuration, or by memory; never more than all sequences at full length could fill. Weights
    must be loaded: what is left is measured."""
    if config.num_kv_blocks:
        return config.num_kv_blocks
    num_bytes = config.kv_cache_memory_bytes or _kv_bytes(config, device)
    length = min(config.max_model_len or info.context_length, info.context_length)
    useful = config.max_num_seqs * -(-length // config.page_size)
    blocks = min(shape.num_blocks_for(num_bytes), useful)
    if blocks < 1:
        raise StartupError(f"{num_bytes:,} bytes for KV hold no block of {shape.bytes_per_block:,} bytes")
    return blocks


def _kv_bytes(config: EngineConfig, device: str) -> int:
    """What is left of the GPU's share, less room for activations."""
    if device == "cpu":
        return CPU_KV_BYTES
    free, total = torch.cuda.mem_get_info()
    return int(config.gpu_memory_utilization * total) - (total - free) - (2 << 30)


def _write(file: IO[str], record: Record) -> None:
    file.write(dump(record) + "\n")
    if record["e"] in ("core", "on_batch_done", "on_abort"):
        file.flush()  # at every step, so that a log of a server that is killed is nearly whole


def _crash(trace: str) -> None:
    print(f"the stage failed:\n{trace}", flush=True)
    os._exit(1)


def _say_why(socket: zmq.Socket[bytes], name: str, error: str, deadline: float) -> None:
    """The API process may not have connected yet: wait for its first message."""
    while time.monotonic() < deadline and socket.poll(max(1, int((deadline - time.monotonic()) * 1000))):
        identity, _ = socket.recv_multipart()
        if identity == API:
            break
    socket.send_multipart([API, Codec(ToApi).encode(Hello(name, os.getpid(), error))])
    socket.close()
    socket.context.term()
