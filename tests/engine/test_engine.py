"""The engine as it runs: real processes, sockets and shared memory, on the bundled demo checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from gllm import LLM, SamplingParams
from gllm.config import EngineConfig
from gllm.core.eventlog import read, replay
from gllm.core.timeline import trace
from gllm.engine.async_engine import AsyncEngine
from gllm.errors import BadRequest, Overloaded, StartupError
from rserve.core.encoder_scheduler import MAX_LOSSES
from rserve.core.orchestrator import rebuild

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SCHEMES: dict[str, dict[str, Any]] = {
    "gllm": {},
    "gllm-epd": {"encoders": 1},
    "rserve-intra": {"rserve": True, "inter_request_batching": False},
    "rserve": {"rserve": True, "encoders": 2, "encoder_batch_tokens": 8},
}


def picture(seed: int, width: int = 112, height: int = 112) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def conversation(seed: int, num_pictures: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    sizes = [(rng.randrange(56, 225), rng.randrange(56, 225)) for _ in range(num_pictures)]
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": picture(seed * 100 + i, *size)} for i, size in enumerate(sizes)
    ]
    parts.insert(rng.randrange(len(parts) + 1), {"type": "text", "text": "what colour is picture 1?"})
    return [{"role": "user", "content": parts}]


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[AsyncEngine]:
    """A started engine; afterwards nothing of it is left."""
    engine = AsyncEngine(EngineConfig(**options))
    await engine.start()
    run_dir = engine._executor.run_dir
    names = ["driver", *(f"encoder {i}" for i in range(engine.config.num_encoders))]
    pids = [engine.worker_pid(name) for name in names]
    try:
        yield engine
    finally:
        await engine.close()
        assert not run_dir.exists()
        assert not [pid for pid in pids if psutil.pid_exists(pid)]


async def answer(engine: AsyncEngine, messages: Sequence[dict[str, Any]], params: SamplingParams = GREEDY) -> list[int]:
    """Output tokens of one chat."""
    stream = await engine.submit(engine.processor.chat(messages, trusted=True), params)
    try:
        return [token async for delta in stream for token in delta.token_ids]
    finally:
        await stream.aclose()


async def until_empty(engine: AsyncEngine, seconds: float = 10.0) -> dict[str, float]:
    """Wait until nothing is held for any request; returns the counts."""
    deadline = time.monotonic() + seconds
    zero = ("requests_running", "requests_waiting", "kv_blocks_used", "embedding_tokens_held",
            "embedding_tokens_encoding", "requests_in_server", "pixel_bytes_shared")  # fmt: skip
    while True:
        stats = await engine.stats()
        if not any(stats[name] for name in zero) and not stats.get("embedding_items_bound"):
            return stats
        assert time.monotonic() < deadline, stats
        await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What the baseline answers one after the other, whole prompts at a time."""

    async def run() -> list[list[int]]:
        async with running() as engine:
            return [await answer(engine, conversation(seed, seed % 5)) for seed in range(16)]

    return asyncio.run(run())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_sixteen_chats_at_once_answer_as_one_by_one(scheme, expected):
    """In pools that hold few of them at once."""

    async def run() -> None:
        small = {"num_kv_blocks": 64, "max_num_batched_tokens": 48, "embedding_capacity": 128}
        async with running(**SCHEMES[scheme], **small) as engine:
            health = await engine.health()
            assert health.ok, health
            chats = [conversation(seed, seed % 5) for seed in range(16)]
            assert await asyncio.gather(*(answer(engine, chat) for chat in chats)) == expected
            await until_empty(engine)

    asyncio.run(run())


def test_cancelled_requests_leave_nothing():
    """200 requests, a third of them given up at random moments."""

    async def one(engine: AsyncEngine, seed: int) -> None:
        rng = random.Random(seed)
        work = answer(engine, conversation(seed, seed % 4), SamplingParams(temperature=0.0, max_tokens=12))
        if seed % 3:
            await work
            return
        # It may be faster: then it ended by itself.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(work, rng.uniform(0.0, 0.15) if seed % 2 else rng.uniform(0.0, 0.02))

    async def run() -> None:
        async with running(rserve=True, embedding_capacity=512, num_kv_blocks=256) as engine:
            places = asyncio.Semaphore(24)

            async def in_turn(seed: int) -> None:
                async with places:
                    await one(engine, seed)

            await asyncio.gather(*(in_turn(seed) for seed in range(200)))
            await until_empty(engine)
            assert not list(engine._executor.run_dir.glob("pixels-*"))

    asyncio.run(run())


