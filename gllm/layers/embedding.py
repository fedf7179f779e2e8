"""The token embedding and the output head, both split over the ranks by vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from gllm.layers.packed import PADDED_ROWS, PackedShape, PackedWeight, can_pack, product
from gllm.layers.parallel import Parallel
from gllm.layers.weights import Weights, parameter

SAMPLED_ROWS = tuple(rows for rows in PADDED_ROWS if rows <= 128)  # positions of a micro-batch that are sampled, padded


class VocabEmbedding(nn.Module):
    """Token embedding: int64 [n] -> [n, hidden]. Each rank holds a range of the vocabulary."""

    def __init__(
        self, vocab_size: int, hidden_size: int, parallel: Parallel, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.shard = parallel.shard(vocab_size)
        self.weight = parameter(self.shard.padded, hidden_size, dtype=dtype, device=device)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.parallel.tp_size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.shard.start
        mine = (local >= 0) & (local < self.shard.length)
        rows = F.embedding(local * mine, self.weight)
        return self.parallel.all_reduce(rows.mul_(mine.unsqueeze(-1)))

    def load(self, weights: Weights, name: str) -> None:
        shape = (self.shard.size, self.weight.shape[1])
        rows = slice(self.shard.start, self.shard.stop)
        self.weight[: self.shard.length].copy_(weights.read(f"{name}.weight", shape, rows))


class Head(VocabEmbedding):
    """The output head: [n, hidden] -> logits [n, vocabulary], whole on every rank.

    shared: the embedding of this process whose matrix is also the head's (tied, and on the same stage).
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        parallel: Parallel,
        *,
        shared: VocabEmbedding | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        nn.Module.__init__(self)
        self.parallel = parallel
        self.shard = parallel.shard(vocab_size)
        self.is_shared = shared is not None
        own = None if shared else parameter(self.shard.padded, hidden_size, dtype=dtype, device=device)
        self.weight = shared.weight if shared else own
        self.packed: PackedWeight | None = None
        self.packed_shape: PackedShape | None = None
        self.packed_rows = SAMPLED_ROWS

    def pack(self) -> None:
        if can_pack(self.weight):  # of a shared matrix a copy: rows are looked up in the plain one
            self.packed = PackedWeight(self.weight)
            self.packed_shape = PackedShape(self.weight.shape[1], len(self.weight), has_bias=False)
            self.weight = None

    def product(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's part of the logits."""
        return product(hidden, self.weight) if self.packed is None else self.packed.linear(hidden, None)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.product(hidden)
        if self.parallel.tp_size == 1:
            return logits
        return self.parallel.all_gather(logits)[:, : self.shard.size]
