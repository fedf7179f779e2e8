"""What every worker process does: a thread for computing, a loop for messages that answers while it computes."""

from __future__ import annotations

import os
import queue
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
import zmq


def settle(cores: list[int] | None, threads: int) -> None:
    """Bind this process to `cores` (None: leave it) and let torch use so many threads. Call before computing."""
    if cores:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)


class Compute:
    """Runs jobs one after the other in a thread of its own; results go to a socket of the loop's poller.

    `socket` is a zmq PAIR that becomes readable with each `post`; `take` then returns what was posted. A job that
    raises is reported to `on_crash`: workers have no state that could be trusted after that.
    """

    def __init__(self, context: zmq.Context[Any], name: str, on_crash: Callable[[str], None]) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._on_crash = on_crash
        self.socket = context.socket(zmq.PAIR)
        self.socket.bind(f"inproc://{name}-{id(self)}")
        self._far_end = context.socket(zmq.PAIR)
        self._far_end.connect(f"inproc://{name}-{id(self)}")
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Called by the loop."""
        self._jobs.put(job)

    def post(self, result: Any) -> None:
        """Called by the thread, inside a job."""
        self._results.put(result)
        self._far_end.send(b"", copy=False)

    def take(self) -> Any:
        """Called by the loop, once for each time that `socket` was readable."""
        self.socket.recv()
        return self._results.get_nowait()

    def close(self, seconds: float = 0.5) -> None:
        """The thread ends after the job it is doing, or with the process."""
        self._jobs.put(None)
        self._thread.join(seconds)
        self.socket.close(0)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                self._on_crash(traceback.format_exc())
                return
            finally:
                del job  # an idle thread must not keep tensors alive
        self._far_end.close(0)
