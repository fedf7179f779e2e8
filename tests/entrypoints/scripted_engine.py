"""An engine that does what a test tells it to: for what the real one cannot be made to do on demand (an error in the
middle of a stream, an overload, a client that leaves at an exact moment)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from gllm.config import EngineConfig
from gllm.entrypoints.api_server import HttpServer, bind
from gllm.entrypoints.app import Service
from gllm.entrypoints.server_config import ServerConfig
from gllm.outputs import Delta
from gllm.sampling_params import SamplingParams

HELLO = (Delta("Hel", (1,)), Delta("lo", (2, 3)), Delta("", (4,), finish_reason="stop"))


@dataclass
class Health:
    ok: bool = True
    workers: dict[str, str] = field(default_factory=lambda: {"driver": "ok"})


class Processor:
    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine

    def chat(self, messages: list[dict[str, Any]], *template: Any) -> Any:
        self._engine.prepare()
        self._engine.template = template
        return messages

    def completion(self, prompt: Any) -> Any:
        self._engine.prepare()
        return prompt


class Stream:
    prompt_token_ids = (7, 8, 9)
    num_item_tokens = 2

    def __init__(self, script: tuple[Any, ...]) -> None:
        self._script = iter(script)
        self.reached = 0
        self.waiting = asyncio.Event()
        self.closed = asyncio.Event()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        for step in self._script:
            self.reached += 1
            if isinstance(step, Delta):
                return step
            if isinstance(step, BaseException):
                raise step
            self.waiting.set()
            await step.wait()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.closed.set()


class ScriptedEngine:
    """script: what a stream does, in order: a Delta is given, an exception raised, an Event waited for."""

    max_model_len = 128

    def __init__(self, *script: Any, admit: Exception | asyncio.Event | None = None) -> None:
        self.script = script or HELLO
        self.admit = admit
        self.processor = Processor(self)
        self.streams: list[Stream] = []
        self.params: list[SamplingParams] = []
        self.template: tuple[Any, ...] = ()
        self.submitting = asyncio.Event()
        self.submit_cancelled = asyncio.Event()
        self.answer = Health()
        self.gauges = {"requests_running": 1.0}
        self.prepare: Callable[[], None] = lambda: None

    async def submit(self, prompt: Any, params: SamplingParams) -> Stream:
        self.submitting.set()
        if isinstance(self.admit, Exception):
            raise self.admit
        if self.admit is not None:
            try:
                await self.admit.wait()
            except asyncio.CancelledError:
                self.submit_cancelled.set()
                raise
        self.params.append(params)
        self.streams.append(Stream(self.script))
        return self.streams[-1]

    async def health(self) -> Health:
        return self.answer

    async def stats(self) -> dict[str, float]:
        return self.gauges


@dataclass
class Running:
    url: str
    port: int
    service: Service
    stop: asyncio.Event
    done: asyncio.Task[None]


@contextlib.asynccontextmanager
async def running(engine: ScriptedEngine, **options: Any) -> AsyncIterator[Running]:
    """The real HTTP server in front of a scripted engine, in this event loop. max_requests: the admission limit."""
    max_requests = options.pop("max_requests", EngineConfig().max_queued_requests)
    config = ServerConfig(port=0, served_model_name=("m", "n"), **options)
    service = Service(engine, config, config.served_model_name, max_requests, {"temperature": 0.25})  # type: ignore[arg-type]
    stop = asyncio.Event()
    with contextlib.closing(bind(config.host, 0)) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        done = asyncio.create_task(HttpServer(service, stop).serve(sockets=[listener]))
        try:
            yield Running(f"http://127.0.0.1:{port}", port, service, stop, done)
        finally:
            stop.set()
            await done
