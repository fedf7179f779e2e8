"""OpenAI chat messages: validated, rendered with the checkpoint's template, and still told apart afterwards.

What the template writes may hold special tokens; what a user writes may not. So the template sees an unguessable
marker in place of every user text, and the rendered string is cut at the markers into pieces of known origin.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gllm.errors import BadRequest
from gllm.media.source import Source

Render = Callable[[list[dict[str, Any]]], str]

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_KNOWN_KEYS = {"role", "content", "name"}
_DETAILS = {None, "auto", "low", "high"}


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of a prompt. trusted: written by the template, so special tokens in it are meant."""

    text: str
    trusted: bool


@dataclass(slots=True)
class Chat:
    """Messages as the template takes them, with markers for user texts, and the items in order of appearance."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _nonce: str = field(default_factory=lambda: f"x{secrets.token_hex(16)}x")

    def mark(self, text: str) -> str:
        """Whitespace at the ends stays, and so does empty text: templates trim and test, and neither is a token."""
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        self._texts.append(core)
        return f"{text[:start]}{self._nonce}{len(self._texts) - 1}x{text[start + len(core) :]}"

    def pieces(self, render: Render) -> list[Piece]:
        """Raises BadRequest when the template does not take these messages."""
        try:
            rendered = render(self.messages)
        except Exception as error:  # a template runs arbitrary code and raises what it likes
            reason = self._marker.sub("...", str(error))[:200]
            raise BadRequest(f"the chat template refuses these messages: {reason}", param="messages") from None
        pieces, position = [], 0
        for match in self._marker.finditer(rendered):
            pieces.append(Piece(rendered[position : match.start()], trusted=True))
            pieces.append(Piece(self._texts[int(match[1])], trusted=False))
            position = match.end()
        pieces.append(Piece(rendered[position:], trusted=True))
        return [piece for piece in pieces if piece.text]

    @property
    def _marker(self) -> re.Pattern[str]:
        return re.compile(rf"{self._nonce}(\d+)x")


def read_messages(messages: Sequence[Mapping[str, Any]], *, trusted: bool, takes_lists: bool) -> Chat:
    """OpenAI's messages -> Chat. Raises BadRequest naming the place.

    trusted: `image` parts with a Pillow image, bytes or a path are allowed. takes_lists: the template takes lists of
    parts; where it does not, the texts of a list are joined by newlines.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise BadRequest("messages must be a list with at least one message", param="messages")
    chat = Chat()
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise BadRequest(f"{place} must be an object", param=place)
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise BadRequest(f"{place}.role must be one of {', '.join(ROLES)}, got {role!r:.40}", param=f"{place}.role")
        for key, value in message.items():
            if key not in _KNOWN_KEYS and value not in (None, [], {}):
                where = f"{place}.{key}"[:200]  # keys may be megabytes long
                raise BadRequest(f"{where} is not supported", param=where)
        content = _read_content(chat, message.get("content"), f"{place}.content", trusted)
        if not takes_lists and isinstance(content, list):
            content = "\n".join(part["text"] for part in content if "text" in part)
        chat.messages.append({"role": ROLES[role], "content": content})
    return chat


def _read_content(chat: Chat, content: Any, place: str, trusted: bool) -> str | list[dict[str, str]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return chat.mark(content)
    if not isinstance(content, list | tuple):
        raise BadRequest(f"{place} must be a string or a list of parts", param=place)
    return [_read_part(chat, part, f"{place}[{index}]", trusted) for index, part in enumerate(content)]


def _read_part(chat: Chat, part: Any, place: str, trusted: bool) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise BadRequest(f"{place}.text must be a string", param=place)
        return {"type": "text", "text": chat.mark(part["text"])}
    if kind == "image_url":
        chat.sources.append(Source(_read_image_url(part.get("image_url"), place)))
        return {"type": "image"}
    if kind == "image" and trusted:
        chat.sources.append(Source(_first_value(part, ("image", "url", "path"), place), trusted=True))
        return {"type": "image"}
    allowed = "text, image_url or image" if trusted else "text or image_url"
    raise BadRequest(f"{place} must be an object of type {allowed}, got {kind!r:.40}", param=place)


def _read_image_url(value: Any, place: str) -> str:
    detail = None
    if isinstance(value, Mapping):
        value, detail = value.get("url"), value.get("detail")
    if not isinstance(value, str):
        raise BadRequest(f"{place}.image_url must be a URL, or an object with a url", param=place)
    if not isinstance(detail, str | None) or detail not in _DETAILS:
        raise BadRequest(f"{place}.image_url.detail must be auto, low or high", param=place)
    return value


def _first_value(part: Mapping[str, Any], keys: Iterable[str], place: str) -> Any:
    for key in keys:
        if part.get(key) is not None:
            return part[key]
    raise BadRequest(f"{place} names no image", param=place)
