"""A real server process for tests: started with flags, stopped with a signal, checked for what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil

START_SECONDS = 90.0
STOP_SECONDS = 30.0
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class LiveServer:
    """base_url is without /v1. model: the first served name."""

    base_url: str
    model: str
    flags: tuple[str, ...]
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def port(self) -> int:
        return int(self.base_url.rpartition(":")[2])

    def openai(self, **options: object) -> openai.OpenAI:
        """A client that does not retry, so that a test sees what the server says."""
        settings = {"api_key": "none", "max_retries": 0, "timeout": 60.0, **options}
        return openai.OpenAI(base_url=f"{self.base_url}/v1", **settings)

    def processes(self) -> list[psutil.Process]:
        """The server's process and all that came from it."""
        parent = psutil.Process(self.pid)
        return [parent, *parent.children(recursive=True)]


def wait_until(condition: object, seconds: float, what: str) -> None:
    """Poll until `condition()` holds. Raises AssertionError naming `what` when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.02)


@contextlib.contextmanager
def live_server(
    *flags: str, prefix: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[LiveServer]:
    """A server on a free port, ready to answer. At the end it has to stop cleanly, unless the test has stopped it.
    prefix: a command that runs it somewhere else. environment: in addition to this process's."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "stderr")
        command = [*prefix, sys.executable, "-m", "gllm.entrypoints.api_server", "--port", "0", *flags]
        with log.open("wb") as stderr, Path(folder, "stdout").open("wb") as stdout:
            process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env={**os.environ, **(environment or {})})
        try:
            model, base_url = _ready(process, Path(folder, "stdout"), log)
            yield LiveServer(base_url, model, flags, process, log)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                assert process.wait(STOP_SECONDS) == 0, log.read_text()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _ready(process: subprocess.Popen[bytes], stdout: Path, log: Path) -> tuple[str, str]:
    """Model name and URL, from the line that the server prints when it is ready."""
    wait_until(lambda: process.poll() is not None or b"\n" in stdout.read_bytes(), START_SECONDS, "server start")
    line = stdout.read_text()
    assert line.startswith("Serving "), f"exit code {process.poll()}: {log.read_text()}"
    names, _, url = line.removeprefix("Serving ").strip().rpartition(" on ")
    return names.split(", ")[0], url
