"""The requests inside the server, and how one is ended from outside: its client left, or the server stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

from gllm.entrypoints.http_errors import ClientLeft
from gllm.errors import Overloaded


class InFlight:
    """All requests that run. At most `limit` are let in, so that waiting ones cannot fill the memory."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._interrupts: set[Interrupt] = set()
        self._stopping = False

    def __len__(self) -> int:
        return len(self._interrupts)

    def enter(self) -> Interrupt:
        """A context for the task of a new request. Raises Overloaded."""
        if self._stopping:
            raise _stopping()
        if len(self._interrupts) >= self._limit:
            raise Overloaded(f"The server holds {self._limit} requests, which is its limit; try again later.")
        return Interrupt(self._interrupts)

    def stop(self) -> None:
        """End every request with an error, and let no further one in."""
        self._stopping = True
        for interrupt in list(self._interrupts):
            interrupt.fire(_stopping())


class Interrupt:
    """Runs its block in the current task until `fire(error)`: then the block is cancelled wherever it waits, cleans up,
    and `error` is raised from it instead of CancelledError. A cancellation from elsewhere stays a cancellation."""

    def __init__(self, registry: set[Interrupt]) -> None:
        self._registry = registry
        self._error: Exception | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Interrupt:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._registry.add(self)
        return self

    def watch(self, receive: Callable[[], Awaitable[Any]]) -> None:
        """From now on (the body has been read) end the block when the client leaves."""
        self._watcher = asyncio.create_task(self._wait_for_disconnect(receive))

    def fire(self, error: Exception) -> None:
        """Only the first error counts; without effect once the block has ended."""
        if self in self._registry and self._error is None:
            self._error = error
            self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._registry.discard(self)
        if self._watcher is not None:
            self._watcher.cancel()
        if self._error is None:
            return
        if kind is None or not issubclass(kind, asyncio.CancelledError):
            # The block ended by itself in the very moment of the interrupt: take the cancellation that is under way.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            self._task.uncancel()
        elif self._task.uncancel() <= self._cancelling:
            raise self._error from None

    async def _wait_for_disconnect(self, receive: Callable[[], Awaitable[Any]]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.fire(ClientLeft())


def _stopping() -> Overloaded:
    return Overloaded("The server is shutting down.", code="shutting_down")