def test_the_event_log_shows_the_overlap_and_replays(tmp_path: Path):
    log = tmp_path / "events.jsonl"

    async def run() -> None:
        large = {"mm_processor_kwargs": {"max_pixels": 448 * 448}}  # so that an item takes longer than a message
        async with running(rserve=True, encoder_batch_tokens=8, event_log=str(log), **large) as engine:
            chat = [{"role": "user", "content": [{"type": "image", "image": picture(i, 448, 448)} for i in range(8)]}]
            await answer(engine, chat)

    asyncio.run(run())
    with log.open() as lines:
        records = list(read(lines))
    (request,) = (r["in"][0] for r in records if r["e"] == "on_request")
    first_item_token = request["items"][0]["offset"]
    last_encoded = max(i for i, r in enumerate(records) if r["e"] == "on_encoded")
    prefills = [
        i
        for i, r in enumerate(records)
        if r["e"] == "next_batch" and r["out"]
        for c in r["out"]["chunks"]
        if c["start"] + c["num_tokens"] > first_item_token
    ]
    assert min(prefills) < last_encoded, "no item token was prefilled before the last item was encoded"
    decisions = list(replay(records[1:], rebuild(records[0])))
    assert len(decisions) == sum(r["e"] not in ("core", "span") for r in records)
    drawn = trace(records)["traceEvents"]
    assert {e["args"]["name"] for e in drawn if e["ph"] == "M"} == {"stage 0", "encoder 0"}
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in drawn if e["ph"] == "X")
    json.dumps(drawn)


def test_a_killed_encoder_is_replaced_and_no_request_is_lost(expected):
    async def run() -> None:
        async with running(rserve=True, encoder_batch_tokens=8) as engine:
            first = engine.worker_pid("encoder 0")
            work = [asyncio.create_task(answer(engine, conversation(seed, seed % 5))) for seed in range(16)]
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            os.kill(first, signal.SIGKILL)
            assert await asyncio.gather(*work) == expected
            await until_empty(engine)
            deadline = time.monotonic() + 20
            while not (await engine.health()).ok:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            assert engine.worker_pid("encoder 0") not in (None, first)

    asyncio.run(run())


def test_an_image_that_ends_every_encoder_costs_its_own_request_alone(expected):
    image = {"type": "image", "image": picture(0, 1120, 1120)}  # at work for longer than it takes to see it
    fatal = [{"role": "user", "content": [image, {"type": "text", "text": "what colour is picture 1?"}]}]

    async def run() -> None:
        async with running(rserve=True, mm_processor_kwargs={"max_pixels": 1120 * 1120}) as engine:

            async def until_encoding(count: float) -> None:
                deadline = time.monotonic() + 30
                while (await engine.stats())["encode_batches_at_encoders"] != count:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.005)

            work = asyncio.create_task(answer(engine, fatal))
            for _ in range(MAX_LOSSES):
                await until_encoding(1)
                os.kill(engine.worker_pid("encoder 0"), signal.SIGKILL)
                await until_encoding(0)
            with pytest.raises(BadRequest, match="image 1 cannot be encoded: the encoder ended 3 times at it"):
                await work
            assert await answer(engine, conversation(1, 1)) == expected[1]
            await until_empty(engine)

    asyncio.run(run())


def test_a_hung_encoder_is_ended_and_text_goes_on_meanwhile(expected):
    async def run() -> None:
        async with running(rserve=True, heartbeat_timeout=1.0) as engine:
            os.kill(engine.worker_pid("encoder 0"), signal.SIGSTOP)
            pictures = asyncio.create_task(answer(engine, conversation(1, 1)))
            assert await answer(engine, conversation(0, 0)) == expected[0]
            assert not pictures.done()
            assert await pictures == expected[1]

    asyncio.run(run())


def test_a_lost_driver_ends_requests_with_503_and_comes_back(expected):
    async def run() -> None:
        engine = AsyncEngine(EngineConfig(rserve=True))
        await engine.start()
        try:
            work = asyncio.create_task(answer(engine, conversation(3, 3), SamplingParams(max_tokens=4000, seed=1)))
            while not (await engine.stats()).get("requests_running"):
                await asyncio.sleep(0.01)
            os.kill(engine.worker_pid("driver"), signal.SIGKILL)
            with pytest.raises(Overloaded) as error:
                await work
            assert error.value.status == 503
            assert not (await engine.health()).ok
            deadline = time.monotonic() + 30
            while not (await engine.health()).ok:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            assert await answer(engine, conversation(3, 3)) == expected[3]
        finally:
            await engine.close()

    asyncio.run(run())


def test_a_silent_driver_is_ended_and_its_requests_get_503(expected):
    async def run() -> None:
        async with running(heartbeat_timeout=1.0) as engine:
            work = asyncio.create_task(answer(engine, conversation(3, 3), SamplingParams(max_tokens=4000, seed=1)))
            while not (await engine.stats()).get("requests_running"):
                await asyncio.sleep(0.01)
            os.kill(engine.worker_pid("driver"), signal.SIGSTOP)
            with pytest.raises(Overloaded):
                await asyncio.wait_for(work, 20)

    asyncio.run(run())


