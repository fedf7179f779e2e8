"""Splitting: the ranks' shards together are the whole layer, whatever the sizes; stages get all layers once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gllm.layers.embedding import Head, VocabEmbedding
from gllm.layers.linear import ColumnLinear, MergedColumnLinear, QKVLinear, RowLinear
from gllm.layers.parallel import Parallel, split_layers

WHERE = {"dtype": torch.float32, "device": torch.device("cpu")}


class Tensors:
    """Weights from a dict."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def read(self, name, shape, rows=None, cols=None):
        tensor = self.tensors[name.replace(".", "_")]
        assert tensor.shape == shape
        tensor = tensor if rows is None else tensor[rows]
        return tensor if cols is None else tensor[:, cols]


def ranks(size: int) -> list[Parallel]:
    """Ranks without a group: collectives are done by the test."""
    return [Parallel(tp_rank=rank, tp_size=size) for rank in range(size)]


@pytest.fixture
def no_reduce(monkeypatch):
    monkeypatch.setattr(Parallel, "all_reduce", lambda self, x: x)
    monkeypatch.setattr(Parallel, "all_gather", lambda self, x: x)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_uneven_feed_forward_is_exact(no_reduce, tp):
    up, down, x = torch.randn(10, 6), torch.randn(5, 10), torch.randn(4, 6)
    weights = Tensors(a_weight=up, a_bias=torch.arange(10.0), b_weight=down, b_bias=torch.ones(5))
    total = torch.zeros(4, 5)
    for parallel in ranks(tp):
        first = ColumnLinear(6, 10, parallel, bias=True, **WHERE)
        second = RowLinear(first.shards[0], 5, parallel, bias=False, **WHERE)
        first.load(weights, ["a"])
        second.load(weights, "b")
        total += second(first(x))
    torch.testing.assert_close(total, F.linear(F.linear(x, up, torch.arange(10.0)), down), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("tp", "kv_heads"), [(1, 2), (2, 2), (4, 2), (4, 1), (2, 4)])
def test_heads_are_split_whole_and_few_kv_heads_are_replicated(tp, kv_heads):
    heads, size, x = 4, 3, torch.randn(2, 7)
    query, key, value = (torch.randn(n * size, 7) for n in (heads, kv_heads, kv_heads))
    weights = Tensors(q_weight=query, k_weight=key, v_weight=value)
    fused = Tensors(qkv_weight=torch.cat([query, key, value]))
    for parallel in ranks(tp):
        layer = QKVLinear(7, heads, kv_heads, size, parallel, bias=False, **WHERE)
        layer.load(weights, ["q", "k", "v"])
        other = QKVLinear(7, heads, kv_heads, size, parallel, bias=False, **WHERE)
        other.load_fused(fused, "qkv")
        assert torch.equal(layer.weight, other.weight)
        own = slice(parallel.tp_rank * heads // tp, (parallel.tp_rank + 1) * heads // tp)
        q, k, v = layer(x).split([layer.num_heads * size, layer.num_kv_heads * size, layer.num_kv_heads * size], -1)
        torch.testing.assert_close(q, F.linear(x, query).view(2, heads, size)[:, own].flatten(1))
        group = heads // kv_heads
        for part, whole in ((k, key), (v, value)):
            expected = F.linear(x, whole).view(2, kv_heads, size).repeat_interleave(group, 1)[:, own]
            got = part.view(2, -1, size).repeat_interleave(layer.num_heads // layer.num_kv_heads, 1)
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_vocabulary_that_does_not_divide(no_reduce, tp):
    table, ids = torch.randn(11, 4), torch.tensor([0, 5, 10, 7, 3])
    weights = Tensors(e_weight=table)
    rows, logits = torch.zeros(5, 4), []
    for parallel in ranks(tp):
        embedding, head = VocabEmbedding(11, 4, parallel, **WHERE), Head(11, 4, parallel, **WHERE)
        embedding.load(weights, "e")
        head.load(weights, "e")
        rows += embedding(ids)
        logits.append(F.linear(table[:2], head.weight))
    assert torch.equal(rows, table[ids])
    torch.testing.assert_close(torch.cat(logits, 1)[:, :11], table[:2] @ table.T)


def test_merged_parts_lie_side_by_side():
    a, b, x = torch.randn(5, 3), torch.randn(5, 3), torch.randn(2, 3)
    parallel = Parallel(tp_rank=1, tp_size=2)
    layer = MergedColumnLinear(3, [parallel.shard(5)] * 2, bias=False, **WHERE)
    layer.load(Tensors(a_weight=a, b_weight=b), ["a", "b"])
    zero = torch.zeros(2, 1)
    torch.testing.assert_close(layer(x), torch.cat([F.linear(x, a[3:]), zero, F.linear(x, b[3:]), zero], 1))


@pytest.mark.parametrize(("layers", "stages"), [(26, 8), (28, 4), (5, 5), (1, 1), (36, 7)])
def test_every_layer_is_on_one_stage(layers, stages):
    ranges = split_layers(layers, stages)
    assert [i for part in ranges for i in part] == list(range(layers))
    sizes = [len(part) for part in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)


@pytest.mark.parametrize("stages", [0, 4])
def test_an_empty_stage_is_refused(stages):
    with pytest.raises(ValueError, match=f"3 layers cannot be split over {stages}"):
        split_layers(3, stages)
