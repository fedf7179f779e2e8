"""Rotary position embedding over several position axes: M-RoPE of the language model, 2-D RoPE of the encoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Rotary:
    """Angles of `head_dim // 2` frequencies, each driven by one of several position axes.

    sections: how many consecutive frequencies each axis drives; they add up to head_dim // 2.
    restart: every axis starts again at the first frequency (vision) instead of going on with the next (M-RoPE).
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        sections: Sequence[int],
        *,
        restart: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        half = head_dim // 2
        if sum(sections) != half:
            raise ValueError(f"rope sections {list(sections)} do not add up to half the head size, {half}")
        per_turn = half // len(sections) if restart else half
        steps = torch.arange(half, dtype=torch.float32) % per_turn
        self.inv_freq = (1.0 / theta ** (steps / per_turn)).to(device)
        self.axes = torch.repeat_interleave(torch.tensor(list(sections))).to(device)
        self.dtype = dtype

    def table(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, [n, 1, head_dim // 2] each, for int positions [axes, n]; made once for all layers."""
        # Rows must lie together in memory: every layer reads the tables, and in the other order 5 x as slowly.
        angles = positions.t().float().index_select(1, self.axes).contiguous() * self.inv_freq
        return angles.cos().to(self.dtype).unsqueeze(1), angles.sin().to(self.dtype).unsqueeze(1)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate x [n, heads, head_dim] in place; entry i of a head is paired with entry i + head_dim // 2."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.addcmul(first * cos, second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(turned)
