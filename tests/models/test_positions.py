"""M-RoPE positions against transformers' own, and any range equal to the slice of the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gllm.models.qwen2_5_vl import PositionTable, mrope_positions
from tests.models.checkpoints import IMAGE, make_prompt, reference_model

LAYOUTS = [(9,), ((4, 6), 5), (5, (4, 6)), (3, (2, 2), 1, (8, 4), (4, 12), 7)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_to_transformers(tied, layout):
    prompt = make_prompt(layout)
    ids = torch.tensor([prompt.token_ids])
    model = reference_model(tied).model
    grids = torch.tensor([item.grid for item in prompt.items]).view(-1, 3)
    expected, delta = model.get_rope_index(ids, (ids == IMAGE).int(), image_grid_thw=grids)
    size = ids.shape[1]
    ours = mrope_positions(prompt.items, 0, size)
    assert ours.dtype == np.int64
    np.testing.assert_array_equal(ours, expected[:, 0].numpy())
    after = mrope_positions(prompt.items, size, 5)  # output tokens
    np.testing.assert_array_equal(after, np.broadcast_to(np.arange(size, size + 5) + delta.item(), (3, 5)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_range_is_a_slice_of_the_whole(layout):
    prompt = make_prompt(layout)
    table = PositionTable(prompt.items)
    size = len(prompt.token_ids) + 4
    whole = table.positions(0, size)
    for start in range(size):
        for stop in range(start + 1, size + 1, 3):
            np.testing.assert_array_equal(table.positions(start, stop - start), whole[:, start:stop])
