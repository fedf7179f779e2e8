"""The vision encoder against transformers in float32: the patches, the rows, and that images do not see each other."""

from __future__ import annotations

import pytest
import torch

from gllm.worker.vision import VisionEncoder
from tests.models.checkpoints import make_prompt, pixel_values, reference_model

SIZES = ((10, 6), (18, 22), (4, 8), (6, 6), (2, 2), (12, 12), (14, 2), (18, 22))


@pytest.fixture(scope="module")
def encoder(untied):
    return VisionEncoder(untied, dtype="float32")


@pytest.fixture(scope="module")
def prompt():
    return make_prompt(SIZES)


def test_patches_equal_the_reference_processor(encoder, prompt):
    expected, _ = pixel_values(prompt)
    expected = expected.view(-1, 3, 2, 14 * 14)
    assert torch.equal(expected[:, :, 0], expected[:, :, 1])
    ours = encoder.patches(prompt.images).view(-1, 3, 14 * 14)
    torch.testing.assert_close(ours, expected[:, :, 0], atol=1e-6, rtol=0)


@torch.no_grad()
def test_rows_equal_transformers(untied, encoder, prompt):
    pixels, grids = pixel_values(prompt)
    expected = reference_model(untied).model.visual(pixels, grid_thw=grids).pooler_output
    rows = encoder.encode(prompt.images, [item.grid for item in prompt.items])
    assert [len(r) for r in rows] == [item.num_tokens for item in prompt.items]
    torch.testing.assert_close(torch.cat(rows), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("max_patches", [1, 100, 500])
def test_an_image_does_not_depend_on_its_batch(untied, encoder, prompt, max_patches):
    grids = [item.grid for item in prompt.items]
    together = encoder.encode(prompt.images, grids)
    split = VisionEncoder(untied, dtype="float32", max_patches=max_patches).encode(prompt.images, grids)
    for one, other in zip(together, split, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("shape", "dtype", "grid", "words"),
    [
        ((28, 28, 3), torch.float32, (1, 2, 2), "needs uint8"),
        ((28, 56, 3), torch.uint8, (1, 2, 2), "needs uint8"),
        ((3, 28, 28), torch.uint8, (1, 2, 2), "needs uint8"),
        ((42, 28, 3), torch.uint8, (1, 3, 2), "not a still image"),
        ((28, 28, 3), torch.uint8, (2, 2, 2), "not a still image"),
    ],
)
def test_pixels_that_do_not_fit_are_refused(encoder, shape, dtype, grid, words):
    with pytest.raises(ValueError, match=words):
        encoder.encode([torch.zeros(shape, dtype=dtype)], [grid])
