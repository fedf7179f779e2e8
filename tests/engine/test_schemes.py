"""Every scheme against transformers: the same greedy tokens for any chunk size and any order of encodings, for many
requests at once, and with preemption."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gllm.config import DEMO_CHECKPOINT
from gllm.worker.runner import StageRunner
from tests.engine.inprocess import SCHEMES, InProcessEngine
from tests.models.checkpoints import SpecialTokens, greedy, make_prompt, reference_model, write_tiny

LAYOUTS = [
    (37,),
    (5, (10, 6), 9),
    (3, (18, 22), 4, (4, 8), 2, (14, 2), 1, (8, 12), 6),
    (4, (6, 6), (6, 10), (2, 4), 3),
    ((12, 10), 8),
    (8, (8, 14)),
]
NUM_OUTPUTS = 6
LONG_OUTPUTS = 24
NUM_BLOCKS = 256
PAGE = 8


@pytest.fixture(scope="module", params=["random", "demo"])
def setup(request, tmp_path_factory):
    """A runner, prompts and what transformers answers."""
    torch.set_num_threads(1)
    if request.param == "demo":
        raw = json.loads((DEMO_CHECKPOINT / "config.json").read_text())
        special = SpecialTokens(*(raw[f"{name}_token_id"] for name in ("image", "vision_start", "vision_end")))
        checkpoint = DEMO_CHECKPOINT
    else:
        checkpoint, special = write_tiny(tmp_path_factory.mktemp("tiny"), tied=False), SpecialTokens()
    reference = reference_model(checkpoint)
    prompts = [make_prompt(layout, seed, special) for seed, layout in enumerate(LAYOUTS)]
    expected = [greedy(reference, prompt, LONG_OUTPUTS, special.image).tokens for prompt in prompts]
    runner = StageRunner.build(checkpoint, num_blocks=NUM_BLOCKS, page_size=PAGE, dtype="float32", with_vision=True)
    return runner, prompts, expected


def run(setup, scheme: str, tmp_path: Path, times: int = 1, **options):
    runner, prompts, expected = setup
    engine = InProcessEngine(runner, scheme, tmp_path, **({"num_blocks": NUM_BLOCKS} | options))
    try:
        assert engine.run(prompts * times, NUM_OUTPUTS) == [tokens[:NUM_OUTPUTS] for tokens in expected] * times
    finally:
        engine.close()
    return engine


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("budget", [7, 64, 4096])
def test_tokens_do_not_depend_on_scheme_and_chunk_size(setup, scheme, budget, tmp_path):
    run(setup, scheme, tmp_path, budget=budget, seed=budget)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_token_at_a_time(setup, scheme, tmp_path):
    runner, prompts, expected = setup
    engine = InProcessEngine(runner, scheme, tmp_path, budget=1, num_blocks=NUM_BLOCKS)
    try:
        assert engine.run(prompts[1:2], LONG_OUTPUTS) == expected[1:2]
    finally:
        engine.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_eighteen_requests_at_once_in_tiny_pools(setup, scheme, tmp_path):
    """KV for little more than the largest request, embeddings for little more than the largest item."""
    largest = max(len(prompt.token_ids) for prompt in setup[1]) + NUM_OUTPUTS
    engine = run(setup, scheme, tmp_path, times=3, budget=64, num_blocks=-(-largest // PAGE) + 3, capacity=110, seed=3)
    assert engine.core.embedding_stats().peak_held <= 110


@pytest.mark.parametrize("scheme", SCHEMES)
def test_preempted_requests_give_the_same_tokens(setup, scheme, tmp_path):
    """Four prompts fill the pool whole, so that their outputs push each other out."""
    runner, prompts, expected = setup
    chosen = [0, 1, 5, 0]
    blocks = sum(-(-len(prompts[i].token_ids) // PAGE) for i in chosen)
    engine = InProcessEngine(runner, scheme, tmp_path, budget=64, num_blocks=blocks, capacity=200, max_in_flight=2)
    try:
        assert engine.run([prompts[i] for i in chosen], LONG_OUTPUTS) == [expected[i] for i in chosen]
        assert engine.core.stats().preemptions > 0
    finally:
        engine.close()
