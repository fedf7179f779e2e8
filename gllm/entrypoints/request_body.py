"""Reads the body of a request: its type, its size and its pace are checked while it arrives."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from gllm.entrypoints.http_errors import BodyTimeout, BodyTooLarge, ClientLeft, WrongContentType
from gllm.errors import BadRequest


async def read_body(request: Request, max_bytes: int, timeout: float) -> list[bytes]:
    """The pieces of a JSON body. timeout: seconds between two of them. Raises RequestError, or ClientLeft."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":  # also keeps web pages of other sites from posting without a preflight
        raise WrongContentType(f"Content-Type must be application/json, not {media_type[:100] or 'missing'!r}.")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)
    pieces: list[bytes] = []
    size, more = 0, True
    while more:
        piece, more = await _receive(request, timeout)
        size += len(piece)
        if size > max_bytes:
            raise _too_large(max_bytes)
        pieces.append(piece)
    return pieces


async def _receive(request: Request, timeout: float) -> tuple[bytes, bool]:
    try:
        async with asyncio.timeout(timeout):
            message = await request.receive()
    except TimeoutError:
        raise BodyTimeout(f"No byte of the request body came for {timeout:g} seconds.") from None
    if message["type"] == "http.disconnect":
        raise ClientLeft
    return message.get("body", b""), message.get("more_body", False)


def _too_large(max_bytes: int) -> BadRequest:
    return BodyTooLarge(f"The request body is larger than {max_bytes} bytes.", code="request_too_large")
