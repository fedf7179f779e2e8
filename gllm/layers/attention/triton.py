"""Paged attention by our own Triton kernels: CUDA's default where flash-attn does not serve.

Prompts and chunks go through large tiles of queries. Sequences whose queries fill a small tile at most (decodes) have
their contexts split until the device is busy, and summed afterwards. On the CPU the kernels run in Triton's
interpreter alone (TRITON_INTERPRET=1), which the tests use. No GPU has run this yet: the kernels were compiled for
sm_90a, and their results compared with `sdpa` in the interpreter; speed has not been measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from gllm.layers.attention.base import AttentionInputs, AttentionSetting
from gllm.layers.attention.triton_kernels import attend, combine, write_kv

LOG2_E = 1.4426950408889634
MAX_HEAD_DIM = 256
MAX_SPLITS = 64  # of one context


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Sizes of the work of one program. rows: queries (tokens times heads of a group) of a prefill tile; few_rows: of
    a decode tile, 16 being the least that tensor cores take; keys: keys at a time; min_split: keys that are worth a
    program of their own; programs: how many keep the device busy."""

    rows: int
    few_rows: int
    keys: int
    min_split: int
    programs: int
    num_warps: int
    few_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Work:
    """The programs of one micro-batch. items int32 [n, 3]: see `attend`; the first `num_tiles` are prefill tiles, the
    others decode tiles, split into `split_keys` keys each (None: not split). tiles int32 [m, 3]: see `combine`."""

    items: torch.Tensor
    num_tiles: int
    split_keys: int | None
    tiles: torch.Tensor


@dataclass(slots=True)
class Plan:
    """work: by (kv_heads, group), made by the first layer, since the batch does not tell the number of heads."""

    inputs: AttentionInputs
    sizes: Tiles
    work: dict[tuple[int, int], Work] = field(default_factory=dict)


class TritonAttention:
    """See `AttentionBackend`. The current CUDA device must be that of the tensors."""

    def __init__(self, sizes: Tiles | None = None) -> None:
        """sizes: instead of those chosen by dtype, for tests."""
        self._sizes = sizes

    @staticmethod
    def refusal(setting: AttentionSetting) -> str | None:
        if setting.device.type != "cuda" and not isinstance(attend, InterpretedFunction):
            return "it needs a CUDA device (or TRITON_INTERPRET=1, for tests): use --attention-backend sdpa"
        if setting.head_dim > MAX_HEAD_DIM:
            return f"head size {setting.head_dim} is above {MAX_HEAD_DIM}: use --attention-backend sdpa"
        return None

    def plan(self, inputs: AttentionInputs, dtype: torch.dtype, device: torch.device) -> Plan:
        return Plan(inputs, self._sizes or tile_sizes(dtype, device))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        plan: Plan,
    ) -> torch.Tensor:
        kv_heads, head_dim = key.shape[1:]
        group = query.shape[1] // kv_heads
        row = kv_heads * head_dim
        write_kv[(len(key),)](
            key, value, key_cache, value_cache, plan.inputs.slots, key.stride(0), value.stride(0),
            ROW=row, ROW_PAD=triton.next_power_of_2(row),
        )  # fmt: skip
        if (kv_heads, group) not in plan.work:
            plan.work[kv_heads, group] = make_work(plan.inputs, plan.sizes, kv_heads, group, query.device)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        _attend(query, key_cache, value_cache, out, plan.inputs, plan.sizes, plan.work[kv_heads, group])
        return out


