"""Floating-point operations of the model's two halves, from shapes alone: two for each multiply-add of a product."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.sim.model_spec import ModelSpec

Grid = tuple[int, int, int]


def prefill_flops(model: ModelSpec, num_tokens: int) -> float:
    """One prompt through all layers, with causal attention, and the head for its last token; however it is cut into
    chunks."""
    pairs = num_tokens * (num_tokens + 1) / 2
    attention = 4 * pairs * model.num_heads * model.head_dim
    layers = model.num_layers * (2 * num_tokens * model.layer_parameters + attention)
    return layers + 2 * model.hidden_size * model.vocab_size


def encode_flops(model: ModelSpec, grids: Iterable[Grid]) -> float:
    """Images through the vision encoder; windows count as full ones, as nearly all are."""
    vision, total = model.vision, 0.0
    num_full = len(vision.full_attention_layers)
    merged = vision.hidden_size * vision.patches_per_token
    for frames, height, width in grids:
        patches = frames * height * width
        attended = (vision.depth - num_full) * vision.window_patches + num_full * patches
        embedding = 2 * patches * vision.in_channels * vision.patch_size**2 * vision.hidden_size
        merger = 2 * (patches // vision.patches_per_token) * merged * (merged + model.hidden_size)
        total += 2 * patches * vision.num_parameters + 4 * patches * attended * vision.hidden_size + embedding + merger
    return total


def attention_flops(num_new: int, context: int, heads: int, head_dim: int) -> float:
    """Causal attention of the last `num_new` of `context` tokens, in one layer."""
    pairs = num_new * (context - num_new) + num_new * (num_new + 1) / 2
    return 4 * pairs * heads * head_dim
