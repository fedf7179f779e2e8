"""The HTTP layer in front of a scripted engine: errors, overload, the key, streams that fail, clients that leave."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from typing import Any

import httpx
import pytest

from gllm.errors import BadRequest, Overloaded
from gllm.outputs import Delta
from tests.entrypoints.scripted_engine import HELLO, Health, Running, ScriptedEngine, running

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
DEADLINE = 10.0


def in_loop(test: Any) -> Any:
    """Run an async test to its end."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 3 * DEADLINE))

    return run


def client(server: Running) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=DEADLINE)


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def events(text: str) -> list[Any]:
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(0.005)


@in_loop
async def test_every_error_has_openais_body() -> None:
    big = b'{"messages": "' + b"x" * 2000 + b'"}'
    as_json = {"content-type": "application/json"}
    cases = [
        ("GET", "/nowhere", b"", {}, 404),
        ("GET", "/v1/nowhere", b"", {}, 404),
        ("GET", "/v1/chat/completions", b"", {}, 405),
        ("POST", "/health", b"", {}, 405),
        ("GET", "/v1/models/other", b"", {}, 404),
        ("POST", "/v1/chat/completions", b"{", as_json, 400),
        ("POST", "/v1/chat/completions", b"", as_json, 400),
        ("POST", "/v1/chat/completions", b"[]", as_json, 400),
        ("POST", "/v1/chat/completions", b"\xff{}", as_json, 400),
        ("POST", "/v1/chat/completions", b"{}", {"content-type": "text/plain"}, 415),
        ("POST", "/v1/chat/completions", b"{}", {}, 415),
        ("POST", "/v1/chat/completions", big, as_json, 413),
        ("POST", "/v1/completions", b'{"prompt": "a", "model": "other"}', as_json, 404),
    ]
    async with running(ScriptedEngine(), max_request_bytes=1000) as server, client(server) as http:
        for method, path, body, headers, status in cases:
            response = await http.request(method, path, content=body, headers=headers)
            assert response.status_code == status, (method, path, response.text)
            assert error_of(response)["message"]
            assert "date" in response.headers
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200


@in_loop
async def test_a_body_without_a_length_is_cut_off_too() -> None:
    async def pieces() -> Any:
        for _ in range(100):
            yield b" " * 100

    async with running(ScriptedEngine(), max_request_bytes=1000) as server, client(server) as http:
        headers = {"content-type": "application/json"}
        response = await http.post("/v1/completions", content=pieces(), headers=headers)
        assert response.status_code == 413
        assert error_of(response)["code"] == "request_too_large"


@in_loop
async def test_an_upload_that_stalls_is_given_up() -> None:
    async with running(ScriptedEngine(), body_timeout=0.05) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"
        )
        assert b" 408 " in await reader.readline()
        writer.close()
        await eventually(lambda: len(server.service.in_flight) == 0)


@in_loop
async def test_a_fault_of_ours_is_a_500_that_tells_nothing() -> None:
    async with running(ScriptedEngine(admit=ValueError("secret path"))) as server, client(server) as http:
        response = await http.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 500
        assert error_of(response)["type"] == "server_error"
        assert "secret" not in response.text
        metrics = (await http.get("/metrics")).text
        assert 'rserve_http_requests_total{path="/v1/chat/completions",status="500"} 1.0' in metrics


@in_loop
async def test_the_key_protects_v1_and_nothing_else() -> None:
    async with running(ScriptedEngine(), api_key="s3cret") as server, client(server) as http:
        for value in (None, "Bearer", "Bearer wrong", "Basic s3cret", "s3cret", "Bearer s3cret2"):
            response = await http.get("/v1/models", headers={"authorization": value} if value else {})
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
        assert (await http.get("/v1/models", headers={"authorization": "bearer s3cret"})).status_code == 200
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/metrics")).status_code == 200


@in_loop
async def test_overload_is_a_503_that_says_when_to_come_back() -> None:
    async with running(ScriptedEngine(admit=Overloaded("full"))) as server, client(server) as http:
        for stream in (False, True):
            response = await http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) > 0
            assert error_of(response)["type"] == "service_unavailable"


