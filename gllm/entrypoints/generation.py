"""POST /v1/chat/completions and /v1/completions: one request, from its body to its last byte."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gllm.entrypoints import strict_json
from gllm.entrypoints.http_errors import ClientLeft, InternalError, encode_error
from gllm.entrypoints.metrics import Observation
from gllm.entrypoints.protocol import ChatRequest, CompletionRequest, read_request
from gllm.entrypoints.request_body import read_body
from gllm.entrypoints.responses import ChatFormat, CompletionFormat, Usage
from gllm.errors import RequestError
from gllm.outputs import Delta

if TYPE_CHECKING:
    from gllm.engine.stream import Stream
    from gllm.entrypoints.app import Service

logger = logging.getLogger(__name__)
# Reading a body of so many bytes, or of so many values, in the event loop would hold up the streams of others.
LARGE_BODY = 1 << 18
MANY_VALUES = 2000


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What differs between chats and completions. prepare: makes a Prompt (in a thread: templates and tokenizers take
    their time over long texts)."""

    request: type[ChatRequest] | type[CompletionRequest]
    format: type[ChatFormat] | type[CompletionFormat]
    prepare: Callable[[Any, Any], Any]


def _prepare_chat(processor: Any, request: ChatRequest) -> Any:
    add_generation_prompt = request.add_generation_prompt is not False
    return processor.chat(request.messages, add_generation_prompt, request.chat_template_kwargs)


CHAT = Endpoint(ChatRequest, ChatFormat, _prepare_chat)
COMPLETION = Endpoint(
    CompletionRequest, CompletionFormat, lambda processor, request: processor.completion(request.prompt)
)


class Generation:
    """An ASGI application. Whatever goes wrong before the first token is an error response with its own status; from
    then on a streamed answer ends with an error event. A client that leaves ends the engine's request at once."""

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        self._service = service
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        observation = Observation(self._service.metrics)
        events = EventStream(send)
        try:
            async with self._service.in_flight.enter() as interrupt:
                last = await self._answer(Request(scope, receive), interrupt.watch, events, observation)
            await last(scope, receive, send)
        except ClientLeft:
            observation.end("client_left")
        except Exception as error:
            observation.end("error")
            if not events.started:
                raise
            if not isinstance(error, RequestError):
                logger.exception("error in the middle of a stream")
                error = InternalError()
            await events.fail(error)

    async def _answer(
        self, request: Request, watch: Callable[[Receive], None], events: EventStream, observation: Observation
    ) -> Response | EventStream:
        """Do all the work; what is returned sends the last bytes, which need no watching."""
        service, config = self._service, self._service.config
        body = await read_body(request, config.max_request_bytes, config.body_timeout)
        watch(request.receive)
        wanted = await self._understand(body)
        output = self._endpoint.format(model=service.known_model(wanted.model), include_usage=wanted.include_usage)
        params = wanted.sampling_params(service.sampling_defaults)
        prompt = await service.in_thread(functools.partial(self._endpoint.prepare, service.engine.processor, wanted))
        async with closing(await service.engine.submit(prompt, params)) as stream:
            observation.prompt(len(stream.prompt_token_ids), stream.num_item_tokens)
            if wanted.stream:
                await events.send_all(output, stream, observation)
            else:
                answer = await total(stream, observation)
            usage = _usage(stream, observation)
        if wanted.stream:
            events.finish(output.tail(usage) if wanted.include_usage else None)
            return events
        return Response(output.whole(answer, usage), media_type="application/json")

    async def _understand(self, body: list[bytes]) -> ChatRequest | CompletionRequest:
        max_values = strict_json.MAX_VALUES + self._service.engine.max_model_len  # a prompt may be a list of token ids

        def understand() -> ChatRequest | CompletionRequest:
            return read_request(self._endpoint.request, strict_json.parse(b"".join(body), max_values))

        if sum(map(len, body)) < LARGE_BODY and strict_json.most_values(b"".join(body)) < MANY_VALUES:
            return understand()
        return await self._service.in_thread(understand)


class EventStream:
    """Server-sent events; the response starts with the first one."""

    def __init__(self, send: Send) -> None:
        self.started = False
        self._send = send
        self._last = b""

    async def send_all(self, output: ChatFormat | CompletionFormat, stream: Stream, observation: Observation) -> None:
        head = output.head()
        async for delta in stream:
            observation.saw(delta)
            # A delta may be without text while a character or a stop string is incomplete.
            data = _event(output.chunk(delta)) if delta.text or delta.logprobs or delta.finish_reason else b""
            if not self.started:
                await self._start()
                data = (_event(head) if head else b"") + data
            if data:
                await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def finish(self, tail: bytes | None) -> None:
        """Set the last bytes; calling this object sends them."""
        self._last = (_event(tail) if tail else b"") + _event(b"[DONE]")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._send({"type": "http.response.body", "body": self._last, "more_body": False})

    async def fail(self, error: RequestError) -> None:
        """End a stream that has begun: with the error, and without [DONE]."""
        await self._send({"type": "http.response.body", "body": _event(encode_error(error)), "more_body": False})

    async def _start(self) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        headers.append((b"x-accel-buffering", b"no"))  # nginx would hold tokens back
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self.started = True


@contextlib.asynccontextmanager
async def closing(stream: Stream) -> AsyncIterator[Stream]:
    """Closes the stream at the end, even if the task is cancelled once more meanwhile."""
    try:
        yield stream
    finally:
        await asyncio.shield(asyncio.create_task(stream.aclose()))


async def total(stream: Stream, observation: Observation) -> Delta:
    """The sum of all deltas."""
    parts = []
    async for delta in stream:
        observation.saw(delta)
        parts.append(delta)
    logprobs = None
    if any(part.logprobs is not None for part in parts):
        logprobs = tuple(position for part in parts for position in part.logprobs or ())
    return Delta(
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=logprobs,
        finish_reason=parts[-1].finish_reason,
        stop_reason=parts[-1].stop_reason,
    )


def _usage(stream: Stream, observation: Observation) -> Usage:
    num_prompt = len(stream.prompt_token_ids)
    return Usage(num_prompt, observation.num_tokens, num_prompt + observation.num_tokens)


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
