"""The private folder of a run, with its sockets and shared memory. What a killed run has left, the next one removes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "gllm-"
LOCK = "lock"


class RunDir:
    """A new folder below `where`, mode 0700. It is locked as long as a process has `lock` open: hand that to whoever
    ends the run when this process cannot."""

    def __init__(self, where: Path) -> None:
        remove_leftovers(where)
        # Renamed only once it is locked, so that a folder with our prefix and a free lock is always a leftover.
        made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=where))
        self.lock = os.open(made / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.path = made.rename(where / made.name.removeprefix("."))

    def remove(self) -> None:
        """May be called once; a folder that is gone already is fine."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def remove_leftovers(where: Path) -> None:
    """Remove the folders of this user's runs of which no process lives."""
    for path in where.glob(f"{PREFIX}*"):
        try:
            lock = os.open(path / LOCK, os.O_RDWR)
        except OSError:
            continue  # not ours
        with contextlib.closing(os.fdopen(lock)), contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
