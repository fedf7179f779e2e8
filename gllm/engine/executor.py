"""Starts the worker processes, watches them, restarts encoders, and ends everything. Lives in the API process."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from gllm.config import EngineConfig, ModelInfo, usable_cores
from gllm.engine.placement import place
from gllm.errors import StartupError
from gllm.worker.launcher import Exited, Kill, Lines, Start, Started
from gllm.worker.layout import other_ranks

logger = logging.getLogger(__name__)

DRIVER = "driver"
EMBEDDING_CAPACITY = 65536  # item tokens, where there is memory for them
PIXEL_BYTES = 256 << 20  # what the run directory should hold besides embeddings
SHARED_MEMORY = Path("/dev/shm")
MAX_RESTARTS = 3  # of one encoder within RESTART_SECONDS
RESTART_SECONDS = 60.0
END_SECONDS = 12.0  # the launcher's own bounds are shorter


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a run lives, and how much of it embeddings take."""

    run_dir: Path
    embedding_capacity: int

    @property
    def address(self) -> str:
        return f"ipc://{self.run_dir}/driver"


def make_layout(config: EngineConfig, info: ModelInfo, itemsize: int) -> Layout:
    """A private run directory in shared memory, or on disk where that is too small; and the embedding capacity."""
    row = info.hidden_size * itemsize if config.num_encoders else 0
    wanted = config.embedding_capacity or EMBEDDING_CAPACITY
    where = SHARED_MEMORY
    if not (where.is_dir() and os.access(where, os.W_OK)) or _free(where) < min(wanted, 16384) * row + PIXEL_BYTES:
        where = Path(tempfile.gettempdir())
        logger.warning("too little shared memory in %s: pixels and embeddings go through %s", SHARED_MEMORY, where)
    if config.embedding_capacity is None and row:
        wanted = max(1, min(wanted, (_free(where) - PIXEL_BYTES) // 2 // row))
    return Layout(Path(tempfile.mkdtemp(prefix="gllm-", dir=where)), wanted)  # mode 0700


def _free(path: Path) -> int:
    return shutil.disk_usage(path).free


class Executor:
    """colocated: stage 0 encodes. on_lost(name, is_final): called on the event loop when a worker has ended; is_final:
    it is not started again by itself."""

    def __init__(
        self, config: EngineConfig, device: str, layout: Layout, colocated: bool, on_lost: Callable[[str, bool], None]
    ) -> None:
        self._config = config
        self._colocated = colocated
        self._device = device
        self._layout = layout
        self._on_lost = on_lost
        self._specs: dict[str, Start] = {}
        self._pids: dict[str, int] = {}
        self._restarts: dict[str, list[float]] = {}
        self._launcher: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lines = Lines(Started | Exited)
        self._closing = False

    @property
    def encoder_names(self) -> list[str]:
        return [f"encoder {index}" for index in range(self._config.num_encoders)]

    def start(self, hidden_size: int) -> None:
        """Start the launcher and through it all workers. Returns at once; they report to the driver."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "gllm.worker.launcher", str(theirs.fileno()), str(self._layout.run_dir)]
        # A session of its own: Ctrl-C at a terminal reaches only this process, which then ends the others in order.
        self._launcher = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True, env=_environment()
        )
        theirs.close()
        ours.setblocking(False)
        self._socket = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._on_readable)
        for spec in self._worker_specs(hidden_size):
            self._specs[spec.name] = spec
            self._tell(spec)

    def kill(self, name: str) -> None:
        """End a worker that hangs."""
        self._tell(Kill(name, signal.SIGKILL))

    def pid(self, name: str) -> int | None:
        """The process id of a worker that runs."""
        return self._pids.get(name)

    async def close(self) -> None:
        """End all workers and the launcher, and wait for it; the run directory is gone afterwards."""
        self._closing = True
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()  # which tells the launcher to end
            self._socket = None
        if self._launcher is not None:
            try:
                await asyncio.to_thread(self._launcher.wait, END_SECONDS)
            except subprocess.TimeoutExpired:
                self._launcher.kill()
                await asyncio.to_thread(self._launcher.wait)
        shutil.rmtree(self._layout.run_dir, ignore_errors=True)

    # ---- inside -------------------------------------------------------------------------------------------------

    def _worker_specs(self, hidden_size: int) -> list[Start]:
        config = self._config
        placement = place(config, usable_cores())
        devices = assign_devices(config, self._device)
        common = {"address": self._layout.address, "config": dataclasses.asdict(config)}
        ranks = {"rendezvous": f"file://{self._layout.run_dir}/rendezvous"}
        capacity, run_dir = self._layout.embedding_capacity, str(self._layout.run_dir)
        more = {"run_dir": run_dir, "encoders": self.encoder_names, "embedding_capacity": capacity}
        seats = [
            {"cores": list(seat.cores), "threads": seat.threads} for seat in (*placement.stages, *placement.encoders)
        ]
        each = [common | seat | {"device": device} for seat, device in zip(seats, devices, strict=True)]
        specs = [Start(DRIVER, "gllm.engine.driver_process:main", each[0] | ranks | more | {"name": DRIVER})]
        for layout in other_ranks(config):
            own = {"name": layout.name, "rank": layout.rank, "colocated": self._colocated}
            specs.append(Start(layout.name, "gllm.engine.stage_process:main", each[layout.rank] | ranks | own))
        for name, kwargs in zip(self.encoder_names, each[config.pp * config.tp :], strict=True):
            rserve = import_module("rserve.engine")
            own = {"name": name, "run_dir": run_dir, "arena": rserve.ARENA, "arena_rows": capacity}
            specs.append(Start(name, rserve.ENCODER, kwargs | own | {"hidden": hidden_size}))
        return specs

    def _tell(self, message: Start | Kill) -> None:
        if self._socket is not None:
            self._socket.sendall(Lines.encode(message))

    def _on_readable(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._on_launcher_lost()
            return
        for message in self._lines.feed(data):
            if isinstance(message, Started):
                self._pids[message.name] = message.pid
            else:
                self._on_exit(message)

    def _on_launcher_lost(self) -> None:
        """It ends its workers with it."""
        assert self._socket is not None
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._pids.clear()
        if not self._closing:
            logger.error("the launcher has ended, and all workers with it")
            self._on_lost(DRIVER, True)

    def _on_exit(self, message: Exited) -> None:
        self._pids.pop(message.name, None)
        if self._closing:
            return
        logger.error("%s (pid %d) ended with status %d", message.name, message.pid, message.status)
        restart = message.name in self.encoder_names and self._may_restart(message.name)
        self._on_lost(message.name, not restart)
        if restart:
            self._tell(self._specs[message.name])

    def _may_restart(self, name: str) -> bool:
        now = time.monotonic()
        recent = [at for at in self._restarts.get(name, []) if now - at < RESTART_SECONDS]
        self._restarts[name] = [*recent, now]
        return len(recent) < MAX_RESTARTS


def _environment() -> dict[str, str]:
    """Workers set their thread counts themselves; OpenMP threads that spin between products would eat a shared core."""
    quiet = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "GLOO_SOCKET_IFNAME": "lo"}
    return quiet | os.environ | {"PYTHONUNBUFFERED": "1"}


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
