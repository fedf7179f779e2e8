from __future__ import annotations

import torch

from gllm.layers.parallel import SINGLE, Parallel
from gllm.worker.kv_cache import KVCache, KVShape


def test_sizes(tied):
    shape = KVShape.of(tied, range(3), SINGLE, dtype="bfloat16", page_size=16)
    assert shape == KVShape(num_layers=3, page_size=16, num_kv_heads=2, head_dim=12, dtype=torch.bfloat16)
    assert shape.bytes_per_block == 2 * 3 * 16 * 2 * 12 * 2
    assert shape.num_blocks_for(10 * shape.bytes_per_block + 1) == 10
    cache = KVCache(shape, 5, torch.device("cpu"))
    held = sum(part.numel() * part.itemsize for pair in cache.layers for part in pair)
    assert held == 5 * shape.bytes_per_block


def test_kv_heads_fewer_than_ranks_are_replicated(tied):
    shape = KVShape.of(tied, range(4), Parallel(tp_size=6), dtype="auto", page_size=16)
    assert shape.num_kv_heads == 1
