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
