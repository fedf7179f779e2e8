"""Paged attention by flash-attn 2, which reads the cache through the block table itself.

flash-attn 2 takes pages of a multiple of 256 tokens only, 16-bit values, and Ampere or later; a setting that does not
fit is refused, never converted. No GPU has run this backend yet; tests check what it asks of flash-attn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gllm.layers.attention.base import AttentionInputs, AttentionSetting

PAGE_UNIT = 256
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring sequences that are all decodes, or all not: one call. Rows `start .. stop - 1` of the batch; starts
    int32 [n + 1] of queries and of keys, counted from the run's first; tables int32 [n, max_blocks]."""

    start: int
    stop: int
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    max_query: int
    max_context: int
    tables: torch.Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    slots: torch.Tensor
    runs: tuple[Run, ...]


class FlashAttention:
    """See `AttentionBackend`. Raises ImportError where flash-attn is not installed."""

    def __init__(self) -> None:
        from flash_attn import flash_attn_varlen_func

        self._attend = flash_attn_varlen_func

    @staticmethod
    def refusal(setting: AttentionSetting) -> str | None:
        if setting.device.type != "cuda":
            return "flash-attn needs a CUDA device: use --attention-backend sdpa"
        if torch.cuda.get_device_capability(setting.device) < (8, 0):
            return "flash-attn needs a GPU of compute capability 8.0 or later: use --attention-backend triton"
        if setting.dtype not in (torch.bfloat16, torch.float16):
            return f"flash-attn takes 16-bit values, not {setting.dtype}: use --attention-backend triton"
        if setting.head_dim % 8 or setting.head_dim > MAX_HEAD_DIM:
            return f"flash-attn takes no head size of {setting.head_dim}: use --attention-backend triton"
        if setting.page_size % PAGE_UNIT:
            return (
                f"flash-attn reads pages of a multiple of {PAGE_UNIT} tokens, not {setting.page_size}: "
                f"use --page-size {PAGE_UNIT} or --attention-backend triton"
            )
        return None

    def plan(self, inputs: AttentionInputs, dtype: torch.dtype, device: torch.device) -> Plan:
        """Decodes get calls of their own: flash-attn splits contexts over the device only where all have one query."""
        key_starts = F.pad(inputs.context_lens_device.cumsum(0, dtype=torch.int32), (1, 0))
        runs, row = [], 0
        for first, last in _runs(inputs.query_lens):
            rows = sum(inputs.query_lens[first:last])
            runs.append(
                Run(
                    start=row,
                    stop=row + rows,
                    query_starts=inputs.query_starts[first : last + 1] - row,
                    key_starts=key_starts[first : last + 1] - sum(inputs.context_lens[:first]),
                    max_query=max(inputs.query_lens[first:last]),
                    max_context=max(inputs.context_lens[first:last]),
                    tables=inputs.block_tables[first:last],
                )
            )
            row += rows
        return Plan(inputs.slots, tuple(runs))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        plan: Plan,
    ) -> torch.Tensor:
        key_cache.flatten(0, 1).index_copy_(0, plan.slots, key)
        value_cache.flatten(0, 1).index_copy_(0, plan.slots, value)
        outs = [
            self._attend(
                query[run.start : run.stop],
                key_cache,
                value_cache,
                cu_seqlens_q=run.query_starts,
                cu_seqlens_k=run.key_starts,
                max_seqlen_q=run.max_query,
                max_seqlen_k=run.max_context,
                causal=True,
                block_table=run.tables,
            )
            for run in plan.runs
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def _runs(query_lens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of neighbouring sequences that all have one new token, or all have more."""
    first = 0
    for i in range(1, len(query_lens) + 1):
        if i == len(query_lens) or (query_lens[i] == 1) != (query_lens[first] == 1):
            yield first, i
            first = i
