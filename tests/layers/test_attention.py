"""Every attention backend against attention written out in full, over ragged batches in a paged cache."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gllm.layers.attention.base import BACKENDS, AttentionInputs, load_backend

CPU = torch.device("cpu")

# (new tokens, tokens in all): whole prompts, chunks with a prefix, decodes of near and of far lengths.
MIXES = {
    "prompts": [(5, 5), (1, 1), (33, 33)],
    "chunks": [(4, 9), (16, 48), (7, 8)],
    "decodes": [(1, 2), (1, 17), (1, 100), (1, 90), (1, 3)],
    "mixed": [(1, 40), (6, 6), (9, 30), (1, 41), (3, 19), (1, 1)],
}


def paged(mix, page_size: int, kv_heads: int, head_dim: int, consecutive: bool):
    """A batch with random keys and values of whole contexts, its cache (prefixes filled in, the rest stale)."""
    generator = torch.Generator().manual_seed(1)
    pages = [-(-context // page_size) for _, context in mix]
    numbers = np.arange(sum(pages) + 3)
    if not consecutive:
        numbers = np.random.default_rng(0).permutation(numbers)
    tables = np.zeros((len(mix), max(pages)), dtype=np.int32)
    caches = [torch.randn(len(numbers), page_size, kv_heads, head_dim, generator=generator) for _ in "kv"]
    contexts, slots, at = [], [], 0
    for i, (new, context) in enumerate(mix):
        tables[i, : pages[i]] = numbers[at : at + pages[i]]
        at += pages[i]
        place = np.arange(context)
        slot = torch.from_numpy(tables[i, place // page_size].astype(np.int64) * page_size + place % page_size)
        whole = [torch.randn(context, kv_heads, head_dim, generator=generator) for _ in "kv"]
        for cache, part in zip(caches, whole, strict=True):
            cache.flatten(0, 1)[slot[: context - new]] = part[: context - new]
        contexts.append(whole)
        slots.append(slot[context - new :])
    query_lens, context_lens = [n for n, _ in mix], [c for _, c in mix]
    inputs = AttentionInputs(
        query_lens=query_lens,
        context_lens=context_lens,
        host_block_tables=tables,
        block_tables=torch.from_numpy(tables),
        query_starts=torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32),
        context_lens_device=torch.tensor(context_lens, dtype=torch.int32),
        slots=torch.cat(slots),
        page_size=page_size,
    )
    return inputs, contexts, caches


def written_out(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """query [n, heads, d] are the last of key's m tokens, key and value [m, kv_heads, d]."""
    new, heads, size = query.shape
    group = heads // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,mhd->hnm", query, key) / math.sqrt(size)
    later = torch.ones(new, len(key), dtype=torch.bool).triu(len(key) - new + 1)
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(later, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("consecutive", [True, False], ids=["consecutive", "scattered"])
@pytest.mark.parametrize(("page_size", "group", "head_dim"), [(8, 1, 32), (16, 4, 64), (32, 8, 80), (16, 4, 128)])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", ["sdpa"])
def test_equal_to_attention_written_out(name, mix, page_size, group, head_dim, consecutive):
    backend, kv_heads = load_backend(name), 2
    inputs, contexts, (key_cache, value_cache) = paged(MIXES[mix], page_size, kv_heads, head_dim, consecutive)
    new = inputs.query_lens
    query = torch.randn(sum(new), kv_heads * group, head_dim, generator=torch.Generator().manual_seed(2))
    key, value = (torch.cat([c[i][-n:] for c, n in zip(contexts, new, strict=True)]) for i in range(2))
    plan = backend.plan(inputs, torch.float32, CPU)
    out = backend.forward(query, key, value, key_cache, value_cache, plan)
    expected = [written_out(q, *c) for q, c in zip(query.split(new), contexts, strict=True)]
    torch.testing.assert_close(out, torch.cat(expected), atol=2e-5, rtol=0)
    assert torch.equal(key_cache.flatten(0, 1)[inputs.slots], key)
    assert torch.equal(value_cache.flatten(0, 1)[inputs.slots], value)


def test_an_unknown_backend_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown attention backend 'nope': use one of .*sdpa"):
        load_backend("nope")


def test_a_backend_that_cannot_be_imported_says_why(monkeypatch):
    monkeypatch.setitem(BACKENDS, "absent", "gllm.layers.attention.absent:Absent")
    with pytest.raises(ValueError, match="'absent' cannot be used here: No module named"):
        load_backend("absent")
