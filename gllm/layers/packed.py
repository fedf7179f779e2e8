"""Weights in oneDNN's own layout, for bfloat16 on CPUs.

A plain matrix is rearranged by every product anew, which for a few hundred rows is a quarter of the time, and for a
few rows most of it. The operators are torch's own, but not documented: where they are absent, nothing is packed.
"""

from __future__ import annotations

import torch
from torch import nn

ROWS = 512  # number of rows that the layout is best for; see row_blocks


class PackedWeight:
    """A weight [out, in] that can only be multiplied with; equal to the plain products up to rounding."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [n, in] -> [n, out]"""
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, bias, "none", [], "")

    def silu(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """silu(linear(x))"""
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, bias, "swish", [], "")

    def times(self, x: torch.Tensor, bias: torch.Tensor | None, factor: torch.Tensor) -> torch.Tensor:
        """linear(x) * factor"""
        return torch.ops.mkldnn._linear_pointwise.binary(x, factor, self._weight, bias, "mul")


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
