"""Every scheme in every layout answers like one process: one table, printed by

python -m pytest tests/engine/test_layouts.py -s -n 0
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from gllm.core.eventlog import read
from gllm.errors import Overloaded, StartupError
from gllm.sampling_params import SamplingParams
from tests.engine.test_engine import answer, conversation, picture, running, until_empty

CHATS = [conversation(seed, count) for seed, count in enumerate([0, 1, 4] + [seed % 5 for seed in range(13)])]
LONG = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SMALL = {"page_size": 4, "num_kv_blocks": 150, "max_num_batched_tokens": 40, "embedding_capacity": 96}
SCHEMES: dict[str, dict[str, Any]] = {
    "gllm": {},
    "gllm-epd": {"encoders": 1},
    "rserve-intra": {"rserve": True, "inter_request_batching": False, "encoder_batch_tokens": 8},
    "rserve": {"rserve": True, "encoder_batch_tokens": 8},
}
LAYOUTS = {"pp1": (1, 1), "pp2": (2, 1), "pp4": (4, 1), "tp2": (1, 2), "pp2 x tp2": (2, 2)}
# Every scheme in every layout, with one encoder where it has any; with two in the smallest and the largest layout.
CASES = [(scheme, layout, 1 if options else 0) for layout in LAYOUTS for scheme, options in SCHEMES.items()] + [
    (scheme, layout, 2) for layout in ("pp1", "pp2 x tp2") for scheme in ("gllm-epd", "rserve")
]
table: dict[tuple[str, str, int], str] = {}


@pytest.fixture(scope="module")
def expected():
    async def run() -> list[list[int]]:
        async with running() as engine:
            return [await answer(engine, chat, LONG) for chat in CHATS]

    yield asyncio.run(run())
    print(f"\n{'layout':12}{'encoders':>9}  scheme         16 chats, tokens as in one process")
    for (scheme, layout, encoders), result in sorted(table.items(), key=lambda row: (row[0][1], row[0][2], row[0][0])):
        print(f"{layout:12}{encoders:9}  {scheme:15}{result}")


@pytest.mark.parametrize(("scheme", "layout", "encoders"), CASES, ids=[f"{s}-{la}-E{e}" for s, la, e in CASES])
def test_tokens_equal_those_of_one_process(scheme, layout, encoders, expected):
    """Sixteen chats at once, in pools so small that they wait for each other and preempt."""
    pp, tp = LAYOUTS[layout]
    options = SCHEMES[scheme] | SMALL | {"pp": pp, "tp": tp} | ({"encoders": encoders} if encoders else {})

    async def run() -> None:
        async with running(**options) as engine:
            assert (await engine.health()).ok
            answers = await asyncio.gather(*(answer(engine, chat, LONG) for chat in CHATS))
            right = sum(a == b for a, b in zip(answers, expected, strict=True))
            stats = await until_empty(engine)
            table[scheme, layout, encoders] = f"{right} of {len(CHATS)} ({stats['preemptions_total']:.0f} preemptions)"
            assert answers == expected

    asyncio.run(run())


def test_token_throttling_answers_alike(expected):
    async def run() -> None:
        options = {"rserve": True, "pp": 2, "schedule_method": "token_throttling", "minp": 8, "iterp": 4, "maxd": 3}
        async with running(**options, num_kv_blocks=64, max_num_batched_tokens=64) as engine:
            assert await asyncio.gather(*(answer(engine, chat, LONG) for chat in CHATS)) == expected

    asyncio.run(run())


def test_encode_and_two_stages_work_at_the_same_time(tmp_path: Path):
    """One request of 8 pictures at pp 2: a later item is encoded, an earlier chunk is on stage 0, and a still earlier
    one on stage 1."""
    log = tmp_path / "events.jsonl"

    async def run() -> None:
        large = {"mm_processor_kwargs": {"max_pixels": 448 * 448}}
        options = {"rserve": True, "pp": 2, "encoder_batch_tokens": 8, "max_num_batched_tokens": 64}
        async with running(**options, event_log=str(log), **large) as engine:
            parts = [{"type": "image", "image": picture(i, 448, 448)} for i in range(8)]
            await answer(engine, [{"role": "user", "content": parts}])

    asyncio.run(run())
    with log.open() as lines:
        spans = [record for record in read(lines) if record["e"] == "span"]
    encodes = [s for s in spans if s["kind"] == "encode"]
    stages = [[s for s in spans if s["worker"] == f"stage {i}"] for i in range(2)]
    assert all(stages)
    found = [
        (encode["args"]["items"], first["args"]["chunks"], second["args"]["chunks"])
        for encode in encodes
        for first in stages[0]
        for second in stages[1]
        if max(s["start"] for s in (encode, first, second)) < min(s["end"] for s in (encode, first, second))
        and second["args"]["batch"] < first["args"]["batch"]
    ]
    assert found, json.dumps(spans)


def test_a_lost_stage_ends_requests_with_503_and_comes_back(expected):
    async def run() -> None:
        async with running(rserve=True, pp=2) as engine:
            work = asyncio.create_task(answer(engine, CHATS[2], SamplingParams(max_tokens=4000, seed=1)))
            while not (await engine.stats()).get("requests_running"):
                await asyncio.sleep(0.01)
            os.kill(engine.worker_pid("stage 1"), signal.SIGKILL)
            with pytest.raises(Overloaded):
                await work
            assert not (await engine.health()).ok
            deadline = time.monotonic() + 60
            while not (await engine.health()).ok:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            assert await answer(engine, CHATS[2], LONG) == expected[2]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pp": 9}, "lower --pp"),
        ({"pp": 2, "assigned_layers": "4,4"}, "--assigned-layers 4,4 does not give 4 layers to 2 stages"),
        ({"pp": 2, "assigned_layers": "a,b"}, "--assigned-layers takes a count for each stage"),
        ({"pp": 2, "assigned_layers": "4,0"}, "at least one each"),
        ({"tp": 3}, "--tp 3 does not divide the 4 attention heads"),
    ],
)
def test_a_layout_that_does_not_fit_says_what_to_change(options, message):
    async def run() -> None:
        async with running(**options):
            pass

    with pytest.raises(StartupError) as error:
        asyncio.run(run())
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_layers_may_be_assigned_unevenly(expected):
    async def run() -> None:
        async with running(pp=2, assigned_layers="1,3") as engine:
            assert [await answer(engine, chat, LONG) for chat in CHATS[:3]] == expected[:3]

    asyncio.run(run())
