"""The HTTP application: routes, the API key, and OpenAI's error body for every error."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gllm.entrypoints.generation import CHAT, COMPLETION, Generation
from gllm.entrypoints.http_errors import InternalError, NotFound, Unauthorized, error_response
from gllm.entrypoints.inflight import InFlight
from gllm.entrypoints.metrics import Metrics
from gllm.entrypoints.server_config import ServerConfig
from gllm.errors import BadRequest, RequestError

if TYPE_CHECKING:
    from gllm.engine.async_engine import AsyncEngine

T = TypeVar("T")
ENGINE_ANSWER_SECONDS = 5.0
PREPARE_THREADS = 2


class Service:
    """What the routes share: the engine, the served model's names, the requests in flight, the metrics."""

    def __init__(
        self,
        engine: AsyncEngine,
        config: ServerConfig,
        model_names: tuple[str, ...],
        max_requests: int,
        sampling_defaults: Mapping[str, Any],
    ) -> None:
        self.engine = engine
        self.config = config
        self.model_names = model_names
        self.sampling_defaults = sampling_defaults
        self.metrics = Metrics()
        self.in_flight = InFlight(max_requests)
        self.created = int(time.time())
        self._threads = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="prepare")

    def known_model(self, name: str | None) -> str:
        """The name to answer with; None asks for the only model there is. Raises NotFound."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise NotFound(f"The model {name[:200]!r} does not exist.", param="model", code="model_not_found")
        return name

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run CPU work off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def model_card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "rserve",
            "max_model_len": self.engine.max_model_len,
        }


def make_app(service: Service) -> Starlette:
    """The application around a started engine."""

    async def models(request: Request) -> Response:
        return _json({"object": "list", "data": [service.model_card(name) for name in service.model_names]})

    async def model(request: Request) -> Response:
        return _json(service.model_card(service.known_model(request.path_params["name"])))

    async def health(request: Request) -> Response:
        return await _health(service)

    async def metrics(request: Request) -> Response:
        async with asyncio.timeout(ENGINE_ANSWER_SECONDS):
            service.metrics.set_gauges(await service.engine.stats())
        return Response(service.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return Starlette(
        routes=[
            Route("/v1/chat/completions", Generation(service, CHAT), methods=["POST"]),
            Route("/v1/completions", Generation(service, COMPLETION), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        middleware=[Middleware(Outermost, service=service)],
        exception_handlers={RequestError: _on_request_error, HTTPException: _on_http_error, Exception: _on_fault},
    )


class Outermost:
    """Around everything: the Date header, the count of requests by status, and the API key of /v1."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._count = service.metrics.http_requests
        key = service.config.api_key
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 499  # nginx's number for a client that left before it got an answer

        async def observing_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"date", formatdate(usegmt=True).encode())]
            await send(message)

        app = self._app if self._may_pass(scope) else _refuse_key
        try:
            await app(scope, receive, observing_send)
        except Exception:
            status = 500
            raise
        finally:
            path = scope["path"] if scope["path"] in _COUNTED_PATHS else "other"  # keeps the label's values bounded
            self._count.labels(path, str(status)).inc()

    def _may_pass(self, scope: Scope) -> bool:
        if self._key is None or not scope["path"].startswith("/v1"):
            return True
        scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        # Compared in constant time: how long a wrong key takes must not tell how much of it was right.
        return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._key)


_COUNTED_PATHS = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"))


async def _refuse_key(scope: Scope, receive: Receive, send: Send) -> None:
    error = Unauthorized("Incorrect API key, or none, in the Authorization header.", code="invalid_api_key")
    await error_response(error)(scope, receive, send)


async def _health(service: Service) -> Response:
    """200 only when the driver, every stage and an encoder answer; the table of workers tells which do not."""
    try:
        async with asyncio.timeout(ENGINE_ANSWER_SECONDS):
            health = await service.engine.health()
    except TimeoutError:
        return _json({"status": "unhealthy", "workers": {"driver": "no answer"}}, 503)
    status = "ok" if health.ok else "unhealthy"
    return _json({"status": status, "workers": health.workers}, 200 if health.ok else 503)


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """The framework's own errors: no such path, wrong method."""
    assert isinstance(error, HTTPException)
    described = BadRequest(f"{error.detail}: {request.method} {request.url.path[:200]}")
    described.status = error.status_code
    return error_response(described, dict(error.headers or {}))


async def _on_fault(request: Request, error: Exception) -> Response:
    return error_response(InternalError())  # the framework raises it further, so that it is logged


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
