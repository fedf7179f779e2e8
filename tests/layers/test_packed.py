"""Packed weights give what the plain ones give, up to the rounding of the last bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gllm.layers.linear import ColumnLinear, GatedLinear, RowLinear
from gllm.layers.packed import (
    FEW_ROWS,
    PADDED_ROWS,
    ROWS,
    can_pack,
    compile_products,
    pack_weights,
    padded_rows,
    product,
)
from gllm.layers.parallel import SINGLE
from gllm.layers.row_blocks import row_blocks

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
    inputs = [torch.randn(rows, 40).bfloat16() for rows in (1, 3, 33, 600)]
    plain = [layer(x) for x in inputs]
    pack_weights(layer)
    compile_products(layer)
    assert layer.weight is None
    for x, expected in zip(inputs, plain, strict=True):
        torch.testing.assert_close(layer(x), expected, rtol=2**-6, atol=2**-6)


def test_only_bfloat16_is_packed():
    layer = ColumnLinear(8, 8, SINGLE, bias=False, dtype=torch.float32, device=torch.device("cpu"))
    pack_weights(layer)
    assert layer.weight is not None


def test_products_are_made_with_few_different_numbers_of_rows():
    found = {padded_rows(rows) for rows in range(1, ROWS + 1)}
    assert found == set(PADDED_ROWS)
    assert all(rows <= padded_rows(rows) < rows + FEW_ROWS for rows in range(1, ROWS + 1))
    assert all(rows <= padded_rows(rows) <= 1.25 * rows for rows in range(ROWS, 9 * ROWS))


def test_a_kernel_is_compiled_once_for_layers_of_one_shape(monkeypatch):
    layers = nn.ModuleList(ColumnLinear(40, 24, SINGLE, bias=bias, **WHERE) for bias in (True, True, False))
    if not can_pack(layers[0].weight):
        pytest.skip("nothing is packed on this machine")
    pack_weights(layers)
    called = []
    for number, layer in enumerate(layers):
        monkeypatch.setattr(layer, "product", lambda x, number=number: called.append((number, len(x))))
    compile_products(layers)
    assert called == [(number, rows) for number in (0, 2) for rows in PADDED_ROWS]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_with_a_plain_weight_is_the_plain_product(dtype):
    torch.manual_seed(0)
    weight = torch.randn(24, 40).to(dtype)
    for rows in (0, 1, 3, 33):
        x = torch.randn(rows, 40).to(dtype)
        torch.testing.assert_close(product(x, weight), F.linear(x, weight), rtol=2**-6, atol=2**-6)


def test_blocks_of_rows_cover_them_all_and_waste_little():
    for rows in (0, 1, 512, 513, 519, 1025, 4097):
        blocks = row_blocks(rows, torch.device("cpu"))
        assert [row for block in blocks for row in range(rows)[block]] == list(range(rows))
        sizes = [block.stop - block.start for block in blocks]
        assert max(sizes) <= ROWS
        if rows > ROWS:
            assert sum(map(padded_rows, sizes)) < rows + FEW_ROWS * len(sizes)
            assert min(sizes) > ROWS // 4
