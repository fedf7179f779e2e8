"""Which workers give signs of life. Asked only while they have work, or when somebody wants to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Worker:
    heard: float
    has_work: bool = False
    pinged: float | None = None
    is_hung: bool = False


class Liveness:
    """timeout: seconds of silence, with work, after which a worker counts as hung. ping(name): asks for a sign."""

    def __init__(self, timeout: float, ping: Callable[[str], None]) -> None:
        self._timeout = timeout
        self._ping = ping
        self._workers: dict[str, _Worker] = {}

    def add(self, name: str, now: float) -> None:
        self._workers[name] = _Worker(now)

    def remove(self, name: str) -> None:
        self._workers.pop(name, None)

    def heard(self, name: str, now: float) -> None:
        """A message came from it."""
        if worker := self._workers.get(name):
            worker.heard, worker.pinged = now, None

    def work(self, name: str, has_work: bool, now: float) -> None:
        """It has something to do now, or nothing any more. Its time to answer starts with its work."""
        if worker := self._workers.get(name):
            if has_work and not worker.has_work:
                worker.heard = now
            worker.has_work = has_work

    def probe(self, now: float) -> None:
        """Ask all for a sign of life, whatever they do."""
        for name, worker in self._workers.items():
            worker.pinged = now
            self._ping(name)

    def hung(self, now: float) -> list[str]:
        """Workers that have been silent for too long; each is named once. Asks those that are silent for a while."""
        names = []
        for name, worker in self._workers.items():
            if not worker.has_work or worker.is_hung:
                continue
            silence = now - worker.heard
            if silence >= self._timeout:
                worker.is_hung = True
                names.append(name)
            elif silence >= self._timeout / 2 and (worker.pinged is None or worker.pinged < worker.heard):
                worker.pinged = now
                self._ping(name)
        return names

    def next_check(self, now: float) -> float | None:
        """Seconds until `hung` should be asked again; None while none has work."""
        waits = [
            worker.heard + self._timeout * (0.5 if now - worker.heard < self._timeout / 2 else 1.0) - now
            for worker in self._workers.values()
            if worker.has_work and not worker.is_hung
        ]
        return max(0.0, min(waits)) if waits else None

    def statuses(self, since: float) -> dict[str, str]:
        """ "ok", "hung", or "silent" for those not heard of since then."""
        return {
            name: "hung" if worker.is_hung else "ok" if worker.heard >= since else "silent"
            for name, worker in self._workers.items()
        }
