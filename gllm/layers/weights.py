"""What a layer asks of a checkpoint; where the tensors come from (files, random numbers) is the loader's business."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


class Weights(Protocol):
    """A source of named tensors."""

    def read(
        self, name: str, shape: tuple[int, ...], rows: slice | None = None, cols: slice | None = None
    ) -> torch.Tensor:
        """The tensor `name`, which must have `shape` as a whole; of it, only the asked rows and columns."""
        ...


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A zero-filled weight without gradient: zeros, because padded rows and columns must stay zero."""
    return nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)
