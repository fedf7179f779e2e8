"""The pool's promises: most urgent first, costs within the capacity, cancelled work dropped, threads that survive."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Coroutine
from typing import Any

import pytest

from gllm.media.pool import Pool


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


def test_the_most_urgent_runs_first_and_equals_in_order() -> None:
    async def test() -> None:
        pool, gate, done = Pool("test", 1), threading.Event(), []
        blocker = pool.submit(0, gate.wait)
        jobs = [pool.submit(p, lambda p=p, n=n: done.append((p, n))) for n, p in enumerate([3, 1, 2, 1, 0])]
        gate.set()
        await asyncio.gather(blocker, *jobs)
        assert done == [(0, 4), (1, 1), (1, 3), (2, 2), (3, 0)]
        pool.close()

    run(test())


def test_costs_stay_within_the_capacity_but_a_large_job_runs_alone() -> None:
    async def test() -> None:
        pool, lock, running, peaks = Pool("test", 4, capacity=10), threading.Lock(), [0], []

        def work(cost: int) -> None:
            with lock:
                running[0] += cost
                peaks.append((running[0], cost))
            threading.Event().wait(0.001)
            with lock:
                running[0] -= cost

        costs = [4, 4, 4, 9, 25, 1, 2, 3, 10, 25, 4] * 3
        await asyncio.gather(*(pool.submit(0, lambda c=c: work(c), cost=c) for c in costs))
        assert all(total <= 10 or total == cost for total, cost in peaks)
        assert len(peaks) == len(costs)
        pool.close()

    run(test())


def test_cancelled_work_is_never_begun() -> None:
    async def test() -> None:
        pool, gate, done = Pool("test", 1), threading.Event(), []
        blocker = pool.submit(0, gate.wait)
        jobs = [pool.submit(1, lambda n=n: done.append(n)) for n in range(4)]
        jobs[1].cancel()
        jobs[3].cancel()
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(blocker, *jobs, return_exceptions=True)
        await pool.submit(9, lambda: None)
        assert done == [0, 2]
        pool.close()

    run(test())


def test_errors_reach_the_caller_and_threads_survive() -> None:
    async def test() -> None:
        pool = Pool("test", 1)

        def fail(error: BaseException) -> None:
            raise error

        for error in (ValueError("x"), SystemExit(), MemoryError()):
            with pytest.raises(type(error)):
                await pool.submit(0, lambda error=error: fail(error))
        assert await pool.submit(0, lambda: 7) == 7
        pool.close()
        with pytest.raises(RuntimeError):
            pool.submit(0, lambda: 7)

    run(test())


def test_an_idle_thread_keeps_nothing_alive() -> None:
    class Big:
        pass

    async def test() -> None:
        pool, big = Pool("test", 1), Big()
        ref = weakref.ref(big)
        result = await pool.submit(0, lambda big=big: big)
        await pool.submit(0, lambda: None)
        del big, result
        gc.collect()
        assert ref() is None
        pool.close()

    run(test())


def test_closing_ends_the_threads_and_cancels_the_rest() -> None:
    async def test() -> None:
        pool, gate, begun = Pool("closing", 2), threading.Event(), threading.Barrier(3)
        blockers = [pool.submit(0, lambda: (begun.wait(), gate.wait())) for _ in range(2)]
        await asyncio.to_thread(begun.wait)
        rest = pool.submit(1, lambda: 7)
        pool.close()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await rest
        await asyncio.gather(*blockers)
        for thread in threading.enumerate():
            if thread.name.startswith("closing"):
                thread.join(5)
                assert not thread.is_alive()

    run(test())
