"""In bfloat16 our logits stay as near to float32 as those of transformers in bfloat16 do."""

from __future__ import annotations

import pytest
import torch

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
