"""The process that starts workers: it has loaded torch once and forks, so a worker is up in a fraction of the time.

    python -m gllm.worker.launcher FD RUN_DIR

It is also their guard. It reports every worker that ends, and when its owner is gone (FD closed, for whatever reason)
it ends all workers and removes the run directory, with the sockets and the shared memory in it.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from importlib import import_module
from typing import Any

import msgspec

TERM_SECONDS = 5.0  # what workers get to end by themselves
PR_SET_PDEATHSIG = 1
PRELOAD = ("torch", "numpy", "zmq", "safetensors.torch", "gllm.worker.runner")


class Start(msgspec.Struct, frozen=True, tag=True):
    """Fork a worker that calls `target` ("module:function") with `kwargs`."""

    name: str
    target: str
    kwargs: dict[str, Any]


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to a worker."""

    name: str
    signal: int


class Started(msgspec.Struct, frozen=True, tag=True):
    name: str
    pid: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A worker has ended. how: its status or the signal, in words."""

    name: str
    pid: int
    how: str


class Lines:
    """Messages as JSON lines over a stream socket."""

    def __init__(self, incoming: Any) -> None:
        self._decoder = msgspec.json.Decoder(incoming)
        self._buffer = b""

    @staticmethod
    def encode(message: msgspec.Struct) -> bytes:
        return msgspec.json.encode(message) + b"\n"

    def feed(self, data: bytes) -> list[Any]:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [self._decoder.decode(line) for line in lines]


class Launcher:
    def __init__(self, owner: socket.socket, run_dir: str) -> None:
        self._owner = owner
        self._run_dir = run_dir
        self._lines = Lines(Start | Kill)
        self._workers: dict[int, str] = {}
        self._wake_in, self._wake_out = os.pipe()
        for fd in (self._wake_in, self._wake_out):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's business
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        signal.set_wakeup_fd(self._wake_out, warn_on_full_buffer=False)

    def run(self) -> None:
        try:
            while True:
                readable, _, _ = select.select([self._owner, self._wake_in], [], [])
                if self._wake_in in readable:
                    os.read(self._wake_in, 4096)
                    self._reap()
                if self._owner in readable:
                    data = self._owner.recv(1 << 16)
                    if not data:
                        return
                    for message in self._lines.feed(data):
                        self._handle(message)
        except ConnectionError:
            return
        finally:
            self._end_all()
            shutil.rmtree(self._run_dir, ignore_errors=True)

    def _handle(self, message: Start | Kill) -> None:
        if isinstance(message, Start):
            self._start(message)
            return
        for pid, name in self._workers.items():
            if name == message.name:
                os.kill(pid, message.signal)

    def _start(self, message: Start) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._become(message)
        self._workers[pid] = message.name
        self._tell(Started(message.name, pid))

    def _become(self, message: Start) -> None:
        """In the forked worker; never returns."""
        status = 1
        try:
            # If the launcher itself is killed, its workers must not outlive it.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._owner.close()
            os.close(self._wake_in)
            os.close(self._wake_out)
            module, _, function = message.target.partition(":")
            getattr(import_module(module), function)(**message.kwargs)
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _reap(self) -> None:
        while self._workers:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._workers:
                code = os.waitstatus_to_exitcode(status)
                how = f"status {code}" if code >= 0 else f"signal {-code}"
                self._tell(Exited(self._workers.pop(pid), pid, how))

    def _tell(self, message: msgspec.Struct) -> None:
        self._owner.sendall(Lines.encode(message))

    def _end_all(self) -> None:
        signal.set_wakeup_fd(-1)
        for sig, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, TERM_SECONDS)):
            for pid in self._workers:
                # A stopped process cannot end before it goes on.
                os.kill(pid, sig)
                os.kill(pid, signal.SIGCONT)
            deadline = time.monotonic() + seconds
            while self._workers and time.monotonic() < deadline:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid:
                    self._workers.pop(pid, None)
                else:
                    signal.sigtimedwait([signal.SIGCHLD], 0.05)


def main() -> None:
    fd, run_dir = int(sys.argv[1]), sys.argv[2]
    owner = socket.socket(fileno=fd)
    for module in PRELOAD:
        import_module(module)
    Launcher(owner, run_dir).run()


if __name__ == "__main__":
    main()
