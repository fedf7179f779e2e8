"""Workers as processes of this host, forked by a launcher (`gllm.worker.launcher`). Lives in the API process."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from gllm.config import EngineConfig, ModelInfo, usable_cores
from gllm.engine.control import Endpoint
from gllm.engine.executor import DRIVER, EMBEDDING_CAPACITY, OnLost, Restarts, encoder_names
from gllm.engine.launcher_link import LauncherLink
from gllm.engine.pixel_outlet import FileOutlet
from gllm.engine.placement import place
from gllm.engine.run_dir import RunDir
from gllm.engine.specs import worker_specs
from gllm.errors import StartupError
from gllm.models.config import read_json
from gllm.models.registry import dtype_name
from gllm.worker.environment import QUIET
from gllm.worker.launcher import Exited, Kill, Start, Started

logger = logging.getLogger(__name__)

PIXEL_BYTES = 256 << 20  # what the run directory should hold besides embeddings
SHARED_MEMORY = Path("/dev/shm")
ITEMSIZE = {"float32": 4, "bfloat16": 2}
END_SECONDS = 12.0  # the launcher's own bounds are shorter


class MpExecutor:
    """An `Executor`: payloads go through shared memory in a private run directory, control messages through a socket
    there."""

    def __init__(self, config: EngineConfig, info: ModelInfo, on_lost: OnLost) -> None:
        """Makes the run directory."""
        self._config = config
        self._info = info
        self._on_lost = on_lost
        where, self._embedding_capacity = _memory(config, info)
        self._run = RunDir(where)
        self.run_dir = self._run.path
        self.outlet = FileOutlet(self.run_dir)
        self._link: LauncherLink | None = None
        self._specs: dict[str, Start] = {}
        self._pids: dict[str, int] = {}
        self._restarts = Restarts()
        self._closing = False

    async def start(self) -> Endpoint:
        endpoint = Endpoint(f"ipc://{self.run_dir}/driver")
        device = await asyncio.to_thread(resolve_device, self._config.device)
        seats = place(self._config, usable_cores(), self._config.pp * self._config.tp, self._config.num_encoders)
        specs = worker_specs(
            self._config, self._info, endpoint, f"file://{self.run_dir}/rendezvous", seats,
            assign_devices(self._config, device), self._embedding_capacity, str(self.run_dir),
        )  # fmt: skip
        self._specs = {spec.name: spec for spec in specs}
        self._link = LauncherLink(
            "gllm.worker.launcher", [str(self.run_dir)], Started | Exited, self._on_message, self._on_launcher_lost,
            # Processes of one host need no other interface; whoever sets one of these knows better.
            environment={**QUIET, "GLOO_SOCKET_IFNAME": "lo"} | os.environ | {"PYTHONUNBUFFERED": "1"},
            pass_fds=[self._run.lock],
        )  # fmt: skip
        for spec in self._specs.values():
            self._link.tell(spec)
        return endpoint

    def kill(self, name: str) -> None:
        if self._link is not None:
            self._link.tell(Kill(name, signal.SIGKILL))

    def pid(self, name: str) -> int | None:
        return self._pids.get(name)

    async def close(self) -> None:
        self._closing = True
        if self._link is not None:
            # A launcher that has not come as far as its first worker has nothing to end in order, and is deaf still.
            await self._link.close(END_SECONDS if self._pids else 0.0)
            self._link = None
        self._run.remove()

    # ---- inside -------------------------------------------------------------------------------------------------

    def _on_message(self, message: Started | Exited) -> None:
        if isinstance(message, Started):
            self._pids[message.name] = message.pid
            return
        self._pids.pop(message.name, None)
        if self._closing:
            return
        name = message.name
        logger.error("%s (pid %d) ended with %s", name, message.pid, message.how)
        restart = name in encoder_names(self._config) and self._restarts.allow(name)
        self._on_lost(name, not restart)
        if restart and self._link is not None:
            self._link.tell(self._specs[name])

    def _on_launcher_lost(self) -> None:
        """It ends its workers with it."""
        self._pids.clear()
        if not self._closing:
            logger.error("the launcher has ended, and all workers with it")
            self._on_lost(DRIVER, True)


def _memory(config: EngineConfig, info: ModelInfo) -> tuple[Path, int]:
    """Where the run directory goes: shared memory, or a disk where that is too small; and the embedding capacity."""
    itemsize = ITEMSIZE[dtype_name(read_json(config.checkpoint, "config.json"), config.dtype)]
    row = info.hidden_size * itemsize if config.num_encoders else 0
    wanted = config.embedding_capacity or EMBEDDING_CAPACITY
    where = SHARED_MEMORY
    if not (where.is_dir() and os.access(where, os.W_OK)) or _free(where) < min(wanted, 16384) * row + PIXEL_BYTES:
        where = Path(tempfile.gettempdir())
        logger.warning("too little shared memory in %s: pixels and embeddings go through %s", SHARED_MEMORY, where)
    if config.embedding_capacity is None and row:
        wanted = max(1, min(wanted, (_free(where) - PIXEL_BYTES) // 2 // row))
    return where, wanted


def _free(path: Path) -> int:
    return shutil.disk_usage(path).free


def assign_devices(config: EngineConfig, device: str) -> list[str]:
    """The device of every rank, then of every encoder. Raises StartupError when there are not enough GPUs."""
    num_workers = config.pp * config.tp + config.num_encoders
    if device == "cpu":
        return ["cpu"] * num_workers
    import torch

    count = torch.cuda.device_count()  # asks the driver library: CUDA stays uninitialised here
    if count == 1 and config.pp * config.tp == 1:
        return ["cuda:0"] * num_workers  # one GPU: the encoders share it with the LLM
    if num_workers > count:
        raise StartupError(
            f"--pp {config.pp} x --tp {config.tp} and {config.num_encoders} encoders need {num_workers} GPUs, there "
            f"are {count}: lower --pp, --tp or --encoders"
        )
    return [f"cuda:{index}" for index in range(num_workers)]


def resolve_device(device: str) -> str:
    """cpu or cuda. Raises StartupError when CUDA is asked for and not there. Loads torch only if need be."""
    if device == "cpu" or (device == "auto" and not Path("/dev/nvidiactl").exists()):
        return "cpu"
    # Asked in a process of its own: CUDA must not be initialised in one that forks.
    code = "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 3)"
    found = subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    if not found and device == "cuda":
        raise StartupError("--device cuda: torch finds no CUDA device; use --device cpu")
    return "cuda" if found else "cpu"
