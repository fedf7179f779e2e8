"""Who starts the workers, watches them and ends them: the seam between the engine and where its processes run."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Protocol

from gllm.config import EngineConfig, ModelInfo
from gllm.engine.control import Endpoint
from gllm.engine.pixel_outlet import PixelOutlet

DRIVER = "driver"
EMBEDDING_CAPACITY = 65536  # item tokens, where there is memory for them
MAX_RESTARTS = 3  # of one encoder within RESTART_SECONDS
RESTART_SECONDS = 60.0

OnLost = Callable[[str, bool], None]
"""on_lost(name, is_final): called on the event loop when a worker has ended; is_final: it is not started again."""

BACKENDS = {"mp": "gllm.engine.mp_executor:MpExecutor", "ray": "gllm.engine.ray_executor:RayExecutor"}


class Executor(Protocol):
    """Starts all workers once; encoders that end are started again. Used on one event loop."""

    outlet: PixelOutlet

    async def start(self) -> Endpoint:
        """Start all workers; they report to the driver, which listens there. Raises StartupError."""
        ...

    def kill(self, name: str) -> None:
        """End a worker that hangs."""
        ...

    def pid(self, name: str) -> int | None:
        """The process id of a worker that runs, on its host."""
        ...

    async def close(self) -> None:
        """End all workers and wait for that; nothing of them is left. Also after a start that failed or was cut off."""
        ...


def make_executor(config: EngineConfig, info: ModelInfo, on_lost: OnLost) -> Executor:
    """As --distributed-executor-backend says; a backend's module is loaded only when it is chosen."""
    module, _, name = BACKENDS[config.distributed_executor_backend].partition(":")
    executor: Executor = getattr(import_module(module), name)(config, info, on_lost)
    return executor


def encoder_names(config: EngineConfig) -> list[str]:
    return [f"encoder {index}" for index in range(config.num_encoders)]


def is_colocated(config: EngineConfig, info: ModelInfo) -> bool:
    """Items are encoded in stage 0."""
    return not config.num_encoders and info.image_token_id is not None


class Restarts:
    """How often each encoder was started again of late."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = {}

    def allow(self, name: str) -> bool:
        """Whether it may be started once more; counts it."""
        now = time.monotonic()
        recent = [at for at in self._times.get(name, []) if now - at < RESTART_SECONDS]
        self._times[name] = [*recent, now]
        return len(recent) < MAX_RESTARTS
