"""What is read of a checkpoint, under which names, and what a broken one says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gllm.errors import StartupError
from gllm.layers.attention.base import load_backend
from gllm.layers.parallel import SINGLE, Parallel
from gllm.models.config import read_json, text_config
from gllm.models.loader import SafetensorsWeights, load_language_model, load_vision_model
from gllm.models.qwen2 import Qwen2
from gllm.models.registry import model_info

WHERE = {"dtype": torch.float32, "device": torch.device("cpu")}


def language(checkpoint: Path, layers: range = range(4), **options) -> Qwen2:
    return load_language_model(checkpoint, layers, SINGLE, load_backend("sdpa"), **WHERE, **options)


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.fixture
def broken(untied: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(untied, tmp_path / "copy"))


def test_model_info(untied):
    info = model_info(untied)
    assert (info.architecture, info.num_layers, info.hidden_size) == ("Qwen2_5_VLForConditionalGeneration", 4, 72)
    assert (info.vocab_size, info.image_token_id, info.eos_token_ids, info.dtype) == (301, 290, (2,), "float32")
    assert info.context_length == 4096


def test_newer_names_and_shards_load_the_same_weights(untied, broken):
    tensors = load_file(broken / "model.safetensors")
    (broken / "model.safetensors").unlink()
    renamed = {}
    for name, tensor in tensors.items():
        if name.startswith("visual."):
            name = f"model.{name}"
        elif name.startswith("model."):
            name = f"model.language_model.{name.removeprefix('model.')}"
        renamed[name] = tensor
    names = sorted(renamed)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: renamed[name] for name in part}, broken / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same(language(broken), language(untied))
    assert same(load_vision_model(broken, SINGLE, **WHERE), load_vision_model(untied, SINGLE, **WHERE))


def test_a_stage_reads_only_its_tensors(tied):
    config = text_config(read_json(tied, "config.json"))

    def names(layers: range) -> set[str]:
        weights = SafetensorsWeights(tied)
        with torch.no_grad():
            Qwen2(config, layers, SINGLE, load_backend("sdpa"), **WHERE).load(weights)
        return weights.names_read

    middle = names(range(1, 3))
    assert all(name.startswith(("model.layers.1.", "model.layers.2.")) for name in middle)
    assert len(middle) == 2 * 12
    assert "model.embed_tokens.weight" in names(range(1))
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= names(range(3, 4))  # the tied head


def test_dummy_weights_depend_on_the_seed_and_not_on_the_split(untied):
    whole = language(untied, load_format="dummy", seed=5)
    assert same(whole, language(untied, load_format="dummy", seed=5))
    assert not same(whole, language(untied, load_format="dummy", seed=6))
    last = language(untied, range(2, 4), load_format="dummy", seed=5)
    assert same(last.layers[1], whole.layers[3])


def change_config(folder: Path, **fields) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **fields}))


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def change_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"] = torch.zeros(72, 91)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shutil.rmtree, "no checkpoint folder"),
        (lambda f: (f / "config.json").unlink(), "config.json"),
        (lambda f: (f / "config.json").write_text("{"), "not JSON"),
        (lambda f: (f / "model.safetensors").unlink(), "no .safetensors weights"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\0" * 64), "cannot read weights"),
        (drop_tensor, "lack the tensor 'model.layers.2.mlp.down_proj.weight'"),
        (change_shape, "is [72, 91], config.json implies [72, 90]"),
        (lambda f: change_config(f, architectures=["Llama"]), "Llama is not supported; known: Qwen2For"),
        (lambda f: change_config(f, quantization_config={"bits": 4}), "quantised"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_broken_checkpoint_is_one_clear_line(broken, damage, words):
    damage(broken)
    with pytest.raises(StartupError) as caught:
        language(broken)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_heads_that_do_not_divide_are_refused(untied):
    with pytest.raises(StartupError, match="--tp 4 does not divide the 6 attention heads"):
        load_language_model(untied, range(4), Parallel(tp_size=4), load_backend("sdpa"), **WHERE)
    with pytest.raises(StartupError, match="--tp 3 and the 2 KV heads"):
        load_language_model(untied, range(4), Parallel(tp_size=3), load_backend("sdpa"), **WHERE)
    with pytest.raises(StartupError, match="--tp 3 does not divide the 4 heads of the encoder"):
        load_vision_model(untied, Parallel(tp_size=3), **WHERE)
