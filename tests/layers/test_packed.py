"""Packed weights give what the plain ones give, up to the rounding of the last bit."""

from __future__ import annotations

import pytest
import torch

from gllm.layers.linear import ColumnLinear, GatedLinear, RowLinear
from gllm.layers.packed import can_pack, pack_weights
from gllm.layers.parallel import SINGLE

WHERE = {"dtype": torch.bfloat16, "device": torch.device("cpu")}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [ColumnLinear, GatedLinear, RowLinear])
def test_packed_equals_plain(kind, bias):
    torch.manual_seed(0)
    first = SINGLE.shard(40) if kind is RowLinear else 40
    layer = kind(first, 24, SINGLE, bias=bias, **WHERE)
    if not can_pack(layer.weight):
        pytest.skip("nothing is packed on this machine")
    for parameter in layer.parameters():
        parameter.data.normal_()
    inputs = [torch.randn(rows, 40).bfloat16() for rows in (1, 3, 600)]
    plain = [layer(x) for x in inputs]
    pack_weights(layer)
    assert layer.weight is None
    for x, expected in zip(inputs, plain, strict=True):
        torch.testing.assert_close(layer(x), expected, rtol=2**-6, atol=2**-6)


def test_only_bfloat16_is_packed():
    layer = ColumnLinear(8, 8, SINGLE, bias=False, dtype=torch.float32, device=torch.device("cpu"))
    pack_weights(layer)
    assert layer.weight is not None
