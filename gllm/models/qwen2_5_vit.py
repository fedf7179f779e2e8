"""Qwen2.5-VL's vision encoder: patches of any number of images -> one row for every 2x2 patches.

Most layers attend inside windows. Tokens are ordered so that windows of equal size lie together over all images of the
batch: every size is one batched product, without padding, masks, or a loop over windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from gllm.layers.linear import ColumnLinear, QKVLinear, RowLinear
from gllm.layers.norm import RMSNorm
from gllm.layers.packed import num_padding_rows, product
from gllm.layers.parallel import Parallel
from gllm.layers.rotary import Rotary, rotate_
from gllm.layers.row_blocks import join, row_blocks
from gllm.layers.weights import Weights, parameter
from gllm.models.config import VisionConfig
from gllm.models.qwen2 import MLP, Angles

Grid = tuple[int, int, int]
NORM_EPS = 1e-6  # not in config.json


@dataclass(frozen=True, slots=True)
class Run:
    """`count` neighbouring segments of `length` patches each, from row `start` on; each attends to itself alone."""

    start: int
    count: int
    length: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How the patches of a batch of images are ordered inside the encoder.

    order: int64 [tokens], the raster token at each place; inverse: its inverse. positions: int64 [2, patches], row and
    column of the patch at each place. windows: runs in this order. frames: runs of whole frames, in this order, or in
    raster order when `frame_order` (int64 [patches], the place of each raster patch) is there.
    """

    order: torch.Tensor
    inverse: torch.Tensor
    positions: torch.Tensor
    windows: tuple[Run, ...]
    frames: tuple[Run, ...]
    frame_order: torch.Tensor | None
    patch_order: torch.Tensor


