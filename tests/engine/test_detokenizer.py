"""Streamed text against the tokenizer's own decoding of the whole, and stop strings against a search in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.config import DEMO_CHECKPOINT
from gllm.engine.detokenizer import Detokenizer, Vocabulary
from gllm.errors import StartupError
from gllm.outputs import Delta
from gllm.sampling_params import SamplingParams
from gllm.worker.step import TokenLogprobs


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO_CHECKPOINT)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Any) -> Vocabulary:
    return Vocabulary(tokenizer)


def stream(
    vocabulary: Vocabulary, ids: Sequence[int], cuts: Sequence[int] = (), reason: str = "length", **params: Any
) -> list[Delta]:
    """Push `ids` in chunks that end at `cuts`, the last with `reason`."""
    detokenizer = Detokenizer(vocabulary, SamplingParams(**params))
    ends = [*sorted({cut % (len(ids) + 1) for cut in cuts} - {0, len(ids)}), len(ids)]
    deltas, start = [], 0
    for end in ends:
        deltas.append(detokenizer.push(ids[start:end], finish_reason=reason if end == len(ids) else None))
        start = end
        if detokenizer.finished:
            break
    return deltas


def text(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


CUTS = st.lists(st.integers(0, 100), max_size=8)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), cuts=CUTS, skip=st.booleans())
def test_streamed_text_is_the_whole_text(
    tokenizer: Any, vocabulary: Vocabulary, data: st.DataObject, cuts: list[int], skip: bool
) -> None:
    """Any tokens: broken UTF-8, special tokens and ids that only pad the vocabulary included."""
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 20), max_size=60))
    wanted = tokenizer.decode(ids, skip_special_tokens=skip)
    assert text(stream(vocabulary, ids, cuts, skip_special_tokens=skip)) == wanted


@settings(max_examples=200, deadline=None)
@given(source=st.text(max_size=60), cuts=CUTS)
def test_no_broken_character_inside(tokenizer: Any, vocabulary: Vocabulary, source: str, cuts: list[int]) -> None:
    ids = tokenizer.encode(source)
    deltas = stream(vocabulary, ids, cuts)
    assert text(deltas) == tokenizer.decode(ids)
    if "\ufffd" not in source:
        assert all("\ufffd" not in delta.text for delta in deltas)


def test_characters_are_sent_as_soon_as_they_are_whole(tokenizer: Any, vocabulary: Vocabulary) -> None:
    detokenizer = Detokenizer(vocabulary, SamplingParams())
    sent = [detokenizer.push([token_id]).text for token_id in tokenizer.encode("é界🙂")]
    assert [part for part in sent if part] == ["é", "界", "🙂"]


def test_output_that_ends_inside_a_character(tokenizer: Any, vocabulary: Vocabulary) -> None:
    ids = tokenizer.encode("ok 🙂")[:-1]
    assert text(stream(vocabulary, ids, range(9))) == tokenizer.decode(ids) == "ok \ufffd"


ALPHABET = "abé界 "


def first_to_end(whole: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """(start, stop) of the stop string that ends first, the longest of those: by search, character by character."""
    for end in range(1, len(whole) + 1):
        found = [stop for stop in stops if whole[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), longest
    return None


@settings(max_examples=500, deadline=None)
@given(
    source=st.text(ALPHABET, max_size=40),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=6), min_size=1, max_size=4),
    cuts=CUTS,
    keep=st.booleans(),
)
def test_stop_strings(
    tokenizer: Any, vocabulary: Vocabulary, source: str, stops: list[str], cuts: list[int], keep: bool
) -> None:
    """Inside a token, across tokens, sharing prefixes, overlapping themselves, or never complete."""
    ids = tokenizer.encode(source)
    deltas = stream(vocabulary, ids, cuts, stop=tuple(stops), include_stop_str_in_output=keep)
    found = first_to_end(source, stops)
    if found is None:
        assert text(deltas) == source
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("length", None)
        return
    start, stop = found
    assert text(deltas) == source[: start + len(stop)] if keep else text(deltas) == source[:start]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
    kept = [token_id for delta in deltas for token_id in delta.token_ids]
    assert ids[: len(kept)] == kept
    assert tokenizer.decode(kept)[: start + len(stop)] == source[: start + len(stop)]
    assert stop not in tokenizer.decode(kept[:-1])[start:], "nothing after the token that completes it"


def test_text_that_cannot_begin_a_stop_string_is_not_held(tokenizer: Any, vocabulary: Vocabulary) -> None:
    detokenizer = Detokenizer(vocabulary, SamplingParams(stop=("a b c", "a d")))
    sent = [detokenizer.push(tokenizer.encode(char)).text for char in "xa b a x"]
    assert sent == ["x", "", "", "", "", "a b ", "", "a x"]


def test_tokens_behind_the_stop_string_are_dropped(tokenizer: Any, vocabulary: Vocabulary) -> None:
    detokenizer = Detokenizer(vocabulary, SamplingParams(stop="b", logprobs=0))
    ids = [tokenizer.encode(char)[0] for char in "abcd"]
    logprobs = [TokenLogprobs((token_id,), (-1.0,)) for token_id in ids]
    delta = detokenizer.push(ids, logprobs, finish_reason="length")
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("a", tuple(ids[:2]), "stop")
    assert delta.logprobs is not None
    assert len(delta.logprobs) == 2
    assert detokenizer.finished
    assert detokenizer.push(ids, finish_reason="length") == Delta("")


def test_min_tokens_lets_early_stop_strings_pass(tokenizer: Any, vocabulary: Vocabulary) -> None:
    ids = [tokenizer.encode(char)[0] for char in "xbxbx"]
    assert text(stream(vocabulary, ids, range(9), stop=("b",), min_tokens=2)) == "xbx"
    assert text(stream(vocabulary, ids, range(9), stop=("bx",), min_tokens=9)) == "xbxbx"
    assert text(stream(vocabulary, ids, range(9), stop=("bxb",), min_tokens=3)) == "x"


def test_the_token_that_ended_the_output_is_no_text(tokenizer: Any, vocabulary: Vocabulary) -> None:
    eos = tokenizer.eos_token_id
    ids = [*tokenizer.encode("ab"), eos]

    def last(**params: Any) -> tuple[str, str | int | None]:
        detokenizer = Detokenizer(vocabulary, SamplingParams(**params), (eos,))
        delta = detokenizer.push(ids, finish_reason="stop")
        assert delta.token_ids == tuple(ids)
        return delta.text, delta.stop_reason

    assert last() == ("ab", None)
    assert last(skip_special_tokens=False) == ("ab", None)
    assert last(skip_special_tokens=False, include_stop_str_in_output=True) == ("ab" + tokenizer.eos_token, None)
    assert last(stop_token_ids=(eos,)) == ("ab", None)
    assert last(stop_token_ids=(eos,), ignore_eos=True) == ("ab", eos)
    detokenizer = Detokenizer(vocabulary, SamplingParams(stop_token_ids=(ids[1],)), (eos,))
    delta = detokenizer.push(ids[:2], finish_reason="stop")
    assert (delta.text, delta.stop_reason) == ("a", ids[1])


def test_held_text_is_sent_at_the_end(tokenizer: Any, vocabulary: Vocabulary) -> None:
    detokenizer = Detokenizer(vocabulary, SamplingParams(stop="abz"))
    assert detokenizer.push(tokenizer.encode("ab")).text == ""
    assert detokenizer.push([tokenizer.eos_token_id], finish_reason="stop").text == "ab"
    empty = Detokenizer(vocabulary, SamplingParams(stop="abz"))
    empty.push(tokenizer.encode("ab"))
    assert empty.push([], finish_reason="length").text == "ab"


def test_logprobs_carry_each_tokens_own_text(tokenizer: Any, vocabulary: Vocabulary) -> None:
    first, second = tokenizer.encode("é")
    detokenizer = Detokenizer(vocabulary, SamplingParams(logprobs=2))
    delta = detokenizer.push([first], [TokenLogprobs((first, second, tokenizer.eos_token_id), (-0.5, -0.1, -2.0))])
    assert delta.logprobs is not None
    (position,) = delta.logprobs
    assert (position.chosen.token_id, position.chosen.text) == (first, "\ufffd")
    assert [top.text for top in position.top] == ["\ufffd", tokenizer.eos_token]
    assert vocabulary.token_bytes(first) + vocabulary.token_bytes(second) == "é".encode()
    silent = Detokenizer(vocabulary, SamplingParams())
    assert silent.push([first], [None]).logprobs is None


def test_work_a_token_does_not_grow(tokenizer: Any, vocabulary: Vocabulary) -> None:
    """A text of a million characters that is all the beginning of stop strings: minutes, if it were searched again."""
    a = tokenizer.encode("a")[0]
    detokenizer = Detokenizer(vocabulary, SamplingParams(stop=("a" * 1023 + "b", "a" * 999 + "c")))
    sent = 0
    for _ in range(60_000):
        sent += len(detokenizer.push([a]).text)
    assert sent == 58_977


def test_other_tokenizers_are_refused(tokenizer: Any) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(StartupError, match="byte-level"):
        Vocabulary(plain)
