"""The pace of cores: what samples say of a moment, and how work stretches over slow ones; and a real meter."""

from __future__ import annotations

import os
import time

import pytest

from benchmarks.real import pace
from benchmarks.real.pace import MeterFailed, Pace, PaceMeter
from gllm.config import usable_cores
from tests.live_server import wait_until

SAMPLES = [(t / 20, 2e-3 if 1.0 <= t / 20 < 2.0 else 1e-3) for t in range(80)]  # half as fast from 1 s to 2 s


def test_work_takes_longer_while_its_core_is_slow():
    found = Pace({0: SAMPLES}, 1e-3)
    assert found.done_at((0,), 0.0, 0.5) == pytest.approx(0.5)
    assert found.done_at((0,), 1.2, 0.25) == pytest.approx(1.7)
    assert found.done_at((0,), 0.5, 1.5) == pytest.approx(2.5, abs=0.1)
    assert found.done_at((0,), 3.0, 9.0) == pytest.approx(12.0)  # after the last sample its pace goes on


@pytest.mark.parametrize("begin", [0.0, 0.93, 1.77])
@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.05, 0.4, 2.0])
def test_usual_seconds_are_the_inverse(begin, seconds):
    found = Pace({0: SAMPLES, 1: [(0.0, 1.5e-3)]}, 1e-3)
    for cores in ((0,), (1,), (0, 1)):
        assert found.usual_seconds(cores, begin, found.done_at(cores, begin, seconds)) == pytest.approx(seconds)


def test_several_cores_have_their_mean_and_unknown_ones_no_say():
    found = Pace({0: [(0.0, 1e-3)], 1: [(0.0, 3e-3)], 2: []}, 1e-3)
    assert found.at((0, 1), 0.0) == pytest.approx(2.0)
    assert found.at((1, 2, 3), 0.0) == pytest.approx(3.0)
    assert found.at((2,), 0.0) == Pace({}, 1e-3).at((0,), 0.0) == 1.0


def test_a_meter_takes_samples_on_its_cores_and_leaves_nothing():
    core = usable_cores()[0]
    with PaceMeter([core]) as meter:
        begin = time.monotonic()
        wait_until(lambda: len(meter.samples(begin, time.monotonic())[core]) >= 5, 30, "samples")
        samples = meter.samples(begin, time.monotonic())[core]
        assert all(0 < seconds < 1 for _, seconds in samples)
        assert [when for when, _ in samples] == sorted(when for when, _ in samples)
        assert not meter.samples(begin - 20, begin - 10)[core]
        (folder,) = {path.parent for path in meter._files.values()}
    assert not folder.exists()


def test_half_a_record_is_left_out(tmp_path):
    path = tmp_path / "samples"
    path.write_bytes(pace.RECORD.pack(1.0, 2.0) + b"half")
    assert pace._read(path) == [(1.0, 2.0)]


def test_a_meter_whose_process_ends_says_so():
    core = usable_cores()[0]
    with PaceMeter([core]) as meter:
        meter._processes[core].kill()
        meter._processes[core].join()
        with pytest.raises(MeterFailed, match=f"core {core} ended with status -9"):
            meter.samples(0.0, 1.0)


def test_a_sampler_ends_with_its_parent(tmp_path, monkeypatch):
    monkeypatch.setattr(pace, "settle", lambda cores, threads: None)  # this process is not to be bound
    monkeypatch.setattr(pace.signal, "signal", lambda number, handler: None)
    path = tmp_path / "samples"
    pace._sample(usable_cores()[0], path, os.getpid())  # this process is not its own parent
    assert path.exists()
    assert not path.stat().st_size
