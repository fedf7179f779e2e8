"""`python -m gllm.entrypoints.api_server [flags]`: start the engine, serve HTTP, stop cleanly.

The loop and the signals are ours; uvicorn only speaks HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Iterator, Sequence
from typing import TYPE_CHECKING

import uvicorn

from gllm.config import EngineConfig
from gllm.engine.sampling_defaults import sampling_defaults
from gllm.entrypoints.app import Service, make_app
from gllm.entrypoints.cli import parse_server_args
from gllm.entrypoints.server_config import ServerConfig
from gllm.errors import StartupError

if TYPE_CHECKING:
    from gllm.engine.async_engine import AsyncEngine

logger = logging.getLogger(__name__)
ENGINE_CLOSE_SECONDS = 20.0


def main(argv: Sequence[str] | None = None) -> int:
    """The process's exit code: 0 after a clean stop, 1 when the server could not start; wrong flags exit with 2."""
    engine, server = parse_server_args(argv)
    logging.basicConfig(
        level=server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    try:
        asyncio.run(run(engine, server))
    except StartupError as error:
        print(f"api_server: {error}", file=sys.stderr)
        return 1
    return 0


async def run(engine_config: EngineConfig, config: ServerConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises StartupError."""
    stop = catch_signals()
    defaults = sampling_defaults(engine_config.checkpoint) if config.generation_config == "auto" else {}
    with contextlib.closing(bind(config.host, config.port)) as listener:
        from gllm.engine.async_engine import AsyncEngine  # loads torch: not before the flags and the port are right

        engine = AsyncEngine(engine_config)
        try:
            if await finishes_before(stop, engine.start()):
                names, limit = config.model_names(engine_config), engine_config.max_queued_requests
                server = HttpServer(Service(engine, config, names, limit, defaults), stop)
                await server.serve(sockets=[listener])
        finally:
            await close(engine)


async def close(engine: AsyncEngine) -> None:
    try:
        async with asyncio.timeout(ENGINE_CLOSE_SECONDS):
            await engine.close()
    except TimeoutError:
        logger.error("the engine did not stop within %g seconds", ENGINE_CLOSE_SECONDS)


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers and without its ten wake-ups a second."""

    def __init__(self, service: Service, stop: asyncio.Event) -> None:
        config = service.config
        super().__init__(
            uvicorn.Config(
                make_app(service),
                lifespan="off",
                log_config=None,
                access_log=config.access_log,
                timeout_keep_alive=config.keep_alive_timeout,
                # Ours ends the requests properly; uvicorn's, a little later, whatever is left.
                timeout_graceful_shutdown=int(config.shutdown_timeout) + 3,
                date_header=False,
                server_header=False,
                ws="none",
            )
        )
        self._service = service
        self._stop = stop
        if config.log_level != "debug":
            logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its starting and stopping is ours to tell
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)  # asked for by a flag of its own

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            print(f"Serving {', '.join(self._service.model_names)} on {url}", flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self._stop.wait()
        loop = asyncio.get_running_loop()
        loop.call_later(self._service.config.shutdown_timeout, self._service.in_flight.stop)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so that nobody is let in before the engine is ready."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener


def catch_signals() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; a second one ends the process on the spot."""
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return stop


async def finishes_before(stop: asyncio.Event, work: Awaitable[None]) -> bool:
    """Whether `work` was done before `stop`; if not, it has been cancelled. Raises what `work` raises."""
    task, stopped = asyncio.ensure_future(work), asyncio.create_task(stop.wait())
    await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
        return False
    await task
    return True


if __name__ == "__main__":
    sys.exit(main())
