"""RMS normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from gllm.layers.weights import Weights, parameter


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; computed in float32 whatever the dtype of x."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(size, dtype=dtype, device=device)
        self._wide_weight = self.weight.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu":
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # On CPUs rms_norm makes several passes and float32 copies of a bfloat16 x: 1.3 to 7 x the time of this.
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.rsqrt(length.square_().div_(x.shape[-1]).add_(self.eps))
        normed = wide * scale if wide is x else wide.mul_(scale)
        return normed.mul_(self._wide_weight).to(x.dtype)

    def load(self, weights: Weights, name: str) -> None:
        self.weight.copy_(weights.read(f"{name}.weight", tuple(self.weight.shape)))
        self._wide_weight = self.weight.float()