def tile_sizes(dtype: torch.dtype, device: torch.device) -> Tiles:
    """bfloat16: the largest tiles for which ptxas (sm_90a, head size 128) keeps everything in registers. float32
    products run outside of the tensor cores, each thread holding its operands: small tiles, else they spill."""
    programs = 2 * _multiprocessors(device)
    if dtype == torch.float32:
        return Tiles(
            rows=16, few_rows=16, keys=32, min_split=256, programs=programs, num_warps=4, few_warps=4, num_stages=1
        )
    return Tiles(
        rows=128, few_rows=16, keys=64, min_split=256, programs=programs, num_warps=8, few_warps=4, num_stages=3
    )


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def make_work(inputs: AttentionInputs, sizes: Tiles, kv_heads: int, group: int, device: torch.device) -> Work:
    """Cuts the micro-batch into programs, on the host; one copy to the device."""
    new, context = np.array(inputs.query_lens), np.array(inputs.context_lens)
    few = new * group <= few_rows(sizes, group)
    large = _prefill_tiles(new, context, np.flatnonzero(~few), max(1, prefill_rows(sizes, group) // group))
    decodes = np.flatnonzero(few)
    split_keys, counts = _splits(context[decodes], sizes, kv_heads)
    firsts = np.cumsum(counts) - counts
    part = np.arange(counts.sum()) - np.repeat(firsts, counts)
    small = np.stack([np.repeat(decodes, counts), np.zeros_like(part), part * split_keys], axis=1)
    tiles = np.stack([decodes, firsts, counts], axis=1)
    packed = torch.from_numpy(np.concatenate([large, small, tiles]).astype(np.int32))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    is_split = bool(len(counts)) and counts.max() > 1
    num_items = len(large) + len(small)
    return Work(packed[:num_items], len(large), split_keys if is_split else None, packed[num_items:])


def prefill_rows(sizes: Tiles, group: int) -> int:
    """Rows of a prefill tile: at least one token's."""
    return max(sizes.rows, triton.next_power_of_2(group))


def few_rows(sizes: Tiles, group: int) -> int:
    return max(sizes.few_rows, triton.next_power_of_2(group))


def _prefill_tiles(new: np.ndarray, context: np.ndarray, sequences: np.ndarray, tokens: int) -> np.ndarray:
    """Items [n, 3] of `tokens` queries each, those with the longest contexts first: no long one is left to the end."""
    counts = -(-new[sequences] // tokens)
    sequence = np.repeat(sequences, counts)
    first = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens
    order = np.argsort(-((context - new)[sequence] + first), kind="stable")
    return np.stack([sequence, first, np.zeros_like(first)], axis=1)[order]


def _splits(context: np.ndarray, sizes: Tiles, kv_heads: int) -> tuple[int, np.ndarray]:
    """How many keys a program takes, a multiple of `sizes.keys`, and how many programs each sequence gets."""
    if not len(context):
        return sizes.keys, context
    fair = -(-int(context.sum()) * kv_heads // sizes.programs)
    keys = max(fair, sizes.min_split, -(-int(context.max()) // MAX_SPLITS))
    keys = -(-keys // sizes.keys) * sizes.keys
    return keys, -(-context // keys)


def _attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    inputs: AttentionInputs,
    sizes: Tiles,
    work: Work,
) -> None:
    heads, head_dim = query.shape[1:]
    kv_heads = key_cache.shape[2]
    group = heads // kv_heads
    pad = max(16, triton.next_power_of_2(head_dim))
    shape = {"KV_HEADS": kv_heads, "GROUP": group, "HEAD": head_dim, "HEAD_PAD": pad}

    def launch(items: torch.Tensor, rows: int, warps: int, partial: tuple[torch.Tensor, ...], split_keys: int) -> None:
        attend[(len(items) * kv_heads,)](
            query, key_cache, value_cache, out, *partial, items, inputs.query_starts, inputs.context_lens_device,
            inputs.block_tables, query.stride(0), inputs.block_tables.stride(0), split_keys,
            LOG2_E / math.sqrt(head_dim), **shape, PAGE=inputs.page_size, ROWS=rows, KEYS=sizes.keys,
            SPLIT=split_keys > 0, PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=warps, num_stages=sizes.num_stages,
        )  # fmt: skip

    unused = (out, out, out)
    if work.num_tiles:
        launch(work.items[: work.num_tiles], prefill_rows(sizes, group), sizes.num_warps, unused, 0)
    small, rows = work.items[work.num_tiles :], few_rows(sizes, group)
    if not len(small):
        return
    if work.split_keys is None:
        launch(small, rows, sizes.few_warps, unused, 0)
        return
    places = len(small) * kv_heads * rows
    flat = torch.empty(places * (pad + 2), dtype=torch.float32, device=query.device)
    partial = flat.split([places * pad, places, places])
    launch(small, rows, sizes.few_warps, partial, work.split_keys)
    combine[(len(work.tiles) * (rows // group) * heads,)](
        *partial, out, work.tiles, inputs.query_starts, **shape, ROWS=rows, MAX_SPLITS=MAX_SPLITS
    )
