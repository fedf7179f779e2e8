from __future__ import annotations

import pytest
import torch

from gllm.layers.rotary import Rotary, rotate_

WHERE = {"dtype": torch.float32, "device": torch.device("cpu")}


def test_rotation_is_by_the_angle_of_the_frequencys_axis():
    rotary = Rotary(12, 100.0, (1, 2, 3), **WHERE)
    positions = torch.tensor([[3, 0], [5, 1], [7, 2]])
    x = torch.randn(2, 4, 12)
    pairs = torch.complex(x[..., :6], x[..., 6:])
    axis = torch.tensor([0, 1, 1, 2, 2, 2])
    angles = positions[axis].T * 100.0 ** (-torch.arange(6) / 6)
    expected = pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    rotate_(x, *rotary.table(positions))
    torch.testing.assert_close(torch.complex(x[..., :6], x[..., 6:]), expected)


def test_vision_axes_use_the_same_frequencies():
    rotary = Rotary(16, 100.0, (4, 4), restart=True, **WHERE)
    cos, _ = rotary.table(torch.tensor([[6], [6]]))
    assert torch.equal(cos[..., :4], cos[..., 4:])


def test_sections_must_fill_the_head():
    with pytest.raises(ValueError, match="rope sections"):
        Rotary(12, 100.0, (1, 2), **WHERE)
