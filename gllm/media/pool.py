"""Threads that take the most urgent piece of work first, within a bound on the memory of what runs at once."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(order=True, slots=True)
class _Job:
    priority: int
    order: int
    cost: int = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    future: Future[Any] = field(compare=False)


class Pool:
    """`threads` daemon threads. The job with the lowest priority number runs first; jobs of equal priority run in
    order. The costs of running jobs stay within `capacity`, except that a job alone may exceed it."""

    def __init__(self, name: str, threads: int, capacity: int = 1 << 62) -> None:
        self._capacity = capacity
        self._used = 0
        self._jobs: list[_Job] = []
        self._order = itertools.count()
        self._closed = False
        self._changed = threading.Condition()
        for index in range(threads):
            threading.Thread(target=self._serve, name=f"{name}-{index}", daemon=True).start()

    def submit(self, priority: int, work: Callable[[], T], cost: int = 0) -> asyncio.Future[T]:
        """Run `work` in a thread; the result is for the running event loop. Cancelling drops a
        job that has not begun by the loop's next turn."""
        job = _Job(priority, next(self._order), cost, work, Future())
        with self._changed:
            if self._closed:
                raise RuntimeError("the pool is closed")
            heapq.heappush(self._jobs, job)
            self._changed.notify_all()
        return asyncio.wrap_future(job.future)

    def close(self) -> None:
        """Drop what has not begun; threads end after what they are doing."""
        with self._changed:
            self._closed = True
            for job in self._jobs:
                job.future.cancel()
            self._jobs.clear()
            self._changed.notify_all()

    def _serve(self) -> None:
        while (job := self._take()) is not None:
            self._run(job)
            del job  # a waiting thread must not keep an image alive

    def _take(self) -> _Job | None:
        with self._changed:
            while not self._closed:
                while self._jobs and self._jobs[0].future.cancelled():
                    heapq.heappop(self._jobs)
                if self._jobs and (self._used == 0 or self._used + self._jobs[0].cost <= self._capacity):
                    job = heapq.heappop(self._jobs)
                    self._used += job.cost
                    return job
                self._changed.wait()
            return None

    def _run(self, job: _Job) -> None:
        try:
            if job.future.set_running_or_notify_cancel():
                try:
                    result = job.work()
                except BaseException as error:
                    job.future.set_exception(error)
                else:
                    job.future.set_result(result)
        finally:
            with self._changed:
                self._used -= job.cost
                self._changed.notify_all()
