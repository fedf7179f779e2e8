"""Products with bfloat16 weights on CPUs, where oneDNN computes them: packed weights, few different numbers of rows.

A plain matrix is rearranged by every product anew, which for a few hundred rows is a quarter of the time, and for a
few rows most of it: weights are packed in oneDNN's own layout. And for every new number of rows a kernel is compiled,
which takes as long as several products: rows are padded to some numbers, for which kernels are compiled at start. The
operators are torch's own, but not documented: where they are absent, nothing is packed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

ROWS = 512  # number of rows that the layout is best for; see row_blocks
FEW_ROWS = 32  # up to here powers of two, above multiples
PADDED_ROWS = (1, 2, 4, 8, 16, *range(FEW_ROWS, ROWS + 1, FEW_ROWS))


def padded_rows(num_rows: int) -> int:
    """The number of rows, at least `num_rows`, that a product is made with."""
    if num_rows <= FEW_ROWS:
        return 1 << (num_rows - 1).bit_length()
    step = FEW_ROWS if num_rows <= ROWS else ROWS // 4
    return -(-num_rows // step) * step


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """x [n, in] with rows of zeros behind it."""
    missing = padded_rows(len(x)) - len(x)
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def num_padding_rows(x: torch.Tensor) -> int:
    """How many rows of padding every product with x [n, in] would add: a model whose layers all do adds them once."""
    return padded_rows(len(x)) - len(x) if x.device.type == "cpu" and x.dtype == torch.bfloat16 and len(x) else 0


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [n, in] and a plain weight [out, in] -> [n, out]."""
    return F.linear(pad_rows(x), weight)[: len(x)] if num_padding_rows(x) else F.linear(x, weight)


class PackedShape(NamedTuple):
    """Layers of one kind with the same shape share their compiled kernels."""

    inputs: int
    outputs: int
    has_bias: bool


class PackedWeight:
    """A weight [out, in] that can only be multiplied with; equal to the plain products up to rounding."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [n, in] -> [n, out]"""
        return self._pointwise(pad_rows(x), bias, "none")[: len(x)]

    def gated(
        self, x: torch.Tensor, bias: torch.Tensor | None, up: PackedWeight, up_bias: torch.Tensor | None
    ) -> torch.Tensor:
        """silu(linear(x)) * up(x)"""
        padded = pad_rows(x)
        gate = self._pointwise(padded, bias, "swish")
        return torch.ops.mkldnn._linear_pointwise.binary(padded, gate, up._weight, up_bias, "mul")[: len(x)]

    def _pointwise(self, x: torch.Tensor, bias: torch.Tensor | None, what: str) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, bias, what, [], "")


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this weight has a packed form here that is faster."""
    ops = torch.ops.mkldnn
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and hasattr(ops, "_reorder_linear_weight")
        and hasattr(ops, "_linear_pointwise")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


@torch.no_grad()
def pack_weights(model: nn.Module) -> None:
    """Let every layer that can replace its loaded weights by packed ones. Nothing can be loaded afterwards."""
    for module in model.modules():
        if hasattr(module, "pack"):
            module.pack()


@torch.inference_mode()
def compile_products(model: nn.Module) -> None:
    """Run the products of packed layers once with every number of rows, or those that a layer names as its
    `packed_rows`; layers of one shape share their kernels. Uses the threads that the process has now: call it when
    these are settled."""
    seen: set[Any] = set()
    for module in model.modules():
        shape = getattr(module, "packed_shape", None)
        if shape is not None and (type(module), shape) not in seen:
            seen.add((type(module), shape))
            for rows in getattr(module, "packed_rows", PADDED_ROWS):
                module.product(torch.zeros(rows, shape.inputs, dtype=torch.bfloat16))
