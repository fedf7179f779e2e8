"""data: URLs: the bytes decide, however the URL is written; what is not base64 is refused."""

from __future__ import annotations

import base64
import re
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.errors import BadRequest
from gllm.media import data_url
from gllm.media.data_url import read_data_url

LIMIT = 1 << 20


def encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    "head",
    [
        "data:image/jpeg;charset=utf-8;base64,", "data:;base64,", "DATA:image/png;BASE64,", "data:image/png;base64,",
        "data:text/html;base64,", "data: image/png ; base64 ,", "data:image/svg+xml;name=a.svg;Base64,",
    ],
)  # fmt: skip
def test_the_label_does_not_matter(head: str) -> None:
    assert data_url.is_data_url(head)
    assert read_data_url(head + encode(b"\xfb\xff\x00abc"), LIMIT) == b"\xfb\xff\x00abc"


@given(data=st.binary(max_size=300), width=st.integers(1, 80), safe=st.booleans(), pad=st.booleans(), pct=st.booleans())
def test_spellings_of_base64(data: bytes, width: int, safe: bool, pad: bool, pct: bool) -> None:
    text = encode(data)
    text = text.replace("+", "-").replace("/", "_") if safe else text
    text = text if pad else text.rstrip("=")
    text = "\r\n".join(re.findall(f".{{1,{width}}}", text))
    text = quote(text, safe="") if pct else text
    assert read_data_url("data:image/png;base64," + text, LIMIT) == data


@pytest.mark.parametrize("pieces", [3, 5, 64])
def test_pieces_join_whatever_their_size(monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    monkeypatch.setattr(data_url, "_PIECE_CHARS", pieces)
    for size in range(40):
        data = bytes(range(size))
        assert read_data_url("data:;base64," + encode(data), LIMIT) == data
        assert read_data_url("data:;base64," + quote(encode(data) + "\n", safe=""), LIMIT) == data


def test_a_prefix_is_enough_for_a_header() -> None:
    url = "data:;base64," + encode(bytes(700_000))
    assert len(read_data_url(url, LIMIT, prefix=1000)) == 1000
    assert len(read_data_url(url, LIMIT, prefix=800_000)) == 700_000


def test_percent_encoded_bytes() -> None:
    assert read_data_url("data:image/svg+xml,%3Csvg%2F%3E", LIMIT) == b"<svg/>"
    with pytest.raises(BadRequest, match="base64"):
        read_data_url("data:image/png," + "%41" * 500_000, LIMIT)


@pytest.mark.parametrize(
    "payload", ["****", "AAAA=AAA", "AA==AA==", "AAA=A", "A", "AAAAA", "AA===", "ÄÄÄÄ", "AAAA\0", "AAAA\ud800", "====="]
)
def test_what_is_not_base64_is_refused(payload: str) -> None:
    with pytest.raises(BadRequest, match="base64"):
        read_data_url("data:image/png;base64," + payload, LIMIT)


def test_padding_inside_a_long_payload_is_refused() -> None:
    for text in (encode(bytes(500_002)) + encode(bytes(500_000)), "AA==" + "\n" * 600_000 + "AAAA"):
        with pytest.raises(BadRequest, match="base64"):
            read_data_url("data:;base64," + text, LIMIT)


def test_size_limit() -> None:
    assert len(read_data_url("data:;base64," + encode(bytes(1000)), 1000)) == 1000
    for size in (1001, 5000):
        with pytest.raises(BadRequest, match="1,000 bytes"):
            read_data_url("data:;base64," + encode(bytes(size)), 1000)


def test_no_comma() -> None:
    with pytest.raises(BadRequest, match="comma"):
        read_data_url("data:image/png;base64" + "A" * 5000 + ",", LIMIT)
