"""Workers as actors of a Ray cluster, on one machine or several. Ray places, starts, watches and ends them; control
messages and payloads go through authenticated sockets, hidden states through torch.distributed."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import logging
import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gllm.config import EngineConfig, ModelInfo
from gllm.engine.control import Endpoint, Keys
from gllm.engine.executor import DRIVER, EMBEDDING_CAPACITY, OnLost, Restarts, encoder_names
from gllm.engine.launcher_link import LauncherLink
from gllm.engine.pixel_outlet import FrameOutlet
from gllm.engine.placement import Seat, place
from gllm.engine.ray_messages import End, Failed, Joined, Report, Reserve, Seated, TakeSeat
from gllm.engine.specs import worker_names, worker_specs
from gllm.errors import StartupError

if TYPE_CHECKING:
    from gllm.worker.launcher import Exited, Start

logger = logging.getLogger(__name__)

END_SECONDS = 12.0  # the launcher's own bounds are shorter
ROOM_SECONDS = 45.0  # a cluster that has lost a machine needs a while to notice


class RayExecutor:
    """An `Executor`. The run's keys are made here and go to the workers through Ray, and nowhere else."""

    def __init__(self, config: EngineConfig, info: ModelInfo, on_lost: OnLost) -> None:
        """Raises StartupError when Ray is not installed."""
        if importlib.util.find_spec("ray") is None:
            raise StartupError("--distributed-executor-backend ray needs the package ray: pip install 'rserve[ray]'")
        self.outlet = FrameOutlet()
        # Workers have other working directories.
        paths = {"model_path": config.model_path, "event_log": config.event_log}
        self._config = dataclasses.replace(config, **{k: str(Path(v).absolute()) for k, v in paths.items() if v})
        self._info = info
        self._on_lost = on_lost
        self._names = worker_names(config)
        self._keys = Keys.make()
        self._device = "cpu"
        self._link: LauncherLink | None = None
        self._seats: dict[str, Seated] = {}
        self._restarts = Restarts()
        self._joined: asyncio.Future[Joined] = asyncio.get_running_loop().create_future()
        self._seated: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._started = False
        self._closing = False

    async def start(self) -> Endpoint:
        self._link = LauncherLink(
            "gllm.engine.ray_launcher", [str(len(self._names))], Report, self._on_message, self._on_launcher_lost,
            environment=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            async with asyncio.timeout(self._config.startup_timeout):
                joined = await self._joined
                self._device = choose_device(self._config, joined.resources, len(self._names))
                bundles = make_bundles(self._config, self._device)
                check_room(bundles, joined.resources)
                self._link.tell(Reserve(bundles, self._config.ray_placement.upper(), ROOM_SECONDS))
                for index, name in enumerate(self._names):
                    self._link.tell(TakeSeat(name, index))
                await self._seated
        except TimeoutError:
            seconds = self._config.startup_timeout
            raise StartupError(f"Ray started no workers in {seconds:g} seconds: raise --startup-timeout") from None
        self._started = True
        for spec in self._specs().values():
            self._link.tell(spec)
        logger.info("workers run on: %s", ", ".join(f"{s.name} {s.address} (pid {s.pid})" for s in self._in_order()))
        return Endpoint(self._endpoint().address, self._keys.of_client())

    def kill(self, name: str) -> None:
        if self._link is not None:
            self._link.tell(End(name))

    def pid(self, name: str) -> int | None:
        seat = self._seats.get(name)
        return seat.pid if seat is not None else None

    async def close(self) -> None:
        self._closing = True
        for future in (self._joined, self._seated):
            future.cancel()
        if self._link is not None:
            for name in self._names[1:]:
                self._link.tell(End(name))  # the driver ends by itself, and its event log with it
            await self._link.close(END_SECONDS)
            self._link = None

    # ---- inside -------------------------------------------------------------------------------------------------

    def _in_order(self) -> list[Seated]:
        return [self._seats[name] for name in self._names if name in self._seats]

    def _endpoint(self) -> Endpoint:
        driver = self._seats[DRIVER]
        return Endpoint(f"tcp://{driver.address}:{driver.ports[0]}", self._keys)

    def _specs(self) -> dict[str, Start]:
        driver = self._seats[DRIVER]
        rendezvous = f"tcp://{driver.address}:{driver.ports[1]}"
        devices = ["cuda:0" if self._device == "cuda" else "cpu"] * len(self._names)  # Ray shows each its own GPU only
        specs = worker_specs(
            self._config, self._info, self._endpoint(), rendezvous, self._share_cores(), devices,
            self._config.embedding_capacity or EMBEDDING_CAPACITY,
        )  # fmt: skip
        return {spec.name: spec for spec in specs}

    def _share_cores(self) -> list[Seat]:
        """In the order of names: every node's cores among the workers on it."""
        num_ranks, nodes = self._config.pp * self._config.tp, defaultdict[str, list[str]](list)
        for name in self._names:
            nodes[self._seats[name].address].append(name)
        shares: dict[str, Seat] = {}
        for names in nodes.values():
            ranks = sum(self._names.index(name) < num_ranks for name in names)
            cores = self._seats[names[0]].cores
            shares |= zip(names, place(self._config, cores, ranks, len(names) - ranks), strict=True)
        return [shares[name] for name in self._names]

    def _on_message(self, message: Any) -> None:
        match message:
            case Joined():
                _settle(self._joined, message)
            case Failed(error):
                self._fail(error)
            case Seated():
                self._on_seated(message)
            case _:
                self._on_exit(message)

    def _on_seated(self, message: Seated) -> None:
        self._seats[message.name] = message
        if self._started and self._link is not None:
            self._link.tell(self._specs()[message.name])  # an encoder that is started again
        elif len(self._seats) == len(self._names):
            _settle(self._seated, None)

    def _on_exit(self, message: Exited) -> None:
        name = message.name
        if self._closing:
            return
        if not self._started:
            self._fail(f"Ray could not start {name}: {message.how}")
            return
        logger.error("%s (pid %d) ended with %s", name, message.pid, message.how)
        restart = name in encoder_names(self._config) and self._restarts.allow(name)
        self._on_lost(name, not restart)
        if restart and self._link is not None:
            self._link.tell(TakeSeat(name, self._names.index(name)))

    def _on_launcher_lost(self) -> None:
        """All actors end with it."""
        self._link, link = None, self._link
        if self._closing or link is None:
            return
        if self._started:
            logger.error("the process that is connected to Ray has ended, and all workers with it")
            self._on_lost(DRIVER, True)
        else:
            self._fail("the process that joins the Ray cluster has ended: the log says why")

    def _fail(self, error: str) -> None:
        for future in (self._joined, self._seated):
            if not future.done():
                future.set_exception(StartupError(error))
                future.exception()  # seen, should nobody come to await it


def _settle(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def choose_device(config: EngineConfig, resources: dict[str, float], num_workers: int) -> str:
    """cpu or cuda, by what the cluster has. Raises StartupError."""
    gpus = int(resources.get("GPU", 0))
    if config.device == "cpu" or (config.device == "auto" and not gpus):
        return "cpu"
    if gpus < num_workers:
        raise StartupError(
            f"--pp {config.pp} x --tp {config.tp} and {config.num_encoders} encoders need {num_workers} GPUs, the Ray "
            f"cluster has {gpus}: lower --pp, --tp or --encoders, or use --device cpu"
        )
    return "cuda"


def make_bundles(config: EngineConfig, device: str) -> list[dict[str, float]]:
    """What every worker takes, in the order of names: a CPU for each thread that is asked for, one at least."""
    threads = [config.llm_threads or 1] * (config.pp * config.tp) + [config.encoder_threads or 1] * config.num_encoders
    gpu = {"GPU": 1.0} if device == "cuda" else {}
    return [{"CPU": float(count), **gpu} for count in threads]


def check_room(bundles: list[dict[str, float]], resources: dict[str, float]) -> None:
    """Raises StartupError when the whole cluster is too small."""
    wanted = sum(bundle["CPU"] for bundle in bundles)
    if wanted > resources.get("CPU", 0):
        raise StartupError(
            f"{len(bundles)} workers need {wanted:g} CPUs, the Ray cluster has {resources.get('CPU', 0):g}: lower "
            "--pp, --tp, --encoders, --llm-threads or --encoder-threads, or add machines"
        )
