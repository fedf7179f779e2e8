"""Step 1 of the training: the ViT alone learns to say, at every merged token, what the picture shows.

A feature's target is the sum of the text model's own embeddings of the shape's, the colour's and the digit's word and
of <|image_pad|>, so that the text model starts with features that it can already read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional
from transformers import Qwen2Tokenizer
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLVisionAttention,
    apply_rotary_pos_emb_vision,
)
from transformers.vision_utils import get_vision_position_ids

from benchmarks.demo_model.architecture import CLIP_MEAN, CLIP_STD, MERGE, PATCH
from benchmarks.demo_model.optimiser import Optimiser
from benchmarks.demo_model.pictures import COLOURS, DIGITS, MAX_SIDE, MIN_SIDE, SHAPES, Content, draw, draw_sides
from benchmarks.demo_model.questions import TRAINING_STREAM, draw_contents

CELL = PATCH * MERGE  # pixels on a side of one merged token
Grid = tuple[int, int]  # merged tokens: rows, columns


@dataclass(frozen=True)
class Stage:
    """Some steps on pictures with sides of up to `most` pixels, about `patches` patches a step."""

    most: int
    steps: int
    patches: int


@dataclass(frozen=True)
class VisionPlan:
    """How long and how hard the ViT trains. Small pictures first: on them shapes and digits are learnt soonest."""

    stages: tuple[Stage, ...] = (Stage(MIN_SIDE, 500, 1024), Stage(84, 200, 1024), Stage(MAX_SIDE, 1600, 2560))
    peak_rate: float = 5e-3
    warm_up: int = 40
    sharpness: float = 10.0  # factor on a feature's product with a word's embedding, before the softmax

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def stage(self, step: int) -> Stage:
        """The stage that a step belongs to."""
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        return self.stages[-1]


def training_grid(rng: np.random.Generator, most: int = MAX_SIDE) -> Grid:
    """A picture's size in merged tokens, as often as pictures with sides up to `most` pixels have it."""
    width, height = draw_sides(rng, most=most)
    return max(2, round(height / CELL)), max(2, round(width / CELL))


def draw_for_grid(rng: np.random.Generator, content: Content, grid: Grid) -> Image.Image:
    """A picture that the image processor brings to this grid; half the time it has to be resized."""
    height, width = grid[0] * CELL, grid[1] * CELL
    if rng.random() < 0.5:
        return draw(rng, content, width, height)
    drawn_height, drawn_width = (int(max(56, side + rng.integers(-13, 14))) for side in (height, width))
    return draw(rng, content, drawn_width, drawn_height).resize((width, height), Image.Resampling.BICUBIC)


def patches_of(pictures: Sequence[Image.Image]) -> Tensor:
    """Normalised patches of pictures of one size, in the processor's order, one of the two equal frames.

    Returns float32 [pictures, patches, 3 * PATCH * PATCH].
    """
    pixels = np.stack([np.asarray(picture, dtype=np.float32) for picture in pictures])
    mean, std = np.float32(CLIP_MEAN), np.float32(CLIP_STD)
    pixels = (pixels / np.float32(255.0) - mean) / std
    count, height, width, _ = pixels.shape
    rows, columns = height // CELL, width // CELL
    blocks = pixels.reshape(count, rows, MERGE, PATCH, columns, MERGE, PATCH, 3).transpose(0, 1, 4, 2, 5, 7, 3, 6)
    return torch.from_numpy(np.ascontiguousarray(blocks).reshape(count, rows * columns * MERGE**2, 3 * PATCH**2))


def window_mask(grid: Grid, window: int) -> Tensor:
    """Which patches share a window of `window` merged tokens on a side; bool [patches, patches]."""
    rows = torch.arange(grid[0])[:, None] // window
    columns = torch.arange(grid[1])[None, :] // window
    owner = (rows * grid[1] + columns).flatten().repeat_interleave(MERGE**2)
    return owner[:, None] == owner[None, :]


def _attend(attention: Qwen2_5_VLVisionAttention, hidden: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None):
    """Attention of a batch of equal pictures; hidden [pictures, patches, channels]."""
    pictures, patches, _ = hidden.shape
    qkv = attention.qkv(hidden).view(pictures, patches, 3, attention.num_heads, -1)
    query, key, value = qkv.unbind(2)
    query, key = apply_rotary_pos_emb_vision(query, key, *rotary)
    mixed = functional.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask
    )
    return attention.proj(mixed.transpose(1, 2).reshape(hidden.shape))


