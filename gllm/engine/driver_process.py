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

from gllm.config import EngineConfig
from gllm.core.embeddings import EmbeddingPool
from gllm.core.eventlog import Record, Recorder, dump
from gllm.core.policy import FixedBudget, TokenPolicy, TokenThrottling
from gllm.core.readiness import ColocatedEncoder
from gllm.core.scheduler import Scheduler, SchedulerConfig
from gllm.engine.control import Endpoint, Keys, listen
from gllm.engine.driver import API, Driver
from gllm.engine.executor import is_colocated
from gllm.engine.messages import Codec, DriverReady, Hello, Shutdown, ToApi, ToDriver
from gllm.engine.pipeline import Pipeline
from gllm.errors import StartupError
from gllm.models.loader import resolve_dtype
from gllm.models.registry import model_info
from gllm.worker.layout import Layout, other_ranks
from gllm.worker.pixels import PixelFiles, PixelFrames, Pixels
from gllm.worker.process import Compute, settle
from gllm.worker.stage import Stage


def main(
    name: str, address: str, config: dict[str, Any], device: str, cores: list[int], threads: int, rendezvous: str,
    encoders: list[str], embedding_capacity: int, run_dir: str | None = None, keys: dict[str, str] | None = None,
) -> None:  # fmt: skip
    """The process. It sends DriverReady once all workers are up, or Hello with what is wrong. run_dir: None between
    hosts, where payloads travel with messages and `keys` protect these."""
    settle(cores, threads)
    engine = EngineConfig(**config)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = listen(context, Endpoint(address, Keys(**keys) if keys else None))
    deadline = time.monotonic() + engine.startup_timeout
    log_file: IO[str] | None = None
    try:
        log_file = _open_log(engine.event_log) if engine.event_log else None
        folder = Path(run_dir) if run_dir else None
        start = Start(engine, folder, device, rendezvous, encoders, embedding_capacity, socket, log_file)
        driver = start.driver(deadline)
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


class Start:
    """From nothing to a running driver: the stage is loaded, the other workers say hello, then there is a core."""

    def __init__(
        self, config: EngineConfig, run_dir: Path | None, device: str, rendezvous: str, encoders: list[str],
        embedding_capacity: int, socket: zmq.Socket[bytes], log_file: IO[str] | None,
    ) -> None:  # fmt: skip
        """Load stage 0. Raises StartupError."""
        self.config = config
        self.info = model_info(config.checkpoint)
        self.device = device
        self.encoders = encoders
        self.embedding_capacity = embedding_capacity
        self.socket = socket
        self.pixels: Pixels = PixelFiles(run_dir) if run_dir is not None else PixelFrames()
        self.log = (lambda record: _write(log_file, record)) if log_file is not None else None
        # The one place where gLLM looks for its extension: for separate encoders, and to describe a core in a log.
        self.rserve = import_module("rserve.engine") if encoders or log_file is not None else None
        self.receiver, embeddings = None, None
        if encoders:
            dtype = resolve_dtype(config.checkpoint, config.dtype)
            self.receiver, embeddings = self.rserve.make_embeddings(
                run_dir, embedding_capacity, self.info.hidden_size, dtype
            )
        self.embeddings = embeddings
        self.stage = Stage(
            config, self.info, Layout(config.pp, config.tp, 0), rendezvous, device,
            colocated=is_colocated(config, self.info), embeddings=embeddings, pixels=self.pixels,
        )  # fmt: skip

    def driver(self, deadline: float) -> Driver:
        """Once all workers are there: tell the API process. Raises StartupError or TimeoutError."""
        hellos = self._hellos(deadline)
        stages = {name: hello for name, hello in hellos.items() if name not in self.encoders}
        num_blocks = min([self.stage.num_kv_blocks(), *(hello.kv_blocks for _, hello in stages.values())])
        scheduler = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=self.config.page_size,
            max_num_seqs=self.config.max_num_seqs,
            max_in_flight=self.config.pp,
            chunked_pipeline=self.config.chunked_pipeline,
        )
        core = self._core(scheduler)
        identities = {name: identity for name, (identity, _) in stages.items()}
        compute = Compute(zmq.Context.instance(), "stage-0", _crash)
        pipeline = Pipeline(self.stage, compute, self.socket, identities, self.config.heartbeat_timeout)
        pipeline.start(num_blocks, time.monotonic())
        fleet = self._fleet(core, {name: hellos[name] for name in self.encoders})
        driver = Driver(core, pipeline, self.pixels, self.socket, fleet, self.log)
        driver.send(DriverReady(scheduler.num_kv_tokens, self.embedding_capacity))
        return driver

    def _hellos(self, deadline: float) -> dict[str, tuple[bytes, Hello]]:
        """The first words of every other process, by name: (identity, Hello)."""
        waiting = {"api", *(rank.name for rank in other_ranks(self.config)), *self.encoders}
        hellos: dict[str, tuple[bytes, Hello]] = {}
        codec = Codec(ToDriver)
        while waiting:
            if not self.socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
                raise TimeoutError(f"{', '.join(sorted(waiting))} did not start in time")
            identity, data = self.socket.recv_multipart()
            match codec.decode(data):
                case Hello() as hello:
                    if hello.error:
                        raise StartupError(hello.error)
                    waiting.discard(hello.name)
                    hellos[hello.name] = (identity, hello)
                case Shutdown():
                    raise SystemExit(0)
        del hellos["api"]
        return hellos

    def _core(self, scheduler: SchedulerConfig) -> Any:
        policy = make_policy(self.config)
        if self.rserve is None:
            return Scheduler(scheduler, ColocatedEncoder(EmbeddingPool(self.embedding_capacity)), policy)
        config = self.rserve.rserve_config(self.config, torch.device(self.device).type, self.embedding_capacity)
        core, header = self.rserve.make_core(scheduler, policy, config)
        if self.log is not None:
            self.log(header)
            core = Recorder(core, self.log)
        return core

    def _fleet(self, core: Any, hellos: dict[str, tuple[bytes, Hello]]) -> Any:
        if not self.encoders:
            return None
        fleet = self.rserve.EncoderFleet(
            core, self.encoders, self.receiver, self.embeddings, self.pixels, self.socket,
            self.config.heartbeat_timeout, self.log,
        )  # fmt: skip
        for identity, hello in hellos.values():
            fleet.on_hello(identity, hello)
        return fleet


def make_policy(config: EngineConfig) -> TokenPolicy:
    """How the token budget is spent."""
    if config.schedule_method == "chunked_prefill":
        return FixedBudget(config.max_num_batched_tokens, config.maxd)
    defaults = TokenThrottling(config.max_num_batched_tokens)
    return TokenThrottling(
        max_prefill=config.max_num_batched_tokens,
        min_prefill=config.minp or defaults.min_prefill,
        num_iterations=config.iterp or defaults.num_iterations,
        kv_threshold=defaults.kv_threshold if config.kvthresh is None else config.kvthresh,
        max_decodes=config.maxd,
    )


def _open_log(path: str) -> IO[str]:
    """The log of an earlier run, or of this one before the driver was lost, is kept as PATH.1. Raises StartupError."""
    try:
        if Path(path).is_file():
            Path(path).replace(f"{path}.1")
        return open(path, "w")
    except OSError as error:
        raise StartupError(f"--event-log {path} cannot be written: {error.strerror}") from None


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
