"""The whole model against transformers in float32: logits within 1e-4, the same greedy tokens, however it is cut."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from gllm.config import DEMO_CHECKPOINT
from gllm.worker.runner import StageRunner
from tests.models.checkpoints import Expected, SpecialTokens, greedy, make_prompt, reference_model
from tests.worker.harness import Harness, Prompt, Running

LAYOUTS = {
    "text": (37,),
    "one image": (5, (10, 6), 9),
    "four odd images": (3, (18, 22), 4, (4, 8), 2, (14, 2), 1, (8, 12), 6),
    "back to back": (4, (6, 6), (6, 10), (2, 4), 3),
    "image first": ((12, 10), 8),
    "image last": (8, (8, 14)),
}
NUM_OUTPUTS = 6
NUM_BLOCKS = 256


class Captured:
    """A harness whose logits are kept, request by request."""

    def __init__(self, stages: list[StageRunner]) -> None:
        self.harness = Harness(stages, NUM_BLOCKS)
        self.rows: list[torch.Tensor] = []
        model = stages[-1].model
        plain = type(model).logits.__get__(model)

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            out = plain(hidden)
            self.rows.extend(out.float())
            return out

        model.logits = logits


def check(request: Running, expected: Expected, rows: list[torch.Tensor] | None = None) -> None:
    assert request.output == expected.tokens
    if rows is not None:
        assert len(rows) == len(expected.logits)
        for ours, theirs in zip(rows, expected.logits, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.fixture(scope="module", params=["tied", "untied", "demo"])
def setup(request: pytest.FixtureRequest) -> tuple[StageRunner, dict[str, tuple[Prompt, Expected]], Path]:
    """A runner, the prompts with what transformers answers, and the checkpoint."""
    if request.param == "demo":
        if not (DEMO_CHECKPOINT / "model.safetensors").is_file():
            pytest.skip("the demo checkpoint is not there")
        checkpoint = DEMO_CHECKPOINT
        raw = json.loads((checkpoint / "config.json").read_text())
        special = SpecialTokens(*(raw[f"{name}_token_id"] for name in ("image", "vision_start", "vision_end")))
    else:
        checkpoint, special = request.getfixturevalue(request.param), SpecialTokens()
    reference = reference_model(checkpoint)
    prompts = {name: make_prompt(layout, seed, special) for seed, (name, layout) in enumerate(LAYOUTS.items())}
    expected = {name: (p, greedy(reference, p, NUM_OUTPUTS, special.image)) for name, p in prompts.items()}
    runner = StageRunner.build(checkpoint, num_blocks=NUM_BLOCKS, page_size=8, dtype="float32", with_vision=True)
    return runner, expected, checkpoint


@pytest.mark.parametrize("chunk", [1, 7, 64, 10**9], ids=["1", "7", "64", "whole"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_and_tokens_for_any_chunk_size(setup, name: str, chunk: int):
    runner, expected, _ = setup
    prompt, answer = expected[name]
    captured = Captured([runner])
    (request,) = captured.harness.run([prompt], NUM_OUTPUTS, chunk)
    check(request, answer, captured.rows)
    assert runner.take_failures() == {}
    assert runner.embeddings.num_tokens == 0


@pytest.mark.parametrize("chunk", [7, 10**9], ids=["7", "whole"])
def test_batching_changes_nothing(setup, chunk: int):
    runner, expected, _ = setup
    prompts = [prompt for prompt, _ in expected.values()]
    requests = Harness([runner], NUM_BLOCKS).run(prompts + prompts[::-1], NUM_OUTPUTS, chunk)
    answers = [answer for _, answer in expected.values()]
    for request, answer in zip(requests, answers + answers[::-1], strict=True):
        check(request, answer)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_pipeline_stages_equal_the_whole(setup, num_stages: int):
    _, expected, checkpoint = setup
    stages = _stages(checkpoint, num_stages)
    captured = Captured(stages)
    for prompt, answer in expected.values():
        captured.rows.clear()
        (request,) = captured.harness.run([prompt], NUM_OUTPUTS, 16)
        check(request, answer, captured.rows)


@cache
def _stages(checkpoint: Path, num_stages: int) -> list[StageRunner]:
    from gllm.layers.parallel import Parallel

    return [
        StageRunner.build(
            checkpoint,
            num_blocks=NUM_BLOCKS,
            page_size=8,
            dtype="float32",
            parallel=Parallel(pp_rank=rank, pp_size=num_stages),
            with_vision=rank == 0,
        )
        for rank in range(num_stages)
    ]
