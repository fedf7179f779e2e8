"""What other JSON parsers let through is refused; what is JSON is read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.entrypoints import strict_json
from gllm.errors import BadRequest

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(VALUES, st.booleans())
def test_what_json_writes_is_read_back(value: object, ascii_only: bool) -> None:
    assert strict_json.parse(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "Expecting value"),
        (b"{", "line 1"),
        (b'{"a": 1,}', "property name"),
        (b"[1] 2", "Extra data"),
        (b'"\xff"', "byte 1 is not UTF-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        ("{}".encode("utf-16"), "not UTF-8"),
        (b"[NaN]", "NaN"),
        (b"[-Infinity]", "-Infinity"),
        (b"[1e999]", "too large"),
        (b"9" * 5000, "digits"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' stands twice"),
        (b'{"x": [{"deep": {"k": 1, "k": 1}}]}', "'k' stands twice"),
        (rb'"\ud800"', "surrogate"),
        (rb'{"\udc00": 1}', "surrogate"),
        (rb'[["ok", "\udc00\ud800"]]', "surrogate"),
        (b"[" * 70 + b"]" * 70, "deep"),
        (b"[" * 200_000, "deep"),
        (b'{"a":' * 100_000, "deep"),
    ],
)
def test_is_refused(body: bytes, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason) as caught:
        strict_json.parse(body)
    assert caught.value.code == "invalid_json"


def test_a_whole_surrogate_pair_is_a_character() -> None:
    assert strict_json.parse(rb'"\ud83d\ude00"') == "\U0001f600"


@pytest.mark.parametrize(
    "body",
    [b"[%s{}]" % (b"{}," * 1_000_000), b"[%s0]" % (b"0," * 200_001), b"[%s" % (b'"",' * 200_001), b'"' * 10_000_000],
    ids=["objects", "numbers", "strings", "quotes"],
)
def test_too_many_values_are_refused_unread(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    monkeypatch.setattr(json, "loads", None)
    monkeypatch.setattr(strict_json, "most_values", lambda _: 1 << 40)
    with pytest.raises(BadRequest, match="200,000 JSON values"):
        strict_json.parse(body)


@pytest.mark.parametrize(
    "value", ["a,b;{[" * 200_000, ['\\"{[,' * 100_000, "\\"], list(range(199_990)), {"k,": [","] * 90_000}]
)
def test_punctuation_in_strings_counts_for_nothing(value: object) -> None:
    assert strict_json.parse(json.dumps(value).encode()) == value


def test_the_limit_may_be_raised() -> None:
    assert len(strict_json.parse(b"[%s0]" % (b"0," * 300_000), 300_001)) == 300_001


@given(VALUES)
def test_the_cheap_count_is_an_upper_bound(value: object) -> None:
    def count(value: object) -> int:
        if isinstance(value, dict):
            return 1 + len(value) + sum(map(count, value.values()))
        return 1 + (sum(map(count, value)) if isinstance(value, list) else 0)

    assert count(value) <= strict_json.most_values(json.dumps(value).encode())


@pytest.mark.parametrize("body", [rb'"' + rb"\"" * 500_000, b'["' + b"\\" * 999_999])
def test_strings_without_an_end(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    """Minutes, if every quote were tried as the beginning of a string."""
    monkeypatch.setattr(strict_json, "most_values", lambda _: 1 << 40)
    with pytest.raises(BadRequest) as caught:
        strict_json.parse(body)
    assert caught.value.code == "invalid_json"
