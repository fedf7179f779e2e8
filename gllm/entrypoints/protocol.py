"""Requests as clients send them: names and meaning of OpenAI's API, with vLLM's additional sampling fields.

Nothing is ignored silently: a field that we do not know, or whose value asks for something that we do not do, is
refused by name. What a message may contain is checked by the engine's Processor, which offline use shares."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from gllm.errors import BadRequest
from gllm.sampling_params import MAX_STOPS, SamplingParams

# Fields that we do not support, with the values that ask for nothing (null is always one of them).
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
# Labels of the caller, and hints about OpenAI's caches: they never change an answer.
LABELS = frozenset(
    ("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "user")
)
INT64_MAX = 2**63 - 1
Count = Annotated[int, Field(ge=1, le=INT64_MAX)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def _stop_strings(value: Any) -> Any:
    if isinstance(value, str):
        value = [value]
    if value is not None and not (isinstance(value, list) and all(isinstance(stop, str) and stop for stop in value)):
        raise ValueError("must be a non-empty string or a list of them")
    if value is not None and len(value) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings are possible")
    return value


def _one_prompt(value: Any) -> Any:
    """The text or the token ids of a prompt that may stand in a list of its own, as OpenAI's API allows."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            raise ValueError(f"only one prompt a request is supported, got {len(value)}")
        value = value[0]
    is_tokens = isinstance(value, list) and all(type(token) is int and 0 <= token < 2**31 for token in value)
    if not (isinstance(value, str) or is_tokens):
        raise ValueError("must be a string or a list of token ids")
    return value


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, Field(description="only false: we add no padding")] = None


class GenerationRequest(Strict):
    """What both endpoints share. None stands for a field that is absent or null."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT64_MAX)] | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_stop_strings)] = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling_params(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        """defaults: values for fields that the request leaves out. Raises BadRequest that names the field."""
        wanted = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        given = {name: value for name, value in wanted.items() if value is not None}
        try:
            return SamplingParams(**{**defaults, **given, **self._endpoint_params()})
        except ValueError as error:
            raise BadRequest(f"{error}.", param=str(error).split()[0], code="invalid_value") from None

    def _endpoint_params(self) -> dict[str, Any]:
        raise NotImplementedError

    def check(self) -> None:
        """Rules that concern several fields. Raises BadRequest."""
        if self.stream_options is not None:
            if not self.stream:
                raise BadRequest("stream_options is only allowed when stream is true.", param="stream_options")
            if self.stream_options.include_obfuscation:
                raise unsupported("stream_options.include_obfuscation")
        max_tokens = self.sampling_params().max_tokens
        if max_tokens is not None and (self.min_tokens or 0) > max_tokens:
            raise BadRequest(
                f"min_tokens ({self.min_tokens}) is more than the largest output ({max_tokens} tokens).",
                param="min_tokens",
            )


_SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
)  # fmt: skip


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions. Without a limit the output may fill the context. chat_template_kwargs: settings of the
    checkpoint's template (vLLM's field)."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def _endpoint_params(self) -> dict[str, Any]:
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return {"max_tokens": limit, "logprobs": (self.top_logprobs or 0) if self.logprobs else None}

    def check(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise BadRequest(
                "max_tokens is the old name of max_completion_tokens: they must not differ.", param="max_tokens"
            )
        super().check()


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. Without a limit the output ends after 16 tokens, as in OpenAI's API."""

    prompt: Annotated[str | list[int], BeforeValidator(_one_prompt)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def _endpoint_params(self) -> dict[str, Any]:
        limit = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return {"logprobs": self.logprobs, **limit}


R = TypeVar("R", bound=GenerationRequest)


def read_request(kind: type[R], body: Any) -> R:
    """A checked request of this kind from a decoded JSON body. Raises BadRequest that names the field."""
    if not isinstance(body, dict):
        raise BadRequest("The request body must be a JSON object.")
    fields = {name: value for name, value in body.items() if not _asks_for_nothing(name, value)}
    _refuse_unknown(kind, fields)
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        raise _first_error(error) from None
    request.check()
    return request


def _refuse_unknown(kind: type[Strict], fields: dict[str, Any], place: str = "") -> None:
    """Before pydantic sees them: it would make an error of each, however many there are."""
    for name, value in fields.items():
        if name not in kind.model_fields:
            param = f"{place}{name}"[:200]
            raise BadRequest(f"Unknown field: {param}.", param=param, code="unknown_parameter")
        if name == "stream_options" and isinstance(value, dict):
            _refuse_unknown(StreamOptions, value, "stream_options.")


def unsupported(name: str) -> BadRequest:
    return BadRequest(f"{name} is not supported with this value.", param=name, code="unsupported_parameter")


def _asks_for_nothing(name: str, value: Any) -> bool:
    """Whether this field can be left out. Raises BadRequest if it asks for something that we do not do."""
    if name in LABELS:
        return True
    if name not in NEUTRAL_VALUES:
        return False
    if value is None or any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL_VALUES[name]):
        return True
    raise unsupported(name)


def _first_error(error: ValidationError) -> BadRequest:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])[1:][:200]
    if first["type"] == "missing":
        return BadRequest(f"Missing field: {param}.", param=param, code="missing_required_parameter")
    reason = first["msg"].removeprefix("Value error, ")
    return BadRequest(f"{param}: {reason}.", param=param, code="invalid_value")