def _normed(hidden: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(hidden, weight.shape, weight, 1e-6)


def encode(vision: Qwen2_5_VisionTransformerPretrainedModel, patches: Tensor, grid: Grid) -> Tensor:
    """The ViT on pictures of one size at once: the same numbers as transformers' picture by picture, much sooner.

    patches: [pictures, patches, 3 * PATCH * PATCH]. Returns [pictures, rows * columns, hidden of the text model].
    """
    thw = torch.tensor([[1, grid[0] * MERGE, grid[1] * MERGE]])
    kernel = vision.patch_embed.proj.weight.sum(dim=2).flatten(1)  # the two frames of a still picture are equal
    hidden = functional.linear(patches, kernel)
    rotary = vision.rotary_pos_emb(hidden, get_vision_position_ids(thw, MERGE))
    mask = window_mask(grid, vision.window_size // CELL)
    for number, block in enumerate(vision.blocks):
        seen = None if number in vision.fullatt_block_indexes else mask
        hidden = hidden + _attend(block.attn, _normed(hidden, block.norm1.weight), rotary, seen)
        hidden = hidden + block.mlp(_normed(hidden, block.norm2.weight))
    return vision.merger(hidden).view(len(patches), grid[0] * grid[1], -1)


class WordTargets:
    """The words that a picture's features should sum to."""

    def __init__(self, tokenizer: Qwen2Tokenizer, embeddings: Tensor) -> None:
        """embeddings: [vocabulary, hidden], taken as constants."""
        self._names = {"shape": tuple(SHAPES), "colour": tuple(COLOURS), "digit": DIGITS}
        self._tables = {
            attribute: embeddings[tokenizer.convert_tokens_to_ids(list(names))].detach().clone()
            for attribute, names in self._names.items()
        }
        self._always = embeddings[tokenizer.convert_tokens_to_ids("<|image_pad|>")].detach().clone()

    def _labels(self, attribute: str, contents: Sequence[Content]) -> Tensor:
        return torch.tensor([self._names[attribute].index(getattr(content, attribute)) for content in contents])

    def loss(self, features: Tensor, contents: Sequence[Content], sharpness: float) -> Tensor:
        """Cross entropy of each attribute at every token, and distance from the sum; features [n, tokens, hidden]."""
        target, total = self._always, features.new_zeros(())
        for attribute, table in self._tables.items():
            labels = self._labels(attribute, contents)
            logits = sharpness * features @ table.T
            wanted = labels[:, None].expand(logits.shape[:2])
            total = total + functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
            target = target + table[labels]
        return total + 0.5 * (features - target[:, None]).square().sum(-1).mean()

    def accuracy(self, features: Tensor, contents: Sequence[Content]) -> dict[str, float]:
        """Share of tokens whose nearest word is right, per attribute."""
        return {
            attribute: float(
                ((features @ table.T).argmax(-1) == self._labels(attribute, contents)[:, None]).float().mean()
            )
            for attribute, table in self._tables.items()
        }


@dataclass(frozen=True)
class Batch:
    """Pictures of one size; patches as `patches_of` returns them."""

    grid: Grid
    contents: tuple[Content, ...]
    patches: Tensor


class BatchSource:
    """Draws batches, and gives every one a second time some steps later: drawing costs about as much as a step."""

    def __init__(self, plan: VisionPlan, rng: np.random.Generator) -> None:
        self._plan = plan
        self._rng = rng
        self._drawn: list[Batch] = []

    def batch(self, step: int) -> Batch:
        """The batch for a step."""
        stage = self._plan.stage(step)
        if step % 2 and len(self._drawn) > 24:
            return self._drawn.pop(int(self._rng.integers(len(self._drawn))))
        grid = training_grid(self._rng, stage.most)
        contents = draw_contents(self._rng, max(4, stage.patches // (grid[0] * grid[1] * MERGE**2)), held_out_share=0.0)
        pictures = [draw_for_grid(self._rng, content, grid) for content in contents]
        self._drawn.append(Batch(grid, contents, patches_of(pictures)))
        return self._drawn[-1]


def train_vision(
    vision: Qwen2_5_VisionTransformerPretrainedModel,
    targets: WordTargets,
    plan: VisionPlan,
    seed: Sequence[int],
    say: Callable[[str], None],
) -> None:
    """Trains the ViT in place, on pictures drawn from `seed` (with the training stream's first word before it)."""
    optimiser = Optimiser(vision, plan.peak_rate, plan.steps, plan.warm_up)
    source = BatchSource(plan, np.random.default_rng([TRAINING_STREAM, *seed]))
    started = time.perf_counter()
    for step in range(plan.steps):
        batch = source.batch(step)
        features = encode(vision, batch.patches, batch.grid)
        loss = targets.loss(features, batch.contents, plan.sharpness)
        loss.backward()
        optimiser.step()
        if step % 100 == 0 or step == plan.steps - 1:
            shares = targets.accuracy(features.detach(), batch.contents)
            words = " ".join(f"{name} {share:.3f}" for name, share in shares.items())
            say(f"vision step {step} loss {loss.item():.3f} {words} {time.perf_counter() - started:.0f} s")
