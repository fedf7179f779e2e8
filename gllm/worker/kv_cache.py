"""The paged KV cache of one stage and rank: tensors and their sizes. Who owns a block is the scheduler's business."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from gllm.layers.parallel import Parallel
from gllm.models.config import read_json, text_config
from gllm.models.loader import resolve_dtype


@dataclass(frozen=True, slots=True)
class KVShape:
    """What decides the size of a block: a block holds `page_size` tokens of all of the stage's layers."""

    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, checkpoint: Path, layers: range, parallel: Parallel, *, dtype: str, page_size: int) -> KVShape:
        """The shape for a stage's layers, from config.json alone. dtype as in the configuration, "auto" too."""
        config = text_config(read_json(checkpoint, "config.json"))
        heads = max(1, config.num_kv_heads // parallel.tp_size)
        return cls(len(layers), page_size, heads, config.head_dim, resolve_dtype(checkpoint, dtype))

    @property
    def bytes_per_block(self) -> int:
        return 2 * self.num_layers * self.page_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def num_blocks_for(self, num_bytes: int) -> int:
        """Blocks that fit into so many bytes."""
        return num_bytes // self.bytes_per_block


class KVCache:
    """Keys and values, a pair of [num_blocks, page_size, kv_heads, head_dim] for each layer.

    Starts as zeros and must stay finite: attention reads whole pages and masks what lies past a sequence's end, and
    a masked NaN would still spread.
    """

    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        size = (num_blocks, shape.page_size, shape.num_kv_heads, shape.head_dim)
        self.layers = [
            (torch.zeros(size, dtype=shape.dtype, device=device), torch.zeros(size, dtype=shape.dtype, device=device))
            for _ in range(shape.num_layers)
        ]
