"""Two machines on Ray: the same answers as one, a lost worker or machine costs a retry, strangers get nothing.

pytest tests/engine/test_ray.py           pytest -m "not ray"  (everything else)
"""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from gllm.engine.messages import Abort, Codec, Shutdown, ToApi
from tests.engine.network import Host, NoNetwork, hosts
from tests.engine.test_engine import picture
from tests.entrypoints.client import ENDLESS, TEXT, gauge, image_part, post, refused, user
from tests.live_server import LiveServer, live_server, wait_until

NO_RAY = importlib.util.find_spec("ray") is None
pytestmark = [pytest.mark.ray, pytest.mark.skipif(NO_RAY, reason="ray is not installed: pip install rserve[ray]")]

ROOT = Path(__file__).parents[2]
BACK_SECONDS = 60.0
PORT = 6379
CPUS = 3  # of each host: all three workers fit on one
SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"  # how a ZMTP server begins


@dataclass(frozen=True)
class Cluster:
    head: Host
    other: Host
    server: LiveServer
    environment: Mapping[str, str]

    def workers(self) -> dict[str, tuple[str, int]]:
        """Name -> (address, pid) of those that were started last."""
        lines = [line for line in self.server.log.read_text().splitlines() if "workers run on: " in line]
        found = re.findall(r"([a-z]+(?: \d+)?) (\S+) \(pid (\d+)\)", lines[-1].partition("workers run on: ")[2])
        return {name: (address, int(pid)) for name, address, pid in found}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The server on the head, its workers spread over two hosts."""
    try:
        with hosts(2) as (head, other):
            address = f"{head.address}:{PORT}"
            # A token of this test's own, so that Ray neither makes nor takes one in the user's home.
            own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_ADDRESS": address}
            own["RAY_worker_niceness"] = "0"
            own["PYTHONPATH"] = str(ROOT)  # entering a host changes the working directory
            _start_ray(head, own, "--head", f"--port={PORT}", "--include-dashboard=false")
            _start_ray(other, own, f"--address={address}")
            flags = (
                "--host", head.address, "--rserve", "--pp", "2", "--encoders", "1", "--no-pin-cores",
                "--distributed-executor-backend", "ray", "--ray-placement", "spread",
            )  # fmt: skip
            with live_server(*flags, prefix=head.prefix, environment=own) as server:
                yield Cluster(head, other, server, own)
    except NoNetwork as error:
        pytest.skip(str(error))


def _start_ray(host: Host, environment: Mapping[str, str], *arguments: str) -> None:
    command = (sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={host.address}")
    small = (f"--num-cpus={CPUS}", "--object-store-memory=100000000", "--disable-usage-stats")
    host.run(*command, *small, *arguments, **environment)


def tokens(server: LiveServer, num_pictures: int) -> list[str]:
    """Greedy output tokens for a prompt with so many pictures."""
    content = [image_part(picture(seed, 112 + 28 * seed, 140)) for seed in range(num_pictures)]
    body = {"messages": user(*content, TEXT), "temperature": 0, "max_tokens": 12, "logprobs": True, "ignore_eos": True}
    response = post(server, body)
    assert response.status_code == 200, response.text
    return [token["token"] for token in response.json()["choices"][0]["logprobs"]["content"]]


@pytest.fixture(scope="module")
def expected(server: LiveServer) -> dict[int, list[str]]:
    """By number of pictures, from a server whose workers are plain processes."""
    return {count: tokens(server, count) for count in (0, 1, 4)}


def test_two_machines_answer_as_one(cluster, expected):
    assert {address for address, _ in cluster.workers().values()} == {cluster.head.address, cluster.other.address}
    assert {count: tokens(cluster.server, count) for count in expected} == expected
    for name in ("pixel_bytes_in_driver", "pixel_bytes_shared", "embedding_tokens_held", "kv_blocks_used"):
        wait_until(lambda name=name: gauge(cluster.server, name) == 0, 10, name)


def test_a_peer_without_keys_gets_nothing(cluster, expected):
    """It finds the control port among all of the host, and would end the server if it were heard."""
    address, pid = cluster.workers()["driver"]
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    listening = {int(local.partition(":")[2], 16) for _, local, _, state, *_ in rows if state == "0A"}
    (port,) = (port for port in listening if _greeting(address, port) == SIGNATURE)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.IDENTITY, b"api")
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(f"tcp://{address}:{port}")
        for message in (Abort(0), Shutdown()):
            stranger.send(Codec(ToApi).encode(message))
        assert not stranger.poll(1000)
    assert tokens(cluster.server, 1) == expected[1]


def _greeting(address: str, port: int) -> bytes:
    """What whoever listens there says unasked."""
    try:
        with socket.create_connection((address, port), timeout=1) as connection:
            return connection.recv(64)
    except OSError:
        return b""


def lose(cluster: Cluster, what: Any) -> float:
    """Call `what` while a request is running, which has to get a 503; seconds until there is service again."""
    body = {"messages": user(image_part(picture(0)), TEXT), "max_tokens": 3000, **ENDLESS}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(post, cluster.server, body)
        wait_until(lambda: gauge(cluster.server, "requests_running") == 1, 20, "the request runs")
        what()
        lost = time.monotonic()
        error = refused(running.result(BACK_SECONDS), 503)
    assert "lost a worker" in error["message"]
    health = f"{cluster.server.base_url}/health"
    assert httpx.get(health, timeout=10).status_code == 503
    wait_until(lambda: httpx.get(health, timeout=10).status_code == 200, BACK_SECONDS, "service again")
    return time.monotonic() - lost


def test_a_lost_worker_costs_a_503_and_service_comes_back(cluster, expected, record_property):
    _, pid = cluster.workers()["stage 1"]
    record_property("seconds", lose(cluster, lambda: os.kill(pid, signal.SIGKILL)))
    assert tokens(cluster.server, 4) == expected[4]


def test_a_lost_encoder_is_replaced_and_no_request_is_lost(cluster, expected):
    _, pid = cluster.workers()["encoder 0"]
    os.kill(pid, signal.SIGKILL)
    assert tokens(cluster.server, 4) == expected[4]


def start(prefix: tuple[str, ...], environment: Mapping[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-m", "gllm.entrypoints.api_server", "--port", "0", *flags]
    return subprocess.run(
        [*command, "--distributed-executor-backend", "ray"], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_a_cluster_that_is_too_small_is_told_in_one_line(cluster):
    done = start(cluster.head.prefix, cluster.environment, "--pp", "2", "--llm-threads", "1000")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("api_server: 2 workers need 2000 CPUs, the Ray cluster has")


def test_a_cluster_that_is_not_there_is_told_in_one_line():
    done = start((), {"RAY_ADDRESS": "127.0.0.1:1"})
    assert done.returncode == 1
    assert "RAY_ADDRESS 127.0.0.1:1 does not answer" in done.stderr.splitlines()[-1]


def test_a_lost_machine_costs_a_503_and_the_other_takes_over(cluster, expected, record_property):
    """The last test: the other machine stays off."""
    seconds = lose(cluster, cluster.other.power_off)
    record_property("seconds", seconds)
    assert seconds < BACK_SECONDS
    assert {address for address, _ in cluster.workers().values()} == {cluster.head.address}
    assert tokens(cluster.server, 4) == expected[4]
