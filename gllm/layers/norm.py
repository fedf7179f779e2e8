"""RMS normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from gllm.layers.weights import Weights, parameter


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; the statistics are float32 whatever the dtype of x."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(size, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def load(self, weights: Weights, name: str) -> None:
        self.weight.copy_(weights.read(f"{name}.weight", tuple(self.weight.shape)))
