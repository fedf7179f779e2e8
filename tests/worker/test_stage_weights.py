"""A stage holds only its own layers, and reads no tensor that it does not hold."""

from __future__ import annotations

import dataclasses

import pytest

from gllm.config import EngineConfig
from gllm.models.registry import model_info
from gllm.worker.layout import Layout, stage_layers
from gllm.worker.runner import StageRunner
from tests.models.checkpoints import write_tiny


def layer_bytes(runner: StageRunner) -> int:
    """Bytes of the layers' weights: all but embedding and head."""
    return sum(p.numel() * p.element_size() for p in runner.model.layers.parameters())


@pytest.mark.parametrize("num_stages", [2, 4])
def test_weights_of_a_stage(tmp_path, num_stages):
    from gllm.layers.parallel import Parallel

    checkpoint = write_tiny(tmp_path, tied=False)
    whole = layer_bytes(StageRunner.build(checkpoint, num_blocks=1))
    parts = [
        layer_bytes(StageRunner.build(checkpoint, num_blocks=1, parallel=Parallel(pp_rank=rank, pp_size=num_stages)))
        for rank in range(num_stages)
    ]
    assert sum(parts) == whole
    assert max(parts) <= (1 / num_stages + 0.05) * whole


@pytest.mark.parametrize(("num_layers", "pp"), [(26, 8), (28, 4), (80, 7), (4, 4), (5, 2)])
def test_any_number_of_layers_is_split_evenly(num_layers, pp):
    info = model_info(EngineConfig().checkpoint)
    parts = stage_layers(EngineConfig(pp=pp), dataclasses.replace(info, num_layers=num_layers))
    counts = [len(part) for part in parts]
    assert [layer for part in parts for layer in part] == list(range(num_layers))
    assert max(counts) - min(counts) <= 1
    assert counts[-1] == min(counts), "the last stage has the head as well"


def test_ranks_are_named_by_stage():
    assert [Layout(2, 2, rank).name for rank in range(4)] == ["stage 0", "stage 0 rank 1", "stage 1", "stage 1 rank 1"]