@in_loop
async def test_requests_above_the_limit_get_503_and_the_others_their_answer() -> None:
    go = asyncio.Event()
    async with running(ScriptedEngine(go, *HELLO), max_requests=2) as server, client(server) as http:
        first = [asyncio.create_task(http.post("/v1/chat/completions", json=CHAT)) for _ in range(2)]
        await eventually(lambda: len(server.service.in_flight) == 2)
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 503
        go.set()
        assert [(await task).status_code for task in first] == [200, 200]
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_an_error_before_the_first_token_keeps_its_status(stream: bool) -> None:
    engine = ScriptedEngine(BadRequest("image 2 is corrupt", param="messages[0].content[1]"))
    async with running(engine) as server, client(server) as http:
        response = await http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        assert response.status_code == 400
        assert response.headers["content-type"] == "application/json"
        assert error_of(response)["param"] == "messages[0].content[1]"
        assert engine.streams[0].closed.is_set()


@pytest.mark.parametrize("error", [Overloaded("a worker died"), RuntimeError("secret")])
@in_loop
async def test_an_error_in_mid_stream_is_an_event_and_no_done_follows(error: Exception) -> None:
    engine = ScriptedEngine(HELLO[0], error)
    async with running(engine) as server, client(server) as http:
        response = await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert response.status_code == 200
        *chunks, last = events(response.text)
        assert [c["choices"][0]["delta"].get("content") for c in chunks] == ["", "Hel"]
        assert last["error"]["type"] == ("service_unavailable" if isinstance(error, Overloaded) else "server_error")
        assert "secret" not in response.text
        assert engine.streams[0].closed.is_set()
        assert 'generations_total{outcome="error"} 1.0' in (await http.get("/metrics")).text


@in_loop
async def test_an_error_after_the_first_token_of_an_unstreamed_answer_has_its_status() -> None:
    async with running(ScriptedEngine(HELLO[0], Overloaded("a worker died"))) as server, client(server) as http:
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 503


