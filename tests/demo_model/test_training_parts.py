"""The training's short cuts equal the plain way: batched ViT, patches, token trees."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.demo_model.architecture import model_config
from benchmarks.demo_model.evaluate import BUNDLED, Reference
from benchmarks.demo_model.questions import draw_contents
from benchmarks.demo_model.tokenizer import build_tokenizer
from benchmarks.demo_model.trees import TRUNK, EncodedPicture, Tree, TreeBatch, cached_encode, grow_tree, stack_trees
from benchmarks.demo_model.vision_training import draw_for_grid, encode, patches_of

HIDDEN = 128


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(BUNDLED)


def test_tokenizer_and_config_are_the_bundled_ones(reference: Reference) -> None:
    built = build_tokenizer()
    assert built.get_vocab() == reference.tokenizer.get_vocab()
    assert built.chat_template == reference.tokenizer.chat_template
    config, bundled = model_config(built), reference.model.config
    for name in ("hidden_size", "vocab_size", "num_hidden_layers", "rope_parameters"):
        assert getattr(config.text_config, name) == getattr(bundled.text_config, name)
    for name in ("depth", "hidden_size", "window_size", "fullatt_block_indexes"):
        assert getattr(config.vision_config, name) == getattr(bundled.vision_config, name)


@pytest.mark.parametrize("grid", [(2, 2), (3, 5), (8, 6)])
@torch.inference_mode()
def test_batched_vision_equals_transformers(reference: Reference, grid: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    pictures = [draw_for_grid(rng, content, grid) for content in draw_contents(rng, 2, held_out_share=0.0)]
    encoded = reference.processor(pictures, return_tensors="pt")
    plain = reference.model.model.visual(encoded["pixel_values"], encoded["image_grid_thw"]).pooler_output
    batched = encode(reference.model.model.visual, patches_of(pictures), grid).flatten(0, 1)
    torch.testing.assert_close(batched, plain, atol=2e-4, rtol=1e-4)


def branch_alone(tree: Tree, branch: int) -> list[int]:
    """Indices of the trunk's tokens and of one branch's."""
    return [index for index, owner in enumerate(tree.branches) if owner in (TRUNK, branch)]


def hidden_states(reference: Reference, batch: TreeBatch) -> torch.Tensor:
    model = reference.model
    embeds = model.get_input_embeddings()(batch.ids)
    embeds = embeds.masked_scatter((batch.ids == model.config.image_token_id)[..., None], batch.features)
    mask = {"full_attention": batch.mask}
    return model.model.language_model(
        inputs_embeds=embeds, position_ids=batch.positions, attention_mask=mask, use_cache=False
    ).last_hidden_state


@torch.inference_mode()
def test_a_branch_of_a_tree_equals_the_conversation_alone(reference: Reference) -> None:
    rng = np.random.default_rng(3)
    model, image_id = reference.model, reference.model.config.image_token_id
    contents = draw_contents(rng, 30, held_out_share=0.0)
    grids = [(int(rng.integers(2, 5)), int(rng.integers(2, 5))) for _ in contents]
    pool = [
        EncodedPicture(content, grid, torch.randn(grid[0] * grid[1], HIDDEN) * 0.2)
        for content, grid in zip(contents, grids, strict=True)
    ]
    trees = [grow_tree(rng, cached_encode(reference.tokenizer), image_id, pool, 4) for _ in range(4)]
    batch = stack_trees(trees, HIDDEN)
    whole = hidden_states(reference, batch)
    for row, tree in enumerate(trees):
        index = branch_alone(tree, max(tree.branches))
        ids = torch.tensor([[tree.ids[i] for i in index]])
        thw = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in (p.grid for p in tree.pictures)])
        kinds = (ids == image_id).int()
        positions, _ = model.model.get_rope_index(ids, kinds, image_grid_thw=thw if len(thw) else None)
        embeds = model.get_input_embeddings()(ids)
        if tree.pictures:
            features = torch.cat([picture.features for picture in tree.pictures])
            embeds = embeds.masked_scatter((ids == image_id)[..., None], features)
        alone = model.model.language_model(inputs_embeds=embeds, position_ids=positions).last_hidden_state
        torch.testing.assert_close(whole[row, index], alone[0], atol=2e-3, rtol=1e-3)
        assert reference.tokenizer(reference.tokenizer.decode(ids[0]))["input_ids"] == ids[0].tolist()
