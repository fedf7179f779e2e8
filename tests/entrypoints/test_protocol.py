"""Requests: what is understood, what is harmless, and that everything else is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.entrypoints import protocol
from gllm.entrypoints.protocol import NEUTRAL_VALUES, ChatRequest, CompletionRequest, read_request
from gllm.errors import BadRequest
from gllm.sampling_params import SamplingParams

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    return read_request(ChatRequest, {"messages": MESSAGES, **fields})


def completion(**fields: Any) -> CompletionRequest:
    return read_request(CompletionRequest, {"prompt": "hi", **fields})


def test_sampling_fields_arrive() -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": -3, "presence_penalty": 1,
        "frequency_penalty": -1.5, "repetition_penalty": 1.1, "stop_token_ids": [7], "ignore_eos": True,
        "min_tokens": 2, "skip_special_tokens": False, "include_stop_str_in_output": True,
    }  # fmt: skip
    params = chat(**fields, stop="x", max_completion_tokens=9, logprobs=True, top_logprobs=3).sampling_params()
    assert {name: getattr(params, name) for name in fields} == {**fields, "stop_token_ids": (7,)}
    assert (params.stop, params.max_tokens, params.logprobs) == (("x",), 9, 3)


def test_defaults_are_openais() -> None:
    assert chat().sampling_params() == SamplingParams(max_tokens=None)
    assert completion().sampling_params() == SamplingParams(max_tokens=16)
    nulls = dict.fromkeys(ChatRequest.model_fields.keys() - {"messages"})
    assert chat(**nulls).sampling_params() == SamplingParams(max_tokens=None)


def test_logprobs_of_both_endpoints() -> None:
    assert chat(logprobs=True).sampling_params().logprobs == 0
    assert chat(logprobs=False).sampling_params().logprobs is None
    assert completion(logprobs=4).sampling_params().logprobs == 4


@pytest.mark.parametrize("name", sorted(NEUTRAL_VALUES))
def test_values_that_ask_for_nothing_are_accepted(name: str) -> None:
    for value in (None, *NEUTRAL_VALUES[name]):
        assert chat(**{name: value}) == chat()
        assert completion(**{name: value}) == completion()


def test_labels_are_accepted() -> None:
    assert chat(user="u", metadata={"k": "v"}, prompt_cache_key="p", safety_identifier="s") == chat()


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tool_choice": "auto"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"functions": [{"name": "f"}]},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        {"logit_bias": {"5": 10}},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "alloy", "format": "wav"}},
        {"n": 2},
        {"n": 0},
        {"n": True},
        {"n": 1.0},
        {"best_of": 2},
        {"echo": True},
        {"suffix": "x"},
        {"store": True},
        {"store": 0},
        {"prediction": {"type": "content", "content": "x"}},
        {"reasoning_effort": "high"},
        {"service_tier": "priority"},
        {"web_search_options": {}},
    ],
)
def test_what_we_do_not_do_is_refused_by_name(fields: dict[str, Any]) -> None:
    for make in (chat, completion):
        with pytest.raises(BadRequest) as caught:
            make(**fields)
        assert caught.value.param == next(iter(fields))
        assert caught.value.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"frobnicate": None}, "frobnicate"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "16"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2.0}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a", 1]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": "a" * 1025}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"model": 3}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"prompt": "hi"}, "prompt"),
    ],
)
def test_wrong_values_of_a_chat_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert param in caught.value.message
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize(
    "prompt", [[], ["a", "b"], [[1], [2]], [1, "a"], [True], [-1], [2**31], 5, None, {"a": 1}, [1.0], [None]]
)
def test_prompts_that_are_not_one_text_or_token_list(prompt: Any) -> None:
    if prompt == []:
        assert completion(prompt=prompt).prompt == []  # the engine knows what an empty prompt means
        return
    with pytest.raises(BadRequest) as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


def test_one_prompt_may_stand_in_a_list() -> None:
    assert completion(prompt=["a"]).prompt == "a"
    assert completion(prompt=[[1, 2]]).prompt == [1, 2]
    assert completion(prompt=[1, 2]).prompt == [1, 2]


@pytest.mark.parametrize("logprobs", [21, -1, True, 2.0])
def test_completion_logprobs_is_a_count(logprobs: Any) -> None:
    with pytest.raises(BadRequest):
        completion(logprobs=logprobs)


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_a_missing_field_is_named(kind: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        read_request(kind, {})
    assert caught.value.param in ("messages", "prompt")
    assert caught.value.code == "missing_required_parameter"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [0] * 1000}, "messages[0]"),
        ({"stop_token_ids": ["x"] * 64}, "stop_token_ids[0]"),
        ({"stop": [0] * 1000}, "stop"),
        ({f"unknown{n}": n for n in range(1000)}, "unknown0"),
        ({"stream": True, "stream_options": {f"unknown{n}": n for n in range(1000)}}, "stream_options.unknown0"),
        ({"x" * 5_000_000: 1}, "x" * 200),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_many_mistakes_make_one_error(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], param: str) -> None:
    made: list[int] = []

    def counting(error: Any) -> BadRequest:
        made.append(error.error_count())
        return first_error(error)

    first_error = protocol._first_error
    monkeypatch.setattr(protocol, "_first_error", counting)
    with pytest.raises(BadRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert len(caught.value.message) < 300
    assert made in ([], [1])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *NEUTRAL_VALUES, "user", "other"})


@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4) | JSON)
def test_any_json_is_either_understood_or_a_bad_request(body: Any) -> None:
    for kind, required in ((ChatRequest, {"messages": MESSAGES}), (CompletionRequest, {"prompt": "a"})):
        try:
            read_request(kind, {**required, **body} if isinstance(body, dict) else body).sampling_params()
        except BadRequest as error:
            assert error.message  # noqa: PT017 (both outcomes are right)