def test_when_no_encoder_can_be_kept_alive_all_start_again(expected):
    async def run() -> None:
        async with running(rserve=True) as engine:
            for _ in range(4):
                deadline = time.monotonic() + 20
                while (pid := engine.worker_pid("encoder 0")) is None or not psutil.pid_exists(pid):
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.02)
                os.kill(pid, signal.SIGKILL)
                while engine.worker_pid("encoder 0") == pid:
                    await asyncio.sleep(0.02)
            deadline = time.monotonic() + 40
            while not (await engine.health()).ok:
                assert time.monotonic() < deadline, await engine.health()
                await asyncio.sleep(0.1)
            assert await answer(engine, conversation(3, 3)) == expected[3]

    asyncio.run(run())


def test_bad_requests_are_refused_and_leave_nothing():
    async def run() -> None:
        options = {"rserve": True, "embedding_capacity": 40, "max_model_len": 200, "max_queued_requests": 3}
        async with running(**options) as engine:
            with pytest.raises(BadRequest, match="image 1: its 64 tokens are more than the embedding capacity of 40"):
                await answer(engine, [{"role": "user", "content": [{"type": "image", "image": picture(0, 224, 224)}]}])
            with pytest.raises(BadRequest, match=r"context length is 200 tokens; the prompt has .* of text and"):
                await answer(engine, conversation(1, 8))
            broken = [{"role": "user", "content": [{"type": "image", "image": b"\x89PNG\r\n\x1a\nrubbish"}]}]
            with pytest.raises(BadRequest, match="image 1"):
                await answer(engine, broken)
            await until_empty(engine)
            long = SamplingParams(max_tokens=150, ignore_eos=True, seed=1)
            work = [asyncio.create_task(answer(engine, conversation(0, 0), long)) for _ in range(3)]
            while (await engine.stats())["requests_in_server"] < 3:
                await asyncio.sleep(0.005)
            with pytest.raises(Overloaded, match="3 requests are in the server already"):
                await answer(engine, conversation(0, 0))
            await asyncio.gather(*work)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_path": "/does/not/exist"}, "exist"),
        ({"max_model_len": 10**9}, "--max-model-len 1000000000 is above the model's"),
        ({"num_kv_blocks": 2, "max_model_len": 1000}, "--max-model-len 1000 does not fit into KV for 32 tokens"),
        ({"device": "cuda"}, "--device cuda: torch finds no CUDA device"),
        ({"event_log": "/does/not/exist"}, "--event-log /does/not/exist cannot be written"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(options, message):
    with pytest.raises(StartupError) as error:
        LLM(**options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_offline_outputs_come_in_order_with_errors_of_their_own():
    pads = "<|vision_start|><|image_pad|><|vision_end|>"
    prompts = [
        "hello",
        {"prompt": f"{pads}{pads} what?", "multi_modal_data": {"image": [picture(1)]}},
        {"prompt": f"{pads} what?", "multi_modal_data": {"image": picture(1)}},
        {"prompt": "what?", "multi_modal_data": {"video": []}},
        [10, 11, 12],
        "",
        {"prompt": "x", "multi_modal_data": ["image"]},
        {"prompt": "x", "multi_modal_data": {"image": 5}},
        {"prompt": object()},
        None,
    ]
    with LLM(rserve=True) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [o.error is None for o in outputs] == [True, False, True, False, True] + [False] * 5
        assert all(o.error is None or (isinstance(o.error, str) and o.error) for o in outputs)
        assert "2 image placeholders but the request has 1 image" in outputs[1].error
        assert outputs[4].prompt_token_ids == [10, 11, 12]
        for output in (outputs[0], outputs[2], outputs[4]):
            assert output.finished
            assert output.outputs[0].finish_reason in ("stop", "length")
            assert 1 <= len(output.outputs[0].token_ids) <= 8
        with pytest.raises(ValueError, match="2 prompts but 1 sampling params"):
            llm.generate(["a", "b"], [GREEDY])
        (one,) = llm.chat(conversation(2, 2), GREEDY, use_tqdm=False)
        again = llm.chat([conversation(2, 2)] * 2, GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in again] == [one.outputs[0].token_ids] * 2
        seeded = SamplingParams(temperature=1.0, seed=5, max_tokens=6, logprobs=2)
        first, second = llm.generate(["hello", "hello"], seeded, use_tqdm=False)
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        assert len(first.outputs[0].logprobs) == len(first.outputs[0].token_ids)
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("hello")
