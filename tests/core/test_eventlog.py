"""Same events, same decisions: a log of a random run, replayed into a fresh core, gives the same batches."""

from __future__ import annotations

import json
from random import Random

import pytest

from gllm.core.eventlog import Recorder, ReplayMismatch, dump, read, replay
from gllm.core.policy import FixedBudget
from gllm.core.request import Request
from gllm.core.scheduler import SchedulerConfig
from gllm.core.timeline import trace
from rserve.config import RServeConfig
from rserve.core.orchestrator import build, describe, rebuild
from tests.core.world import World, draw_request

SCHEDULER = SchedulerConfig(num_blocks=24, block_size=4, max_num_seqs=4, max_in_flight=2)


def logged_run(num_encoders: int, seed: int = 1) -> list[str]:
    """A random world with faults, logged: the lines."""
    config = RServeConfig(num_encoders=num_encoders, encoder_batch_tokens=12, embedding_capacity=20, min_chunk_tokens=3)
    lines = [dump(describe(SCHEDULER, FixedBudget(16), config)) + "\n"]
    world = World(build(SCHEDULER, FixedBudget(16), config), Random(seed), 16, num_encoders)
    world.core = Recorder(world.core, lambda record: lines.append(dump(record) + "\n"))
    world.run([draw_request(Random(seed + i), i, 40, 12, 10) for i in range(12)])
    return lines


@pytest.mark.parametrize("num_encoders", [0, 2])
def test_replay_gives_the_same_decisions(num_encoders):
    records = list(read(logged_run(num_encoders)))
    core = rebuild(records[0])
    decisions = [record for record, _ in replay(records[1:], core)]
    assert sum(record["e"] == "next_batch" and record["out"] is not None for record in decisions) > 20
    assert core.stats().running == core.stats().waiting == 0


def test_replay_notices_another_decision():
    records = list(read(logged_run(2)))
    core = rebuild(records[0] | {"policy": {"name": "FixedBudget", "max_tokens": 15}})
    with pytest.raises(ReplayMismatch, match="the log says"):
        list(replay(records[1:], core))


def test_requests_that_come_one_after_the_other_replay():
    """Between them the engine is idle, and workers are told what to forget by a call of its own."""
    config = RServeConfig(num_encoders=1)
    lines = [dump(describe(SCHEDULER, FixedBudget(16), config)) + "\n"]
    core = Recorder(build(SCHEDULER, FixedBudget(16), config), lambda record: lines.append(dump(record) + "\n"))
    for i in range(3):
        core.on_request(Request(i, (1, 2, 3), (), 1), float(i))
        batch = core.next_batch(float(i))
        core.on_batch_done(batch.batch_id, {i: 5}, float(i))
        assert core.take_dropped(float(i)) == (i,)
        assert core.take_dropped(float(i)) == ()
    records = list(read(lines))
    assert sum(record["e"] == "take_dropped" for record in records) == 3
    list(replay(records[1:], rebuild(records[0])))


def test_a_line_cut_short_is_left_out():
    assert list(read(['{"e":"core"}\n', '{"e":"on_re'])) == [{"e": "core"}]


def test_trace_has_a_row_for_each_worker():
    spans = [
        {"e": "span", "worker": w, "kind": "encode", "name": "x", "start": 1.0 + i, "end": 2.0 + i, "args": {}}
        for i, w in enumerate(["encoder 0", "stage 0"])
    ]
    events = trace([{"e": "on_abort", "t": 1.0, "in": [3], "out": None}, *spans])["traceEvents"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"encoder 0", "stage 0"}
    assert [(e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [(0.0, 1e6), (1e6, 1e6)]
    json.dumps(events)
