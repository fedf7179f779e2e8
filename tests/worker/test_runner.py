"""What a stage runner keeps and forgets: dropped and preempted requests, broken items, when it says that it is fed."""

from __future__ import annotations

import pytest
import torch

from gllm.core.batch import Batch
from gllm.worker.embeddings import LocalEmbeddings
from gllm.worker.runner import StageRunner
from gllm.worker.step import StepInput
from tests.models.checkpoints import make_prompt
from tests.worker.harness import Harness, Prompt

NUM_BLOCKS = 64
LAYOUT = (5, (10, 6), 3, (4, 4), 2)


@pytest.fixture(scope="module")
def runner(tied) -> StageRunner:
    return StageRunner.build(tied, num_blocks=NUM_BLOCKS, page_size=8, with_vision=True)


def alone(runner: StageRunner, prompt: Prompt, num: int = 6) -> list[int]:
    (request,) = Harness([runner], NUM_BLOCKS).run([prompt], num)
    return request.output


def test_preempted_request_goes_on_with_the_same_tokens(runner):
    prompt, other = make_prompt(LAYOUT, 1), make_prompt((30,), 2)
    expected, expected_other = alone(runner, prompt), alone(runner, other)
    harness = Harness([runner], NUM_BLOCKS)
    a, b = harness.start(prompt), harness.start(other)
    harness.step([(a, len(a.known)), (b, 11)])
    harness.step([(a, 1), (b, len(b.known) - 11)])
    harness.preempt(a)
    for _ in range(2):
        harness.step([(b, 1)])
    harness.step([(a, 20), (b, 1)])
    while len(a.output) < 6:
        harness.step([(a, len(a.known) - a.done)])
    assert a.output == expected
    assert b.output == expected_other[: len(b.output)]
    assert len(b.output) == 4


def test_dropped_requests_leave_nothing(runner):
    harness = Harness([runner], NUM_BLOCKS)
    request = harness.start(make_prompt(LAYOUT))
    harness.step([(request, 7)])
    assert runner.embeddings.num_tokens == 15 + 4  # an item is held until its last row is gathered
    harness.finish(request)
    harness.step([])
    assert request.request_id not in runner.states
    assert runner.embeddings.num_tokens == 0


def test_empty_batch(runner):
    out = runner.execute(StepInput(Batch(7, ()), ()))
    assert (out.batch_id, out.tokens) == (7, ())


def test_fed_comes_after_gathering_and_before_the_layers(runner):
    order = []
    prompt = make_prompt(LAYOUT)
    harness = Harness([runner], NUM_BLOCKS)
    gather = runner.embeddings.gather
    runner.embeddings.gather = lambda *args: (order.append("gather"), gather(*args))
    handle = runner.model.layers[0].register_forward_pre_hook(lambda *_: order.append("layer"))
    request = harness.start(prompt)
    harness.step([(request, len(prompt.token_ids))], fed=order)
    handle.remove()
    del runner.embeddings.gather
    assert order == ["gather", "gather", "fed", "layer"]
    harness.finish(request)
    harness.step([])


@pytest.mark.parametrize("kind", ["missing", "shape", "nan"])
def test_a_broken_item_harms_only_its_request(runner, kind):
    broken, healthy = make_prompt(LAYOUT, 3), make_prompt(LAYOUT, 4)
    expected = alone(runner, healthy)
    harness = Harness([runner], NUM_BLOCKS)
    bad, good = harness.start(broken), harness.start(healthy)
    images = harness.pixels.images
    if kind == "missing":
        del images[bad.request_id, 1]
    elif kind == "shape":
        images[bad.request_id, 1] = images[bad.request_id, 0]
    put = runner.embeddings.put
    if kind == "nan":
        runner.embeddings.put = lambda i, n, rows: put(i, n, rows * float("nan") if i == bad.request_id else rows)
    harness.step([(bad, 9), (good, 13)])
    while len(good.output) < 6:
        harness.step([(r, len(r.known) - r.done) for r in (bad, good)])
    if kind == "nan":
        del runner.embeddings.put
    failures = runner.take_failures()
    assert set(failures) == (set() if kind == "nan" else {bad.request_id})
    assert runner.take_failures() == {}
    assert good.output == expected
    assert all(torch.isfinite(part).all() for pair in runner.cache.layers for part in pair)
    for request in (bad, good):
        harness.finish(request)
    harness.step([])


def test_local_embeddings_release_an_item_with_its_last_row():
    source = LocalEmbeddings()
    rows = torch.arange(12.0).view(6, 2)
    source.put(1, 0, rows)
    out = torch.empty(4, 2)
    source.gather(1, 0, 0, 4, out)
    assert torch.equal(out, rows[:4])
    assert source.num_tokens == 6
    source.gather(1, 0, 4, 2, out[:2])
    assert source.num_tokens == 0
    with pytest.raises(LookupError):
        source.gather(1, 0, 0, 1, out[:1])
    source.drop(1)


def test_stages_without_the_vision_encoder_refuse_to_encode(tied):
    bare = StageRunner.build(tied, num_blocks=4)
    harness = Harness([bare], 4)
    with pytest.raises(RuntimeError, match="without a vision encoder"):
        harness.step([(harness.start(make_prompt(LAYOUT)), 3)])
