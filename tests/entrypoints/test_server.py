"""A real server with the bundled demo, seen through the openai client and through bare sockets."""

from __future__ import annotations

import io
import json
import socket
import time
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from benchmarks.demo_model.questions import Question, held_out, is_right
from tests.entrypoints.client import ENDLESS, TEXT, data_url, gauge, image_part, over_http, post, refused, user
from tests.live_server import LiveServer, wait_until

JPEG_PART = 128


def alive(server: LiveServer) -> None:
    assert httpx.get(f"{server.base_url}/health", timeout=10).status_code == 200
    assert post(server, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("question", held_out(3, seed=11, min_pictures=4, max_pictures=4, max_turns=1))
def test_four_images_are_answered_streamed_and_not(server: LiveServer, question: Question) -> None:
    with server.openai() as client:
        request = {"model": server.model, "messages": over_http(question.messages), "temperature": 0, "max_tokens": 16}
        whole = client.chat.completions.create(**request)
        assert is_right(question, whole.choices[0].message.content), (question.answer, whole)
        assert whole.choices[0].finish_reason == "stop"
        stream = client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
        *chunks, last = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
        assert last.usage == whole.usage
        assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_models_and_health(server: LiveServer) -> None:
    with server.openai() as client:
        (model,) = client.models.list().data
        assert client.models.retrieve(model.id).id == model.id == server.model
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="other", messages=[{"role": "user", "content": "hi"}])
        assert caught.value.code == "model_not_found"
    health = httpx.get(f"{server.base_url}/health", timeout=10).json()
    assert health["status"] == "ok"
    assert set(health["workers"].values()) == {"ok"}


def test_logprobs_of_both_endpoints(server: LiveServer) -> None:
    with server.openai() as client:
        chat = client.chat.completions.create(
            model=server.model, messages=[{"role": "user", "content": "hello"}], temperature=0, logprobs=True,
            top_logprobs=3, max_tokens=4,
        )  # fmt: skip
        content = chat.choices[0].logprobs.content
        assert len(content) == chat.usage.completion_tokens
        assert "".join(token.token for token in content).startswith(chat.choices[0].message.content)
        for token in content:
            assert len(token.top_logprobs) == 3
            assert token.token == token.top_logprobs[0].token  # greedy
            assert token.logprob == pytest.approx(token.top_logprobs[0].logprob)
            assert token.logprob <= 0
        text = client.completions.create(model=server.model, prompt="hello", temperature=0, logprobs=2, max_tokens=4)
        assert len(text.choices[0].logprobs.token_logprobs) == text.usage.completion_tokens


@pytest.mark.parametrize("content", ["", None, [], [{"type": "text", "text": ""}]])
def test_empty_user_text_is_allowed(server: LiveServer, content: Any) -> None:
    response = post(server, {"messages": [{"role": "user", "content": content}], "max_tokens": 2})
    assert response.status_code == 200, response.text


def test_an_image_url_may_be_a_plain_string(server: LiveServer) -> None:
    url = data_url(Image.new("RGB", (56, 56), "red"))
    parts = ({"type": "image_url", "image_url": url}, TEXT)
    assert post(server, {"messages": user(*parts), "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        [{"content": "hi"}],
        [{"role": "wizard", "content": "hi"}],
        [{"role": "user", "content": [{"type": "video_url", "video_url": "x"}]}],
        [{"role": "user", "content": [{"type": "hologram"}]}],
        [{"role": "user", "content": ["hi"]}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "user", "content": "hi", "tool_calls": [{"id": "1"}]}],
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_messages_that_make_no_sense(server: LiveServer, messages: Any, stream: bool) -> None:
    assert refused(post(server, {"messages": messages, "stream": stream}))["param"].startswith("messages")


@pytest.mark.parametrize("stream", [False, True])
def test_images_that_are_none_are_400_before_any_event(server: LiveServer, stream: bool) -> None:
    rng = np.random.default_rng(1)
    noise = Image.fromarray(rng.integers(0, 256, (120, 160, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    noise.save(buffer, "JPEG")
    good = image_part(noise)
    for bad in (
        image_part(buffer.getvalue()[:-JPEG_PART], "JPEG"),
        image_part(rng.bytes(500)),
        image_part(b""),
        image_part(b"%PDF-1.4 " + rng.bytes(500)),
        image_part(b'<svg xmlns="http://www.w3.org/2000/svg"/>'),
    ):
        error = refused(post(server, {"messages": user(good, bad, good, TEXT), "stream": stream}))
        assert "image 2" in error["message"]
    alive(server)


@pytest.mark.parametrize("stream", [False, True])
def test_the_longest_and_a_too_long_image(server: LiveServer, stream: bool) -> None:
    for width, status in ((1000, 200), (1093, 400)):
        image = Image.new("RGB", (width, 5), "blue")
        response = post(server, {"messages": user(image_part(image), TEXT), "stream": stream, "max_tokens": 2})
        assert response.status_code == status, response.text
        if status == 400:
            refused(response)


def test_a_stop_string_ends_the_text_wherever_it_stands(server: LiveServer) -> None:
    request = {
        "model": server.model, "messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 24,
        "extra_body": ENDLESS,
    }  # fmt: skip
    with server.openai() as client:
        text = client.chat.completions.create(**request).choices[0].message.content
        assert len(text) > 8
        for stop in (text[3:5], text[5:8], [text[4:6] + "\0", text[6:8]], [text[2:9], text[2:7]], text[-3:] + "\0"):
            stops = [stop] if isinstance(stop, str) else stop
            expected = min((text.find(s) for s in stops if s in text), default=len(text))
            whole = client.chat.completions.create(**request, stop=stop).choices[0]
            assert whole.message.content == text[:expected]
            assert whole.finish_reason == ("stop" if expected < len(text) else "length")
            chunks = client.chat.completions.create(**request, stop=stop, stream=True)
            assert "".join(c.choices[0].delta.content or "" for c in chunks) == text[:expected]


@pytest.mark.parametrize("seed", range(3))
def test_streamed_text_is_the_unstreamed_text(server: LiveServer, seed: int) -> None:
    """Hot sampling over byte-level tokens: characters come in several tokens, and broken ones come too."""
    body = {
        "prompt": "é漢😀", "temperature": 2.0, "seed": seed, "max_tokens": 48, "ignore_eos": True,
    }  # fmt: skip
    whole = post(server, body, "/v1/completions").json()["choices"][0]["text"]
    response = post(server, {**body, "stream": True}, "/v1/completions")
    events = [line[6:] for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == whole


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_everything(server: LiveServer, stream: bool) -> None:
    messages = user(image_part(Image.new("RGB", (112, 112), "green")), TEXT)
    body = {"messages": messages, "stream": stream, "max_tokens": 100_000, **ENDLESS}
    data = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        if stream:
            received = b""
            while received.count(b"data: ") < 3:
                received += connection.recv(65536)
        else:
            wait_until(lambda: gauge(server, "kv_blocks_used") > 0, 10, "request running")
    for name in ("requests_running", "requests_waiting", "kv_blocks_used", "embedding_tokens_held"):
        wait_until(lambda name=name: gauge(server, name) == 0, 10, name)
    alive(server)


def test_an_idle_server_uses_no_cpu(server: LiveServer) -> None:
    alive(server)

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in server.processes())

    wait_until(lambda: gauge(server, "requests_running") == 0, 10, "idle")
    before, start = used(), time.monotonic()
    time.sleep(2.0)  # the window that is measured
    assert (used() - before) / (time.monotonic() - start) <= 0.01
