"""Linear layers that are split over tensor-parallel ranks; each one knows which part of the checkpoint it holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from gllm.layers.activation import silu_and_mul
from gllm.layers.packed import PackedShape, PackedWeight, can_pack
from gllm.layers.parallel import Parallel, Shard
from gllm.layers.weights import Weights, parameter


class MergedColumnLinear(nn.Module):
    """Several linear maps of the same input as one matrix product: [n, in] -> [n, sum of the parts' shards].

    Every part's output features are split over the ranks, as its shard says.
    """

    def __init__(
        self, in_features: int, shards: Sequence[Shard], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.shards = tuple(shards)
        out_features = sum(shard.padded for shard in shards)
        self.weight = parameter(out_features, in_features, dtype=dtype, device=device)
        self.bias = parameter(out_features, dtype=dtype, device=device) if bias else None
        self.packed: PackedWeight | None = None
        self.packed_shape: PackedShape | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part."""
        return F.linear(x, self.weight, self.bias) if self.packed is None else self.packed.linear(x, self.bias)

    def pack(self) -> None:
        if can_pack(self.weight):
            self.packed = PackedWeight(self.weight)
            self._drop_weight()

    def _drop_weight(self) -> None:
        self.packed_shape = PackedShape(self.in_features, len(self.weight), self.bias is not None)
        self.weight = None

    def load(self, weights: Weights, names: Sequence[str]) -> None:
        """Read the parts from one checkpoint tensor each: `names[i].weight` (and `.bias`) is part i."""
        at = 0
        for shard, name in zip(self.shards, names, strict=True):
            rows = slice(shard.start, shard.stop)
            self._fill(weights, name, (shard.size, self.in_features), rows, at)
            at += shard.padded

    def load_fused(self, weights: Weights, name: str) -> None:
        """Read the parts from one checkpoint tensor that holds all of them, one after the other."""
        at, first = 0, 0
        total = sum(shard.size for shard in self.shards)
        for shard in self.shards:
            rows = slice(first + shard.start, first + shard.stop)
            self._fill(weights, name, (total, self.in_features), rows, at)
            at += shard.padded
            first += shard.size

    def _fill(self, weights: Weights, name: str, shape: tuple[int, int], rows: slice, at: int) -> None:
        end = at + rows.stop - rows.start
        self.weight[at:end].copy_(weights.read(f"{name}.weight", shape, rows))
        if self.bias is not None:
            self.bias[at:end].copy_(weights.read(f"{name}.bias", shape[:1], rows))


class ColumnLinear(MergedColumnLinear):
    """One linear map whose output features are split over the ranks: [n, in] -> [n, out / tp]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        parallel: Parallel,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(in_features, [parallel.shard(out_features)], bias=bias, dtype=dtype, device=device)


class GatedLinear(MergedColumnLinear):
    """The first half of a gated feed-forward layer, silu(gate(x)) * up(x): [n, in] -> [n, out / tp]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        parallel: Parallel,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(in_features, [parallel.shard(out_features)] * 2, bias=bias, dtype=dtype, device=device)
        self.packed_gate: PackedWeight | None = None
        self.packed_up: PackedWeight | None = None

    def product(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed_gate is None or self.packed_up is None:
            return silu_and_mul(F.linear(x, self.weight, self.bias))
        gate_bias, up_bias = (None, None) if self.bias is None else self.bias.chunk(2)
        return self.packed_gate.gated(x, gate_bias, self.packed_up, up_bias)

    def pack(self) -> None:
        if can_pack(self.weight):
            self.packed_gate, self.packed_up = (PackedWeight(part) for part in self.weight.chunk(2))
            self._drop_weight()


class QKVLinear(MergedColumnLinear):
    """The query, key and value projections as one product, split by heads: [n, in] -> [n, (H + 2 KV) * head_dim].

    H and KV are this rank's counts. KV heads fewer than ranks are replicated. Raises ValueError when heads do not
    divide.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        parallel: Parallel,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if num_heads % parallel.tp_size:
            raise ValueError(f"{num_heads} query heads cannot be split over {parallel.tp_size} tensor-parallel ranks")
        query = parallel.head_shard(num_heads, head_dim)
        key = parallel.head_shard(num_kv_heads, head_dim)
        super().__init__(in_features, [query, key, key], bias=bias, dtype=dtype, device=device)
        self.num_heads = query.length // head_dim
        self.num_kv_heads = key.length // head_dim


class RowLinear(nn.Module):
    """A linear map whose input features are split over the ranks, partial sums added: [n, in / tp] -> [n, out]."""

    def __init__(
        self,
        shard: Shard,
        out_features: int,
        parallel: Parallel,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.shard = shard
        self.parallel = parallel
        self.weight = parameter(out_features, shard.padded, dtype=dtype, device=device)
        self.bias = parameter(out_features, dtype=dtype, device=device) if bias else None
        self.packed: PackedWeight | None = None
        self.packed_shape: PackedShape | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.parallel.tp_size == 1:
            return self.product(x)
        out = self.parallel.all_reduce(self.product(x))
        return out if self.bias is None else out.add_(self.bias)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part; with the bias only when it is the whole."""
        bias = self.bias if self.parallel.tp_size == 1 else None
        return F.linear(x, self.weight, bias) if self.packed is None else self.packed.linear(x, bias)

    def pack(self) -> None:
        if can_pack(self.weight):
            self.packed = PackedWeight(self.weight)
            self.packed_shape = PackedShape(self.shard.padded, len(self.weight), self.bias is not None)
            self.weight = None

    def load(self, weights: Weights, name: str) -> None:
        cols = slice(self.shard.start, self.shard.stop)
        out_features = self.weight.shape[0]
        part = weights.read(f"{name}.weight", (out_features, self.shard.size), cols=cols)
        self.weight[:, : self.shard.length].copy_(part)
        if self.bias is not None:
            self.bias.copy_(weights.read(f"{name}.bias", (out_features,)))
