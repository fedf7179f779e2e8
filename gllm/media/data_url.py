"""`data:` URLs to bytes, piece by piece: megabytes of payload must not hold the interpreter's lock for long."""

from __future__ import annotations

import binascii
from collections.abc import Iterator
from urllib.parse import unquote_to_bytes

from gllm.errors import BadRequest

_HEADER_CHARS = 1024
_PIECE_CHARS = 1 << 18
_MAX_PLAIN_CHARS = 1 << 20
_WHITESPACE = b" \t\r\n\f\v"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def is_data_url(url: str) -> bool:
    """Whatever its size, without a copy of it."""
    return url[:_HEADER_CHARS].lstrip()[:5].lower() == "data:"


def read_data_url(url: str, max_bytes: int, *, prefix: int | None = None) -> bytes:
    """The payload of `url`, or about its first `prefix` bytes. The media type is not looked at: the bytes decide.

    Raises BadRequest for what is not base64 (or short percent-encoded text), and for more than `max_bytes`.
    """
    comma = url.find(",", 0, _HEADER_CHARS)
    if comma < 0:
        raise BadRequest("a data URL without a comma before its data", code="invalid_image")
    parameters = [parameter.strip().lower() for parameter in url[:comma].split(";")]
    if "base64" not in parameters[1:]:
        return _percent_decoded(url, comma + 1)
    if (len(url) - comma) * 3 // 4 > max_bytes * 1.1:
        raise BadRequest(f"larger than the {max_bytes:,} bytes that an item may have", code="too_large")
    pieces, size = [], 0
    for piece in _base64_pieces(url, comma + 1):
        pieces.append(piece)
        size += len(piece)
        if size > max_bytes:
            raise BadRequest(f"larger than the {max_bytes:,} bytes that an item may have", code="too_large")
        if prefix is not None and size >= prefix:
            break
    return b"".join(pieces)[:prefix]


def _percent_decoded(url: str, start: int) -> bytes:
    if len(url) - start > _MAX_PLAIN_CHARS:
        raise BadRequest("a data URL of this size has to be base64", code="invalid_image")
    return unquote_to_bytes(url[start:])


def _base64_pieces(url: str, start: int) -> Iterator[bytes]:
    """Both alphabets, whitespace anywhere, padding or none, characters percent-encoded or not."""
    rest = b""
    for piece in _characters(url, start):
        rest += piece.translate(_URL_SAFE, _WHITESPACE)
        whole = len(rest) // 4 * 4 if b"=" not in rest else 0
        yield _decode(rest[:whole])
        rest = rest[whole:]
        if len(rest) > 4:
            break  # padding with characters behind it
    data, _, after = rest.partition(b"=")
    if after not in (b"", b"=") or len(data) % 4 == 1:
        raise BadRequest("a data URL whose base64 is cut or has padding inside", code="invalid_image")
    yield _decode(data + b"=" * (-len(data) % 4))


def _characters(url: str, start: int) -> Iterator[bytes]:
    """The payload in pieces, percent-encoding undone."""
    encoded = url.find("%", start) >= 0
    while start < len(url):
        end = start + _PIECE_CHARS
        if encoded and end < len(url) and (cut := url.rfind("%", end - 2, end)) > start:
            end = cut
        piece = url[start:end]
        if not piece.isascii():
            raise BadRequest("a data URL whose data is not base64", code="invalid_image")
        yield unquote_to_bytes(piece) if encoded else piece.encode("ascii")
        start = end


def _decode(chunk: bytes) -> bytes:
    if chunk.rstrip(b"=").translate(None, _ALPHABET):
        raise BadRequest("a data URL whose data is not base64", code="invalid_image")
    return binascii.a2b_base64(chunk)
