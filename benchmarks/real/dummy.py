"""A checkpoint folder without weights, for `--load-format dummy`: the published sizes, the demo's tokenizer."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.real.checkpoint import SPECIAL_IDS, TOKENIZER_FILES
from benchmarks.sim.model_spec import ModelSpec, load_model
from gllm.config import DEMO_CHECKPOINT


def config_json(model: ModelSpec) -> dict[str, Any]:
    """config.json for these sizes; ids of special tokens as in the demo, whose tokenizer is used."""
    saved = json.loads((DEMO_CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    fields = {**(saved.get("text_config") or {}), **saved}
    half, vision = model.head_dim // 2, model.vision
    height = half * 3 // 8  # 16, 24, 24 of 64 in the published files
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "torch_dtype": "bfloat16",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [half - 2 * height, height, height]},
        "hidden_act": "silu",
        "tie_word_embeddings": model.tied_embeddings,
        **{name: fields[name] for name in SPECIAL_IDS if fields.get(name) is not None},
        "vision_config": {
            "depth": vision.depth,
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "num_heads": vision.num_heads,
            "out_hidden_size": model.hidden_size,
            "fullatt_block_indexes": list(vision.full_attention_layers),
            "hidden_act": "silu",
            "in_chans": vision.in_channels,
            "patch_size": vision.patch_size,
            "spatial_merge_size": vision.spatial_merge_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "window_size": vision.window_pixels,
        },
    }


def write_dummy(target: Path, model: ModelSpec) -> Path:
    """Write config.json and the demo's tokenizer and processor files."""
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config_json(model), indent=2) + "\n", encoding="utf-8")
    for name in TOKENIZER_FILES:
        if (DEMO_CHECKPOINT / name).is_file():
            shutil.copyfile(DEMO_CHECKPOINT / name, target / name)
    return target


def published_7b() -> ModelSpec:
    return load_model("qwen2.5-vl-7b")


def tiny() -> ModelSpec:
    """A model of the same shape that a CPU runs in no time."""
    model = published_7b()
    vision = replace(
        model.vision, depth=2, hidden_size=64, num_heads=2, intermediate_size=96, full_attention_layers=(1,)
    )
    return replace(
        model, name="tiny", hidden_size=224, num_layers=2, num_heads=7, num_kv_heads=1, head_dim=32,
        intermediate_size=256, vocab_size=1024, vision=vision,
    )  # fmt: skip