@in_loop
async def test_a_stream_has_role_text_usage_and_done() -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    async with running(ScriptedEngine()) as server, client(server) as http:
        response = await http.post("/v1/chat/completions", json=body)
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, usage, done = events(response.text)
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == "Hello"
        assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "stop"]
        assert all(c["usage"] is None for c in chunks)
        assert usage["choices"] == []
        assert usage["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        assert done == "[DONE]"
        metrics = (await http.get("/metrics")).text
        for line in ("output_tokens_total 4.0", "image_tokens_total 2.0", "time_to_first_token_seconds_count 1.0"):
            assert f"rserve_{line}" in metrics
        assert "rserve_requests_running 1.0" in metrics


@in_loop
async def test_no_event_is_sent_for_an_incomplete_character() -> None:
    engine = ScriptedEngine(Delta("", (1,)), Delta("", (2,)), Delta("é", (3,), finish_reason="length"))
    async with running(engine) as server, client(server) as http:
        response = await http.post("/v1/completions", json={"prompt": "a", "stream": True})
        (chunk, done) = events(response.text)
        assert chunk["choices"][0] == {"index": 0, "text": "é", "logprobs": None, "finish_reason": "length"}
        assert done == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", ["admission", "first token", "next token"])
@in_loop
async def test_a_client_that_leaves_ends_the_request(stream: bool, moment: str) -> None:
    never = asyncio.Event()
    scripts = {"admission": (), "first token": (never,), "next token": (HELLO[0], never)}
    engine = ScriptedEngine(*scripts[moment], admit=never if moment == "admission" else None)
    async with running(engine) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = json.dumps({**CHAT, "stream": stream}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        await engine.submitting.wait()
        if moment != "admission":
            await eventually(lambda: bool(engine.streams))
            await engine.streams[0].waiting.wait()
        writer.close()
        await (engine.submit_cancelled if moment == "admission" else engine.streams[0].closed).wait()
        await eventually(lambda: len(server.service.in_flight) == 0)
        async with client(server) as http:
            await eventually(lambda: not server.service.in_flight)
            assert 'generations_total{outcome="client_left"} 1.0' in (await http.get("/metrics")).text


@in_loop
async def test_a_client_that_leaves_while_its_text_is_tokenised_is_not_submitted() -> None:
    engine, entered, go = ScriptedEngine(), threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        go.wait(DEADLINE)

    engine.prepare = slow
    async with running(engine) as server, client(server) as http:
        request = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
        await eventually(entered.is_set)
        assert (await http.get("/health")).status_code == 200  # the loop is free meanwhile
        request.cancel()
        await eventually(lambda: len(server.service.in_flight) == 0)
        go.set()
        assert not engine.streams


@in_loop
async def test_a_client_that_leaves_while_sending_its_body() -> None:
    async with running(ScriptedEngine()) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"
        )
        await eventually(lambda: len(server.service.in_flight) == 1)
        writer.close()
        await eventually(lambda: len(server.service.in_flight) == 0)


@in_loop
async def test_health_tells_which_worker_is_down() -> None:
    engine = ScriptedEngine()
    engine.answer = Health(False, {"driver": "ok", "encoder 0": "no heartbeat for 12 s"})
    async with running(engine) as server, client(server) as http:
        response = await http.get("/health")
        assert response.status_code == 503
        assert response.json()["workers"]["encoder 0"] == "no heartbeat for 12 s"


@in_loop
async def test_numbers_that_the_engine_does_not_report_any_more_are_absent() -> None:
    engine = ScriptedEngine()
    async with running(engine) as server, client(server) as http:
        assert "rserve_requests_running 1.0" in (await http.get("/metrics")).text
        engine.gauges = {}
        assert "rserve_requests_running" not in (await http.get("/metrics")).text


@pytest.mark.parametrize("wanted", [False, True])
def test_the_access_log_is_written_when_asked_for(wanted: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> None:
        async with running(ScriptedEngine(), access_log=wanted) as server, client(server) as http:
            await http.get("/health")

    asyncio.run(ask())
    assert ('"GET /health HTTP/1.1" 200' in caplog.text) == wanted


@in_loop
async def test_stopping_ends_running_requests_with_an_error() -> None:
    never = asyncio.Event()
    engine = ScriptedEngine(HELLO[0], never)
    async with running(engine, shutdown_timeout=0.05) as server, client(server) as http:
        streamed = asyncio.create_task(http.post("/v1/chat/completions", json={**CHAT, "stream": True}))
        whole = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
        await eventually(lambda: len(engine.streams) == 2 and all(s.waiting.is_set() for s in engine.streams))
        server.stop.set()
        assert events((await streamed).text)[-1]["error"]["code"] == "shutting_down"
        assert (await whole).status_code == 503
        await server.done
        assert all(stream.closed.is_set() for stream in engine.streams)


@in_loop
async def test_stopping_lets_a_running_request_finish_in_its_time() -> None:
    go = asyncio.Event()
    engine = ScriptedEngine(HELLO[0], go, *HELLO[1:])
    async with running(engine, shutdown_timeout=DEADLINE) as server, client(server) as http:
        request = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
        await eventually(lambda: bool(engine.streams) and engine.streams[0].waiting.is_set())
        server.stop.set()
        go.set()
        assert (await request).json()["choices"][0]["message"]["content"] == "Hello"


@in_loop
async def test_models_are_listed_under_all_their_names() -> None:
    async with running(ScriptedEngine()) as server, client(server) as http:
        assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == ["m", "n"]
        assert (await http.get("/v1/models/n")).json()["max_model_len"] == 128
        assert (await http.post("/v1/chat/completions", json={**CHAT, "model": "n"})).json()["model"] == "n"
        without = {"messages": CHAT["messages"]}
        assert (await http.post("/v1/chat/completions", json=without)).json()["model"] == "m"


@in_loop
async def test_defaults_of_the_checkpoint_and_of_the_template_give_way_to_the_request() -> None:
    engine = ScriptedEngine()
    async with running(engine) as server, client(server) as http:
        await http.post("/v1/chat/completions", json=CHAT)
        assert engine.params[-1].temperature == 0.25
        assert engine.template == (True, None)
        settings = {"add_generation_prompt": False, "chat_template_kwargs": {"add_vision_id": False}}
        await http.post("/v1/chat/completions", json={**CHAT, "temperature": 1, **settings})
        assert engine.params[-1].temperature == 1
        assert engine.template == (False, {"add_vision_id": False})
