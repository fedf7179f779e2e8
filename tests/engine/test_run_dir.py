"""Run directories: private, and gone at the latest when the next run starts."""

from __future__ import annotations

import os
import stat

from gllm.engine.run_dir import RunDir, remove_leftovers


def test_what_a_killed_run_left_is_removed_and_nothing_else(tmp_path):
    killed, alive, guarded = (RunDir(tmp_path) for _ in range(3))
    (killed.path / "embeddings").write_bytes(b"rows")
    os.close(killed.lock)  # as the end of its last process does
    inherited = os.dup(guarded.lock)  # the launcher's, which outlives its owner for a moment
    os.close(guarded.lock)
    (tmp_path / "gllm-without-lock").mkdir()  # not a run's
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {alive.path.name, guarded.path.name, "gllm-without-lock"}
    assert stat.S_IMODE(alive.path.stat().st_mode) == 0o700
    os.close(inherited)
    alive.remove()
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["gllm-without-lock"]
