"""How slow each core is, from moment to moment: the CPU time of one small product, taken over and over.

A shared machine's cores change their speed within a tenth of a second, each by itself, and nothing inside tells why (no
steal time is shown). The same work then takes 0.7 to 2 times as long as usual, whoever does it. CPU time and not wall
time, so that a sample does not count the time in which a server had the core. What the server leaves in the core's
caches it does count, in the passes that give the costs as in the runs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import statistics
import struct
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from gllm.worker.process import settle

PERIOD_S = 0.05  # from sample to sample; each takes 1 to 2 ms
ROWS, IN_FEATURES, OUT_FEATURES = 128, 1024, 2048  # weights of 4 MiB: like a layer's, more than a core's own cache
WINDOW_S = 0.05  # so far before and after an interval its samples reach
STEP_S = 0.05  # in which `Pace.done_at` looks ahead
READY_SECONDS = 60.0
RECORD = struct.Struct("dd")

Samples = list[tuple[float, float]]  # (when, seconds), in order


class Pace:
    """How many times longer than usual work takes (as in running: a high pace is slow). samples: by core; unit_s:
    seconds of a sample at pace 1. Without samples the pace is 1. Work on several cores goes at the mean of their paces:
    measured, that fits two threads that share products better than the slowest core does."""

    def __init__(self, samples: Mapping[int, Sequence[tuple[float, float]]], unit_s: float) -> None:
        self._cores: dict[int, tuple[list[float], list[float]]] = {}
        for core, found in samples.items():
            if found:
                sums = list(accumulate((seconds / unit_s for _, seconds in found), initial=0.0))
                self._cores[core] = [when for when, _ in found], sums

    def at(self, cores: Sequence[int], moment: float) -> float:
        """From then on for STEP_S: the mean of the samples in and around it, or the nearest; the mean of all cores."""
        known = [core for core in cores if core in self._cores]
        return statistics.fmean(self._of(core, moment, moment + STEP_S) for core in known) if known else 1.0

    def done_at(self, cores: Sequence[int], begin: float, seconds: float) -> float:
        """When work is done that is begun at `begin` and takes so long at pace 1."""
        now, left = begin, seconds
        while left * (pace := self.at(cores, now)) > STEP_S:
            now += STEP_S
            left -= STEP_S / pace
        return now + left * pace

    def usual_seconds(self, cores: Sequence[int], begin: float, end: float) -> float:
        """How long work that was begun and done then takes at pace 1: the inverse of `done_at`."""
        now, seconds = begin, 0.0
        while end - now > STEP_S:
            seconds += STEP_S / self.at(cores, now)
            now += STEP_S
        return seconds + (end - now) / self.at(cores, now)

    def _of(self, core: int, begin: float, end: float) -> float:
        times, sums = self._cores[core]
        low, high = bisect_left(times, begin - WINDOW_S), bisect_right(times, end + WINDOW_S)
        if low == high:
            low = max(0, min(low, len(times) - 1))
            if low and begin - times[low - 1] < times[low] - end:
                low -= 1
            high = low + 1
        return (sums[high] - sums[low]) / (high - low)


class MeterFailed(RuntimeError):
    """There are no samples, and why."""


class PaceMeter:
    """Takes samples on each core while it is open, by a process of its own for each, at 2 to 4 % of the core."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = tuple(cores)
        self._stack = contextlib.ExitStack()
        self._files: dict[int, Path] = {}
        self._processes: dict[int, BaseProcess] = {}

    def __enter__(self) -> PaceMeter:
        """Raises MeterFailed when no samples come."""
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            context = multiprocessing.get_context("spawn")
            for core in self._cores:
                self._files[core] = folder / str(core)
                process = context.Process(target=_sample, args=(core, self._files[core], os.getpid()), daemon=True)
                process.start()
                stack.callback(_end, process)
                self._processes[core] = process
            self._wait()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def samples(self, begin: float, end: float) -> dict[int, Samples]:
        """From so many seconds of the monotonic clock to so many, and a little around. Raises MeterFailed when a
        process has ended."""
        self._check()
        return {
            core: [(when, s) for when, s in _read(path) if begin - WINDOW_S <= when <= end + WINDOW_S]
            for core, path in self._files.items()
        }

    def _wait(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not all(path.exists() and path.stat().st_size for path in self._files.values()):
            self._check()
            if time.monotonic() > deadline:
                raise MeterFailed(f"no samples of the cores' pace after {READY_SECONDS:g} s")
            time.sleep(0.05)

    def _check(self) -> None:
        for core, process in self._processes.items():
            if not process.is_alive():
                raise MeterFailed(f"the pace meter of core {core} ended with status {process.exitcode}")


def _end(process: BaseProcess) -> None:
    process.terminate()
    process.join()


def _read(path: Path) -> Samples:
    content = path.read_bytes()
    whole = len(content) - len(content) % RECORD.size  # the last one may be half written
    return [(when, seconds) for when, seconds in RECORD.iter_unpack(content[:whole])]


def _sample(core: int, path: Path, parent: int) -> None:
    """The meter's process on one core; it ends with its parent, which is the one that an interrupt is for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settle([core], 1)
    rows = torch.randn(ROWS, IN_FEATURES, dtype=torch.bfloat16)
    weights = torch.randn(OUT_FEATURES, IN_FEATURES, dtype=torch.bfloat16)
    with torch.inference_mode(), path.open("ab", buffering=0) as out:
        for _ in range(3):
            torch.nn.functional.linear(rows, weights)
        while os.getppid() == parent:
            time.sleep(PERIOD_S)
            when, begin = time.monotonic(), time.thread_time()
            torch.nn.functional.linear(rows, weights)
            out.write(RECORD.pack(when, time.thread_time() - begin))
