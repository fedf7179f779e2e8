"""What comes back for a request: deltas while it runs, a RequestOutput (vLLM's shape) once it is done."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate token at one output position; `text` is the token alone, U+FFFD where its bytes are not UTF-8."""

    token_id: int
    logprob: float
    text: str


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The chosen token and the most likely ones (in falling order) at one output position."""

    chosen: Logprob
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """New output since the last delta. `text` may be empty while a character or a stop string is incomplete.
    finish_reason: "stop" or "length" on the last delta, else None. stop_reason: the stop string or stop token id that
    ended the output; None for EOS and length."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class CompletionOutput:
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    """The result of one prompt. `error` is None or says why this prompt has no (whole) output."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    error: str | None = None
