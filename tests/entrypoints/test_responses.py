"""Our response structs are what the openai package's models expect, field by field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gllm.entrypoints.responses import ChatFormat, CompletionFormat, Usage
from gllm.outputs import Delta, Logprob, PositionLogprobs

LOGPROBS = (
    PositionLogprobs(Logprob(5, -0.5, "é"), (Logprob(5, -0.5, "é"), Logprob(6, -1.5, "b"))),
    PositionLogprobs(Logprob(7, float("-inf"), "\ufffd"), ()),
)
DELTA = Delta("éx", (5, 7), LOGPROBS, "stop", "END")
USAGE = Usage(3, 2, 5)


def strictly(model: Any, data: bytes, *extra: str) -> Any:
    """Parse with an openai model, and make sure that no field of ours is unknown to it but `extra`."""
    value = json.loads(data)
    parsed = model.model_validate(value, strict=True)
    assert unknown(parsed) <= set(extra)
    return parsed


def unknown(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(unknown, value))
    if not hasattr(value, "model_extra"):
        return set()
    fields = [getattr(value, name) for name in type(value).model_fields]
    return set(value.model_extra or ()) | set().union(*map(unknown, fields))


def test_chat_chunks() -> None:
    output = ChatFormat(model="m", include_usage=True)
    head = strictly(ChatCompletionChunk, output.head())
    assert head.choices[0].delta.role == "assistant"
    chunk = strictly(ChatCompletionChunk, output.chunk(DELTA), "stop_reason")
    assert chunk.choices[0].delta.content == "éx"
    assert chunk.choices[0].finish_reason == "stop"
    content = chunk.choices[0].logprobs.content
    assert [(c.token, c.logprob, c.bytes) for c in content] == [("é", -0.5, [195, 169]), ("\ufffd", -9999.0, None)]
    assert [top.token for top in content[0].top_logprobs] == ["é", "b"]
    tail = strictly(ChatCompletionChunk, output.tail(USAGE))
    assert (tail.choices, tail.usage.total_tokens) == ([], 5)
    assert head.id == chunk.id == tail.id


def test_chat_chunks_mention_usage_only_when_it_was_asked_for() -> None:
    assert "usage" not in json.loads(ChatFormat(model="m").chunk(Delta("a")))
    assert json.loads(ChatFormat(model="m", include_usage=True).chunk(Delta("a")))["usage"] is None


def test_a_whole_chat_answer() -> None:
    answer = strictly(ChatCompletion, ChatFormat(model="m").whole(DELTA, USAGE), "stop_reason")
    assert answer.choices[0].message.content == "éx"
    assert answer.usage.completion_tokens == 2
    assert len(answer.choices[0].logprobs.content) == 2


def test_completions() -> None:
    output = CompletionFormat(model="m", include_usage=True)
    # OpenAI's own chunks have a null here, though its type does not say so.
    first = Completion.construct(**json.loads(output.chunk(Delta("éx", (5, 7), LOGPROBS))))
    assert first.choices[0].finish_reason is None
    second = strictly(Completion, output.chunk(DELTA), "stop_reason")
    assert first.choices[0].logprobs.text_offset == [0, 1]
    assert second.choices[0].logprobs.text_offset == [2, 3]
    assert first.choices[0].logprobs.top_logprobs[0] == {"é": -0.5, "b": -1.5}
    assert second.choices[0].finish_reason == "stop"
    assert strictly(Completion, output.tail(USAGE)).usage.prompt_tokens == 3
    whole = strictly(Completion, CompletionFormat(model="m").whole(DELTA, USAGE), "stop_reason")
    assert whole.choices[0].text == "éx"


@pytest.mark.parametrize("output", [ChatFormat(model="m"), CompletionFormat(model="m")])
def test_ids_are_fresh(output: Any) -> None:
    assert type(output)(model="m").id != output.id
