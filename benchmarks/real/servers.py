"""Server processes of all schemes for measured runs: how each is started, bound to cores, waited for and ended."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.results import ROOT
from benchmarks.systems import system

MODEL_NAME = "bench"
KV_GIB = 1  # on CPUs; vLLM takes whole ones
START_SECONDS = 600.0  # vLLM compiles its kernels first
STOP_SECONDS = 30.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h
TICKS = os.sysconf("SC_CLK_TCK")


class ServerFailed(RuntimeError):
    """A server did not start or ended too early; the message holds the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all systems share. cores: CPU cores of the server's processes. kv_gib: memory for KV, None: as the engine
    finds it. extra: further flags of our server."""

    checkpoint: Path
    cores: tuple[int, ...]
    token_budget: int = 2048
    max_images: int = 8
    kv_gib: int | None = KV_GIB
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """How a server is started. url: where it will answer, None: it prints that when it is ready. rests: it uses no CPU
    while nothing is asked of it."""

    args: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    url: str | None = None
    rests: bool = True


@dataclass(slots=True)
class Server:
    """A running server, ready to answer."""

    system: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    command: Command

    def cpu_seconds(self) -> float:
        """CPU time that its processes have used so far, those of children that ended included."""
        return sum(process_cpu_seconds(pid) for pid in _tree(self.process.pid))

    def pause(self) -> None:
        """Stop all its processes where they are, unless it rests by itself."""
        if not self.command.rests:
            self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        if not self.command.rests:
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in _tree(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def check(self) -> None:
        """Raises ServerFailed when it has ended."""
        if self.process.poll() is not None:
            raise ServerFailed(f"{self.system} ended with status {self.process.returncode}: {_tail(self.log)}")


def our_command(name: str, setting: Setting, log: Path | None = None) -> Command:
    """Our API server under the flags of a scheme. log: where its event log goes. Raises UnknownName."""
    kv = () if setting.kv_gib is None else ("--kv-cache-memory-bytes", str(setting.kv_gib << 30))
    events = () if log is None else ("--event-log", str(log))
    args = (
        sys.executable, "-m", "gllm.entrypoints.api_server", "--port", "0", "--model-path", str(setting.checkpoint),
        "--served-model-name", MODEL_NAME, "--generation-config", "none",
        "--max-num-batched-tokens", str(setting.token_budget),
        "--limit-mm-per-prompt", f'{{"image": {setting.max_images}}}', *kv, *events, *system(name).flags,
        *setting.extra,
    )  # fmt: skip
    return Command(args)


def vllm_command(python: str, setting: Setting) -> Command:
    """vLLM's CPU server with the same budget and limits, its caches across requests off, one thread a core. Its own
    defaults otherwise."""
    port = _free_port()
    args = (
        python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port),
        "--model", str(setting.checkpoint), "--served-model-name", MODEL_NAME, "--generation-config", "vllm",
        "--dtype", "bfloat16", "--max-model-len", "16384", "--max-num-seqs", "128",
        "--max-num-batched-tokens", str(setting.token_budget), "--no-enable-prefix-caching",
        "--mm-processor-cache-gb", "0", "--limit-mm-per-prompt", f'{{"image": {setting.max_images}, "video": 0}}',
    )  # fmt: skip
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, setting.cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(setting.kv_gib or KV_GIB),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    # Measured idle: about a sixth of a core.
    return Command(args, env, f"http://127.0.0.1:{port}", rests=False)


@contextlib.contextmanager
def start(name: str, command: Command, cores: Sequence[int], folder: Path) -> Iterator[Server]:
    """The server, ready to answer, bound to `cores` with all its children; its log is in `folder`. Raises
    ServerFailed. At the end the whole process group is ended."""
    log, out = folder / f"{name}.stderr", folder / f"{name}.stdout"
    with log.open("wb") as stderr, out.open("wb") as stdout:
        process = subprocess.Popen(
            command.args, cwd=ROOT, stdout=stdout, stderr=stderr, stdin=subprocess.DEVNULL, start_new_session=True,
            env=os.environ | command.env, preexec_fn=lambda: _settle(cores),
        )  # fmt: skip
    server = Server(name, command.url or "", process, log, command)
    try:
        server.url = _wait(server, out)
        yield server
    finally:
        server.resume()
        _stop(process)


def _settle(cores: Sequence[int]) -> None:
    """In the new process: bound to its cores, and ended with the runner, however that ends."""
    os.sched_setaffinity(0, cores)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(server: Server, out: Path) -> str:
    """Its URL, once it answers."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        server.check()
        url = server.url or _printed_url(out)
        if url and _answers(url):
            return url
        time.sleep(0.1)
    raise ServerFailed(f"{server.system} was not ready after {START_SECONDS:g} s: {_tail(server.log)}")


def _printed_url(out: Path) -> str:
    line = out.read_text(errors="replace")
    return line.strip().rpartition(" on ")[2] if line.startswith("Serving ") and line.endswith("\n") else ""


def _answers(url: str) -> bool:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=5.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL for what is left of its process group."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tree(pid: int) -> list[int]:
    """The process and all that came from it."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (fields := _stat(int(folder.name))):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found


def process_cpu_seconds(pid: int) -> float:
    """Of one process and its children that have ended: utime, stime, cutime and cstime."""
    return sum(map(int, _stat(pid)[11:15])) / TICKS


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on (the name before it may hold spaces); none when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _tail(log: Path) -> str:
    """The end of what it said, on stderr and then (vLLM's log) on stdout."""
    said = [path.read_text(errors="replace")[-1500:] for path in (log, log.with_suffix(".stdout")) if path.exists()]
    return "\n".join(said)
