"""A server process from its flags to its exit code: what stops it, what it leaves behind, what its limits refuse."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from PIL import Image

from tests.entrypoints.client import CHAT, COMPLETIONS, ENDLESS, TEXT, image_part, post, refused, user
from tests.live_server import STOP_SECONDS, LiveServer, live_server, wait_until

CONTEXT = 2048
ITEM_TOKENS = 256  # of a 448 x 448 image


@pytest.fixture(scope="module")
def small() -> Iterator[LiveServer]:
    """The baseline scheme with a short context, a key, and much patience with running requests when it stops."""
    flags = (
        "--max-model-len", str(CONTEXT), "--api-key", "s3cret", "--served-model-name", "small", "tiny",
        "--mm-processor-kwargs", '{"max_pixels": 1003520}', "--shutdown-timeout", "600",
    )  # fmt: skip
    with live_server(*flags) as running:
        yield running


def ask(server: LiveServer, body: dict[str, Any], path: str = CHAT) -> httpx.Response:
    return post(server, body, path, Authorization="Bearer s3cret")


def test_the_key_is_asked_for(small: LiveServer) -> None:
    with small.openai() as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with small.openai(api_key="s3cret") as client:
        assert [model.id for model in client.models.list().data] == ["small", "tiny"]
    assert httpx.get(f"{small.base_url}/health", timeout=10).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_images_beyond_the_context_are_refused_with_both_counts(small: LiveServer, stream: bool) -> None:
    image = image_part(Image.new("RGB", (448, 448), "red"))
    for count in (1, 7, 8, 12):
        messages = user(*[image] * count, TEXT)
        response = ask(small, {"messages": messages, "stream": stream, "max_tokens": 1})
        if count * ITEM_TOKENS < CONTEXT - 100:
            assert response.status_code == 200, response.text
        else:
            error = refused(response)
            assert str(count * ITEM_TOKENS) in error["message"]
            assert str(CONTEXT) in error["message"]
            assert error["code"] == "context_length_exceeded"


def test_prompts_around_the_context_length(small: LiveServer) -> None:
    for length, status in ((CONTEXT - 1, 200), (CONTEXT, 400), (CONTEXT + 1, 400), (50 * CONTEXT, 400)):
        body = {"prompt": [40] * length, "ignore_eos": True, "max_tokens": 10**9}
        response = ask(small, body, COMPLETIONS)
        assert response.status_code == status, response.text
        if status == 400:
            assert str(CONTEXT) in refused(response)["message"]
        else:
            answer = response.json()
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == 1


def test_max_tokens(small: LiveServer) -> None:
    body = {"prompt": [40] * (CONTEXT - 9), "ignore_eos": True}
    for wrong in (0, -1):
        assert refused(ask(small, {**body, "max_tokens": wrong}, COMPLETIONS))["param"] == "max_tokens"
    for limit, count in ((1, 1), (9, 9), (10, 9), (10**9, 9), (None, 9)):
        usage = ask(small, {**body, "max_tokens": limit}, COMPLETIONS).json()["usage"]
        assert usage["completion_tokens"] == count


def test_a_long_text_is_refused_quickly(small: LiveServer) -> None:
    error = refused(ask(small, {"messages": [{"role": "user", "content": "word " * 1_000_000}]}))
    assert str(CONTEXT) in error["message"]


def shared_files(server: LiveServer) -> set[Path]:
    """Files in shared memory, and sockets in a file system, that the server's processes have open."""
    files = set()
    for process in server.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            files |= {Path(mapped.path) for mapped in process.memory_maps() if mapped.path.startswith("/dev/shm/")}
            files |= {Path(opened.path) for opened in process.open_files() if opened.path.startswith("/dev/shm/")}
            files |= {Path(c.laddr) for c in process.net_connections("unix") if c.laddr and c.laddr.startswith("/")}
    return files


def read_until(connection: socket.socket, wanted: bytes, count: int = 1) -> bytes:
    received = b""
    while received.count(wanted) < count:
        piece = connection.recv(65536)
        if not piece:
            break
        received += piece
    return received


def endless_stream(server: LiveServer) -> socket.socket:
    """A connection on which a stream of some hundred thousand tokens has begun."""
    body = {"messages": user(image_part(Image.new("RGB", (112, 112))), TEXT), "stream": True, **ENDLESS}
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer s3cret\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    assert read_until(connection, b"data: ", 3).count(b"data: ") >= 3
    return connection


def test_ctrl_c_ends_everything() -> None:
    with live_server("--rserve", "--shutdown-timeout", "0.2") as server, endless_stream(server) as connection:
        idle = httpx.Client()
        assert idle.get(f"{server.base_url}/health").status_code == 200  # a connection that stays open
        processes, files = server.processes(), shared_files(server)
        server.process.send_signal(signal.SIGINT)
        rest = read_until(connection, b"no such bytes")
        assert b'"code":"shutting_down"' in rest
        assert b"[DONE]" not in rest
        assert server.process.wait(STOP_SECONDS) == 0, server.log.read_text()
        idle.close()
        wait_until(lambda: not any(p.is_running() for p in processes), 10, "no process left")
        wait_until(lambda: not any(f.exists() for f in files), 10, "no file left")
        assert "Traceback" not in server.log.read_text()


def test_a_second_signal_does_not_wait(small: LiveServer) -> None:
    """The last test of this server, which it stops."""
    with endless_stream(small):
        processes, files = small.processes(), shared_files(small)
        small.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not _accepts(small.port), 10, "listener closed")
        assert small.process.poll() is None
        small.process.send_signal(signal.SIGTERM)
        assert small.process.wait(STOP_SECONDS) == 128 + signal.SIGTERM
        wait_until(lambda: not any(p.is_running() for p in processes), 15, "no process left")
        wait_until(lambda: not any(f.exists() for f in files), 15, "no file left")


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def start(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gllm.entrypoints.api_server", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("case", ["port in use", "no such host", "no checkpoint"])
def test_what_stops_the_start_is_one_line_and_code_1(tmp_path: Path, case: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        flags = {
            "port in use": ("--port", str(taken.getsockname()[1])),
            "no such host": ("--host", "host.invalid"),
            "no checkpoint": ("--port", "0", "--model-path", str(tmp_path)),
        }[case]
        done = start(*flags)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("api_server: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""


def test_many_at_once(server: LiveServer) -> None:
    """Forty requests from as many threads: every one gets its own answer."""
    answers: dict[int, httpx.Response] = {}

    def one(number: int) -> None:
        body = {"messages": user(TEXT), "max_tokens": 1 + number % 5, "ignore_eos": True, "stream": False}
        answers[number] = post(server, body)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {n: a.json()["usage"]["completion_tokens"] for n, a in answers.items()} == {n: 1 + n % 5 for n in range(40)}
