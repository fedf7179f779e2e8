"""Responses in OpenAI's shape. Structs of our own rather than the openai package's models: building and encoding one
for each token costs a microsecond or two instead of some fifty; the tests parse every one with those models."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from gllm.outputs import Delta, Logprob, PositionLogprobs


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class ChatDelta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatMessage(Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChunkChoice(Struct):
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    index: int = 0
    stop_reason: str | int | UnsetType = UNSET


class ChatChoice(Struct):
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    index: int = 0
    stop_reason: str | int | UnsetType = UNSET


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Struct):
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    index: int = 0
    stop_reason: str | int | UnsetType = UNSET


class Body(Struct):
    """A whole response, or one chunk of a streamed one. usage: absent where the client did not ask for it, null in
    the chunks before the last."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[Any]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None


_encode = msgspec.json.Encoder().encode


@dataclass(slots=True, kw_only=True)
class ChatFormat:
    """The bodies of one chat answer."""

    model: str
    include_usage: bool = False
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self) -> bytes:
        """The first chunk: the role."""
        return self._chunk([ChatChunkChoice(ChatDelta("assistant", ""))])

    def chunk(self, delta: Delta) -> bytes:
        logprobs = _chat_logprobs(delta.logprobs)
        stop_reason = UNSET if delta.stop_reason is None else delta.stop_reason
        return self._chunk(
            [ChatChunkChoice(ChatDelta(content=delta.text), logprobs, delta.finish_reason, 0, stop_reason)]
        )

    def tail(self, usage: Usage) -> bytes:
        """The usage chunk of a stream."""
        return _encode(Body(self.id, "chat.completion.chunk", self.created, self.model, (), usage))

    def whole(self, answer: Delta, usage: Usage) -> bytes:
        """The unstreamed response; `answer` is the sum of all deltas."""
        logprobs = _chat_logprobs(answer.logprobs)
        stop_reason = UNSET if answer.stop_reason is None else answer.stop_reason
        choice = ChatChoice(ChatMessage(answer.text), logprobs, answer.finish_reason, 0, stop_reason)
        return _encode(Body(self.id, "chat.completion", self.created, self.model, [choice], usage))

    def _chunk(self, choices: list[ChatChunkChoice]) -> bytes:
        usage = None if self.include_usage else UNSET
        return _encode(Body(self.id, "chat.completion.chunk", self.created, self.model, choices, usage))


@dataclass(slots=True, kw_only=True)
class CompletionFormat:
    """The bodies of one text completion; chunks and the whole have the same shape."""

    model: str
    include_usage: bool = False
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    offset: int = 0

    def head(self) -> None:
        """There is no chunk before the first text."""

    def chunk(self, delta: Delta) -> bytes:
        return self._body([self._choice(delta)], None if self.include_usage else UNSET)

    def tail(self, usage: Usage) -> bytes:
        return self._body((), usage)

    def whole(self, answer: Delta, usage: Usage) -> bytes:
        return self._body([self._choice(answer)], usage)

    def _choice(self, delta: Delta) -> CompletionChoice:
        logprobs = None
        if delta.logprobs is not None:
            logprobs = _completion_logprobs(delta.logprobs, self.offset)
            self.offset += sum(len(token) for token in logprobs.tokens)
        stop_reason = UNSET if delta.stop_reason is None else delta.stop_reason
        return CompletionChoice(delta.text, logprobs, delta.finish_reason, 0, stop_reason)

    def _body(self, choices: Sequence[CompletionChoice], usage: Usage | UnsetType | None) -> bytes:
        return _encode(Body(self.id, "text_completion", self.created, self.model, choices, usage))


def _chat_logprobs(positions: tuple[PositionLogprobs, ...] | None) -> ChatLogprobs | None:
    if positions is None:
        return None
    return ChatLogprobs(
        [
            TokenLogprob(p.chosen.text, _finite(p.chosen.logprob), _bytes(p.chosen), [_top(t) for t in p.top])
            for p in positions
        ]
    )


def _top(token: Logprob) -> TopLogprob:
    return TopLogprob(token.text, _finite(token.logprob), _bytes(token))


def _bytes(token: Logprob) -> list[int] | None:
    """The token's UTF-8 bytes; None where the text stands for bytes that are not a whole character."""
    return None if "\ufffd" in token.text else list(token.text.encode())


def _completion_logprobs(positions: tuple[PositionLogprobs, ...], offset: int) -> CompletionLogprobs:
    offsets = []
    for p in positions:
        offsets.append(offset)
        offset += len(p.chosen.text)
    return CompletionLogprobs(
        [p.chosen.text for p in positions],
        [_finite(p.chosen.logprob) for p in positions],
        [{t.text: _finite(t.logprob) for t in (*p.top, p.chosen)} for p in positions],
        offsets,
    )


def _finite(logprob: float) -> float:
    """JSON has no -Infinity; OpenAI's API writes -9999.0 for a token that cannot be."""
    return max(logprob, -9999.0)
