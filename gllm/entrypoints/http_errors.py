"""Errors of the HTTP layer itself, and how any error becomes a response with OpenAI's error body."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from gllm.errors import BadRequest, Overloaded, RequestError

RETRY_AFTER_SECONDS = "1"


class Unauthorized(BadRequest):
    status = 401


class NotFound(BadRequest):
    status = 404


class BodyTimeout(BadRequest):
    status = 408


class BodyTooLarge(BadRequest):
    status = 413


class WrongContentType(BadRequest):
    status = 415


class InternalError(RequestError):
    """A fault of ours: the client learns that it happened, the log says what."""

    status = 500
    type = "server_error"

    def __init__(self) -> None:
        super().__init__("The server had an error while processing the request.")


class ClientLeft(Exception):
    """Nobody is there any more to read the answer."""


def encode_error(error: RequestError) -> bytes:
    """OpenAI's error body as JSON; characters that UTF-8 cannot carry are replaced."""
    body = error.body()
    body["error"]["message"] = error.message.encode("utf-8", "replace").decode()
    return msgspec.json.encode(body)


def error_response(error: RequestError, headers: dict[str, str] | None = None) -> Response:
    headers = dict(headers or {})
    if isinstance(error, Overloaded):
        headers["Retry-After"] = RETRY_AFTER_SECONDS
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return Response(encode_error(error), error.status, headers, media_type="application/json")