@lru_cache(maxsize=256)
def _frame_windows(rows: int, cols: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """One frame of rows x cols tokens: tokens in window order, int64 [tokens], and the size of the window that each
    belongs to. Windows are side x side tokens, cut at the right and lower edge."""
    row, col = np.divmod(np.arange(rows * cols), cols)
    window = (row // side) * -(-cols // side) + col // side
    order = np.argsort(window, kind="stable")
    sizes = np.bincount(window)
    return order, sizes[window[order]]


@lru_cache(maxsize=256)
def _patch_positions(grid: Grid, merge: int) -> np.ndarray:
    """Row and column of every patch, int64 [2, patches]; patches of one token are neighbours."""
    frames, height, width = grid
    places = np.indices((height, width)).reshape(2, height // merge, merge, width // merge, merge)
    return np.tile(places.transpose(0, 1, 3, 2, 4).reshape(2, -1), frames)


def _runs(lengths: Sequence[int]) -> tuple[Run, ...]:
    """Neighbouring segments of equal length as one run each."""
    runs: list[Run] = []
    start = 0
    for length in lengths:
        if runs and runs[-1].length == length:
            last = runs.pop()
            runs.append(Run(last.start, last.count + 1, length))
        else:
            runs.append(Run(start, 1, length))
        start += length
    return tuple(runs)


def make_layout(grids: Sequence[Grid], config: VisionConfig, device: torch.device) -> Layout:
    """The layout of a batch of images (or frames) with these patch grids (t, h, w)."""
    merge, unit = config.merge_size, config.merge_unit
    side = config.window_size // config.patch_size // merge
    orders, sizes, frame_lengths, first = [], [], [], 0
    for frames, height, width in grids:
        order, size = _frame_windows(height // merge, width // merge, side)
        for _ in range(frames):
            orders.append(order + first)
            sizes.append(size)
            frame_lengths.append(len(order) * unit)
            first += len(order)
    size = np.concatenate(sizes)
    by_size = np.argsort(-size, kind="stable")
    order = np.concatenate(orders)[by_size]
    counts = [(int(n), int((size == n).sum()) // int(n)) for n in sorted(set(size.tolist()), reverse=True)]
    inverse = np.argsort(order, kind="stable")
    patch_order = (order[:, None] * unit + np.arange(unit)).reshape(-1)
    positions = np.concatenate([_patch_positions(grid, merge) for grid in grids], axis=1)[:, patch_order]
    mixed = len(counts) > 1  # else every image's tokens are still together
    frame_order = (inverse[:, None] * unit + np.arange(unit)).reshape(-1) if mixed else None

    def to_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return Layout(
        order=to_device(order),
        inverse=to_device(inverse),
        positions=to_device(positions),
        windows=_runs([n * unit for n, count in counts for _ in range(count)]),
        frames=_runs(frame_lengths),
        frame_order=None if frame_order is None else to_device(frame_order),
        patch_order=to_device(patch_order),
    )


class VisionAttention(nn.Module):
    """Attention inside segments of patches, in its three steps: `project`, `attend`, `out`."""

    def __init__(self, config: VisionConfig, parallel: Parallel, **where: Any) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        heads = config.num_heads
        self.qkv = QKVLinear(config.hidden_size, heads, heads, self.head_dim, parallel, bias=True, **where)
        self.out = RowLinear(self.qkv.shards[0], config.hidden_size, parallel, bias=True, **where)

    def project(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> queries, keys (both rotated) and values, [n, 3, heads, head_dim]."""
        qkv = self.qkv(x).view(len(x), 3, self.qkv.num_heads, self.head_dim)
        rotate_(qkv[:, :2].flatten(1, 2), cos, sin)
        return qkv

    def attend(self, qkv: torch.Tensor, runs: Sequence[Run]) -> torch.Tensor:
        """What `project` gave -> [n, heads * head_dim]; each segment of the runs attends to itself."""
        outs = []
        for run in runs:
            size = run.count * run.length
            part = qkv[run.start : run.start + size].unflatten(0, (run.count, run.length))
            query, key, value = part.permute(2, 0, 3, 1, 4).unbind(0)
            attended = F.scaled_dot_product_attention(query, key, value)
            outs.append(attended.transpose(1, 2).reshape(size, -1))
        return join(outs)

    def load(self, weights: Weights, name: str) -> None:
        self.qkv.load_fused(weights, f"{name}.qkv")
        self.out.load(weights, f"{name}.proj")


class VisionBlock(nn.Module):
    """One layer; `x` [patches + padding, hidden] is updated in place, being the residual stream. The rows of padding
    attend to nothing."""

    def __init__(self, config: VisionConfig, parallel: Parallel, **where: Any) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, NORM_EPS, **where)
        self.attention = VisionAttention(config, parallel, **where)
        self.mlp_norm = RMSNorm(config.hidden_size, NORM_EPS, **where)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, parallel, bias=True, **where)

    def forward(
        self,
        x: torch.Tensor,
        angles: Angles,
        layout: Layout,
        full_attention: bool,
        blocks: Sequence[slice],
        padding: int,
    ) -> None:
        cos, sin = angles
        qkv = join(self.attention.project(self.attention_norm(x[rows]), cos[rows], sin[rows]) for rows in blocks)
        attended = self._attend_frames(qkv, layout) if full_attention else self.attention.attend(qkv, layout.windows)
        attended = F.pad(attended, (0, 0, 0, padding)) if padding else attended
        for rows in blocks:
            part = x[rows]
            part.add_(self.attention.out(attended[rows]))
            part.add_(self.mlp(self.mlp_norm(part)))

    def _attend_frames(self, qkv: torch.Tensor, layout: Layout) -> torch.Tensor:
        if layout.frame_order is None:
            return self.attention.attend(qkv, layout.frames)
        raster = qkv.index_select(0, layout.frame_order)
        return self.attention.attend(raster, layout.frames).index_select(0, layout.patch_order)

    def load(self, weights: Weights, name: str) -> None:
        self.attention_norm.load(weights, f"{name}.norm1")
        self.attention.load(weights, f"{name}.attn")
        self.mlp_norm.load(weights, f"{name}.norm2")
        self.mlp.load(weights, f"{name}.mlp")


class Merger(nn.Module):
    """The rows of 2x2 patches become one row of the language model: [4 n, hidden] -> [n, out_hidden]."""

    def __init__(self, config: VisionConfig, parallel: Parallel, **where: Any) -> None:
        super().__init__()
        self.width = config.hidden_size * config.merge_unit
        self.norm = RMSNorm(config.hidden_size, NORM_EPS, **where)
        self.up = ColumnLinear(self.width, self.width, parallel, bias=True, **where)
        self.down = RowLinear(self.up.shards[0], config.out_hidden_size, parallel, bias=True, **where)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        merged = self.norm(x).view(-1, self.width)
        return join(self.down(F.gelu(self.up(merged[rows]))) for rows in row_blocks(len(merged), x.device))

    def load(self, weights: Weights, name: str) -> None:
        self.norm.load(weights, f"{name}.ln_q")
        self.up.load(weights, [f"{name}.mlp.0"])
        self.down.load(weights, f"{name}.mlp.2")


class VisionTransformer(nn.Module):
    """The whole encoder for still images."""

    def __init__(self, config: VisionConfig, parallel: Parallel, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        where = {"dtype": dtype, "device": device}
        self.config = config
        self.dtype = dtype
        self.device = device
        patch = config.in_channels * config.patch_size**2
        self.patch_weight = parameter(config.hidden_size, patch, **where)
        self.blocks = nn.ModuleList(VisionBlock(config, parallel, **where) for _ in range(config.depth))
        self.merger = Merger(config, parallel, **where)
        quarter = config.head_dim // 4
        self.rotary = Rotary(config.head_dim, config.rope_theta, (quarter, quarter), restart=True, **where)

    def forward(self, patches: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """patches [sum of h * w, channels * patch_size**2] (normalised; the patches of one token are neighbours) ->
        [sum of tokens, out_hidden], images in the given order, tokens in raster order."""
        layout = make_layout(grids, self.config, self.device)
        blocks = row_blocks(len(patches), self.device)
        x = join(product(patches[rows], self.patch_weight) for rows in blocks).index_select(0, layout.patch_order)
        positions, padding = layout.positions, num_padding_rows(x)
        if padding:
            x, positions = F.pad(x, (0, 0, 0, padding)), F.pad(positions, (0, padding))
            blocks = row_blocks(len(x), self.device)
        angles = self.rotary.table(positions)
        for index, block in enumerate(self.blocks):
            block(x, angles, layout, index in self.config.full_attention_layers, blocks, padding)
        return self.merger(x[: len(patches)]).index_select(0, layout.inverse)

    def load(self, weights: Weights) -> None:
        """The patch embedding is summed over its temporal axis: a still image shows the same frame to all of it."""
        c = self.config
        shape = (c.hidden_size, c.in_channels, c.temporal_patch_size, c.patch_size, c.patch_size)
        whole = weights.read("visual.patch_embed.proj.weight", shape)
        self.patch_weight.copy_(whole.float().sum(dim=2).flatten(1))
        for index, block in enumerate(self.blocks):
            block.load(weights, f"visual.blocks.{index}")
        self.merger.load(weights, "visual.merger")
