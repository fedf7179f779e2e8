"""Paged attention by torch's scaled_dot_product_attention: the reference backend, and the one for CPUs.

A prompt that is one chunk attends to its own keys directly; a chunk with a prefix reads its pages (without a copy
where they are consecutive); decodes are batched, padded to the longest of their group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from gllm.layers.attention.base import AttentionInputs, AttentionSetting


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of one sequence: `first .. first + count - 1` when consecutive, else `index` [count] on the device."""

    first: int
    count: int
    index: torch.Tensor | None

    def read(self, cache: torch.Tensor, length: int) -> torch.Tensor:
        """The first `length` cached rows, [length, kv_heads, head_dim]."""
        if self.index is None:
            pages = cache[self.first : self.first + self.count]
        else:
            pages = cache.index_select(0, self.index)
        return pages.flatten(0, 1)[:length]


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """A sequence whose whole context is in this micro-batch: rows `start .. stop - 1`."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """A sequence with earlier tokens in the cache. mask: [new tokens, context], None when there is one new token."""

    start: int
    stop: int
    context: int
    pages: Pages
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one new token each. rows: their rows; pages [n * num_pages]; mask [n, 1, 1, num_pages * page]."""

    rows: torch.Tensor
    pages: torch.Tensor
    mask: torch.Tensor


@dataclass(slots=True)
class Plan:
    slots: torch.Tensor
    prompts: list[PromptGroup] = field(default_factory=list)
    prefixes: list[PrefixGroup] = field(default_factory=list)
    decodes: list[DecodeGroup] = field(default_factory=list)


class SdpaAttention:
    """See `AttentionBackend`."""

    @staticmethod
    def refusal(setting: AttentionSetting) -> str | None:
        return None

    def plan(self, inputs: AttentionInputs, dtype: torch.dtype, device: torch.device) -> Plan:
        plan = Plan(slots=inputs.slots)
        decodes: dict[int, list[tuple[int, int]]] = {}
        start = 0
        for seq, (new, context) in enumerate(zip(inputs.query_lens, inputs.context_lens, strict=True)):
            if new == context:
                plan.prompts.append(PromptGroup(start, start + new))
            elif new == 1:
                num_pages = -(-context // inputs.page_size)
                decodes.setdefault(num_pages.bit_length(), []).append((seq, start))
            else:
                plan.prefixes.append(_prefix_group(inputs, seq, start, dtype, device))
            start += new
        for members in decodes.values():
            if len(members) == 1:
                plan.prefixes.append(_prefix_group(inputs, *members[0], dtype, device))
            else:
                plan.decodes.append(_decode_group(inputs, members, dtype, device))
        return plan

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
        done: list[tuple[slice | torch.Tensor, torch.Tensor]] = []
        for prompt in plan.prompts:
            rows = slice(prompt.start, prompt.stop)
            done.append((rows, _attend(query[rows], key[rows], value[rows], causal=True)))
        for prefix in plan.prefixes:
            rows = slice(prefix.start, prefix.stop)
            keys = prefix.pages.read(key_cache, prefix.context)
            values = prefix.pages.read(value_cache, prefix.context)
            done.append((rows, _attend(query[rows], keys, values, mask=prefix.mask)))
        for group in plan.decodes:
            done.append((group.rows, _decode(query, key_cache, value_cache, group)))
        if len(done) == 1 and not plan.decodes:
            return done[0][1]
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for rows, attended in done:
            out[rows] = attended
        return out


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """One sequence: query [n, heads, d], key and value [m, kv_heads, d] -> [n, heads, d]."""
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=causal,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def _decode(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, group: DecodeGroup
) -> torch.Tensor:
    """The group's sequences [n, heads, d]. The query heads that share a KV head become the rows of one small product,
    so that keys need not be repeated."""
    num, (kv_heads, head_dim) = len(group.rows), key_cache.shape[2:]
    queries = query.index_select(0, group.rows).view(num, kv_heads, -1, head_dim)
    keys = key_cache.index_select(0, group.pages).view(num, -1, kv_heads, head_dim).transpose(1, 2)
    values = value_cache.index_select(0, group.pages).view(num, -1, kv_heads, head_dim).transpose(1, 2)
    attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask)
    return attended.reshape(num, -1, head_dim)


def _prefix_group(
    inputs: AttentionInputs, seq: int, start: int, dtype: torch.dtype, device: torch.device
) -> PrefixGroup:
    new, context = inputs.query_lens[seq], inputs.context_lens[seq]
    count = -(-context // inputs.page_size)
    table = inputs.host_block_tables[seq, :count]
    consecutive = bool((np.diff(table) == 1).all())
    index = None if consecutive else inputs.block_tables[seq, :count]
    mask = None
    if new > 1:
        seen = torch.ones(new, context, dtype=torch.bool, device=device).tril_(context - new)
        mask = torch.zeros(new, context, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
    return PrefixGroup(start, start + new, context, Pages(int(table[0]), count, index), mask)


def _decode_group(
    inputs: AttentionInputs, members: list[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> DecodeGroup:
    seqs = torch.tensor([seq for seq, _ in members], device=device)
    rows = torch.tensor([row for _, row in members], device=device)
    num_pages = max(-(-inputs.context_lens[seq] // inputs.page_size) for seq, _ in members)
    pages = inputs.block_tables[:, :num_pages].index_select(0, seqs).flatten()
    context = inputs.context_lens_device.index_select(0, seqs)
    places = torch.arange(num_pages * inputs.page_size, device=device)
    unseen = places >= context.unsqueeze(1)
    mask = torch.zeros(unseen.shape, dtype=dtype, device=device).masked_fill_(unseen, float("-inf"))
    return DecodeGroup(rows, pages, mask[:, None, None, :])
