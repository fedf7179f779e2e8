"""In bfloat16 our logits stay as near to float32 as those of transformers in bfloat16 do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gllm.models import qwen2, qwen2_5_vit
from gllm.worker.runner import StageRunner
from tests.models.checkpoints import IMAGE, make_prompt, pixel_values, reference_model
from tests.worker.harness import Harness

LAYOUTS = [(40,), (5, (10, 6), 9), (3, (18, 22), 4, (4, 8), 2)]


@torch.no_grad()
def last_logits(reference, prompt) -> torch.Tensor:
    ids = torch.tensor([prompt.token_ids])
    inputs = {}
    if prompt.images:
        pixels, inputs["image_grid_thw"] = pixel_values(prompt)
        inputs["pixel_values"] = pixels.to(reference.dtype)
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    return reference(input_ids=ids, logits_to_keep=1, **inputs).logits[0, -1].float()


@pytest.mark.parametrize("chunk", [16, 10**9])
def test_spread_is_that_of_transformers(untied, chunk):
    wide = reference_model(untied)
    narrow = reference_model(untied).to(torch.bfloat16)
    runner = StageRunner.build(untied, num_blocks=64, page_size=8, dtype="bfloat16", with_vision=True)
    rows: list[torch.Tensor] = []
    plain = runner.model.logits
    runner.model.logits = lambda hidden: (rows.append(plain(hidden)), rows[-1])[1]
    theirs, ours = [], []
    for seed, layout in enumerate(LAYOUTS * 3):
        prompt = make_prompt(layout, seed)
        exact = last_logits(wide, prompt)
        rows.clear()
        Harness([runner], 64).run([prompt], 1, chunk)
        ours.append((rows[-1][0].float() - exact).norm() / exact.norm())
        theirs.append((last_logits(narrow, prompt) - exact).norm() / exact.norm())
    assert torch.stack(ours).mean() <= 1.1 * torch.stack(theirs).mean()


@pytest.mark.parametrize("chunk", [13, 10**9])
def test_padding_once_is_padding_in_every_product(tied, chunk, monkeypatch):
    """The same numbers to the last bit, for prompts and images of odd sizes and more rows than a block has."""

    def served() -> list[torch.Tensor]:
        runner = StageRunner.build(tied, num_blocks=160, page_size=8, dtype="bfloat16", with_vision=True)
        rows: list[torch.Tensor] = []
        plain = runner.model.logits
        runner.model.logits = lambda hidden: (rows.append(plain(hidden)), rows[-1])[1]
        for seed, layout in enumerate([(7,), (333, (10, 6), 9, (18, 22), 251), (3, (30, 34), (6, 4), 2)]):
            Harness([runner], 160).run([make_prompt(layout, seed)], 2, chunk)
        return rows

    once = served()
    for model in (qwen2, qwen2_5_vit):
        monkeypatch.setattr(model, "num_padding_rows", lambda x: 0)
    for ours, expected in zip(once, served(), strict=True):
        assert ours.isfinite().all()
        assert torch.equal(ours, expected)


def test_a_tied_head_is_packed_and_rows_are_still_looked_up(tied):
    runner = StageRunner.build(tied, num_blocks=8, page_size=8, dtype="bfloat16")
    embedding, head = runner.model.embedding, runner.model.head
    if head.packed is None:
        pytest.skip("nothing is packed on this machine")
    hidden = torch.randn(3, embedding.weight.shape[1]).bfloat16()
    with torch.inference_mode():
        torch.testing.assert_close(head(hidden), F.linear(hidden, embedding.weight), rtol=2**-6, atol=2**-6)
        assert torch.equal(embedding(torch.tensor([5])), embedding.weight[5:6])
    assert head.weight is None
