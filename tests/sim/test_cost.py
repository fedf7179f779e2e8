"""Costs against numbers worked out by hand, and their limits."""

from __future__ import annotations

import pytest

from benchmarks.sim.catalog import UnknownName, known
from benchmarks.sim.cost import CostModel, Efficiency
from benchmarks.sim.hardware import load_hardware
from benchmarks.sim.images import RESOLUTIONS, Image, grid_of, num_patches
from benchmarks.sim.model_spec import load_model
from gllm.core.batch import Batch, Chunk

H100 = load_hardware("h100-sxm")
FULL = Efficiency(1.0, 1.0)


def batch(num_tokens: int, start: int = 0, sample: bool = False) -> Batch:
    return Batch(0, (Chunk(0, start, num_tokens, (), sample),))


@pytest.mark.parametrize(("size", "billions"), [("3b", 3.1), ("7b", 7.6), ("32b", 32.8), ("72b", 72.7)])
def test_parameters_of_the_published_models(size, billions):
    assert load_model(f"qwen2.5-vl-{size}").num_parameters / 1e9 == pytest.approx(billions, abs=0.1)


@pytest.mark.parametrize(("name", "tokens"), [("1K", 2691), ("2K", 4641), ("4K", 10549)])
def test_tokens_of_an_image(name, tokens):
    model = load_model("qwen2.5-vl-72b")
    assert num_patches(grid_of(RESOLUTIONS[name], model)) // 4 == tokens


def test_an_image_beyond_the_limits_is_scaled():
    model = load_model("qwen2.5-vl-7b")
    assert num_patches(grid_of(RESOLUTIONS["8K"], model)) * 196 <= model.max_pixels
    assert num_patches(grid_of(RESOLUTIONS["8K"], model, limit=False)) * 196 > 2 * model.max_pixels
    assert num_patches(grid_of(Image(10, 10), model)) == 16


def test_a_large_prefill_costs_two_flops_a_weight_and_token():
    model = load_model("qwen2.5-vl-72b")
    seconds = CostModel(model, H100, FULL).stage_seconds(batch(4096), 80, 1, is_last=False)
    products = 2 * 80 * model.layer_parameters * 4096 / H100.flops
    attention = 4 * 4096 * 4097 / 2 * 64 * 128 * 80 / H100.flops
    assert products + attention < seconds < 1.12 * (products + attention)


def test_a_decode_costs_the_weights_bytes():
    model = load_model("qwen2.5-vl-7b")
    seconds = CostModel(model, H100, FULL).stage_seconds(batch(1, start=100), 28, 1, is_last=False)
    weights = 28 * model.layer_parameters * 2 / (H100.memory_bandwidth * H100.memory_efficiency)
    assert weights < seconds < weights + 0.005


def test_prefix_attention_costs_more_and_small_images_waste_the_device():
    model = load_model("qwen2.5-vl-7b")
    cost = CostModel(model, H100, Efficiency(0.5, 0.3))
    assert cost.stage_seconds(batch(512, 30000), 28, 1, False) > 1.5 * cost.stage_seconds(batch(512), 28, 1, False)
    small, large = (1, 8, 16), (1, 64, 64)
    assert cost.encode_seconds([small] * 20) < 20 * cost.encode_seconds([small]) / 5
    assert cost.encode_seconds([large] * 20) > 20 * cost.encode_seconds([large]) * 0.8


def test_tensor_parallelism_divides_work_and_pays_for_all_reduces():
    cost = CostModel(load_model("qwen2.5-vl-72b"), H100, Efficiency(0.45, 0.2))
    alone, split = (cost.stage_seconds(batch(2048), 80, tp, False) for tp in (1, 4))
    assert alone / 4 < split < alone / 2
    moved = 2 * 3 / 4 * 2 * 2048 * 8192
    assert H100.link.all_reduce_seconds(2 * 2048 * 8192, 4) == pytest.approx(2e-5 + moved / (450e9 * 0.84))
    assert H100.link.all_reduce_seconds(1e9, 1) == 0.0


def test_what_does_not_fit_is_named():
    cost = CostModel(load_model("qwen2.5-vl-72b"), H100, FULL)
    assert cost.num_kv_tokens(4, 1) > 300_000
    with pytest.raises(ValueError, match=r"qwen2.5-vl-72b does not fit on 1 devices of h100-sxm"):
        cost.num_kv_tokens(1, 1)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(UnknownName, match=r"unknown name 'b200' in hardware; known: a100-pcie, h100-sxm, h200-sxm"):
        load_hardware("b200")
    with pytest.raises(UnknownName, match=r"known: qwen2.5-vl-32b, qwen2.5-vl-3b"):
        load_model("llava")
    assert len(known("models")) == 4
