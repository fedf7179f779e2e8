"""A launcher process and the socket to it, on the event loop of the API process."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from gllm.worker.launcher import Lines


class LauncherLink:
    """Runs `python -m module FD arguments...`. Messages go to it with `tell`, come from it with on_message; on_end:
    it has ended although nobody closed the link."""

    def __init__(
        self, module: str, arguments: Sequence[str], incoming: Any, on_message: Callable[[Any], None],
        on_end: Callable[[], None], *, environment: Mapping[str, str], pass_fds: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self._on_message = on_message
        self._on_end = on_end
        self._lines = Lines(incoming)
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own: Ctrl-C at a terminal reaches only this process, which then ends the others in order.
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), *arguments], stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), *pass_fds], start_new_session=True, env=environment,
            )  # fmt: skip
        ours.setblocking(False)
        self._socket: socket.socket | None = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._on_readable)

    def tell(self, message: msgspec.Struct) -> None:
        """Nothing, once the launcher is gone."""
        if self._socket is not None:
            self._socket.sendall(Lines.encode(message))

    async def close(self, seconds: float) -> None:
        """Let it end its workers and wait for that; after so many seconds it is killed."""
        self._disconnect()
        try:
            await asyncio.to_thread(self._process.wait, seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    def _disconnect(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _on_readable(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._disconnect()
            self._on_end()
            return
        for message in self._lines.feed(data):
            self._on_message(message)
