"""Writes a random Qwen2.5-VL checkpoint of a chosen size, in the layout of the published ones.

python -m benchmarks.real.checkpoint DIR [--layers 12 --hidden 512 ...]; the default is about 80 M parameters.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gllm.config import DEMO_CHECKPOINT
from gllm.layers.attention.base import load_backend
from gllm.layers.parallel import SINGLE
from gllm.models.config import text_config, vision_config
from gllm.models.loader import RandomWeights
from gllm.models.qwen2 import Qwen2
from gllm.models.qwen2_5_vit import VisionTransformer

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
    "generation_config.json",
)  # fmt: skip
SPECIAL_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "eos_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The sizes of a checkpoint; head size 64 everywhere."""

    hidden: int = 512
    layers: int = 12
    intermediate: int = 1408
    kv_heads: int = 2
    vocab: int = 32000
    tied: bool = True
    context: int = 32768
    vision_hidden: int = 512
    vision_depth: int = 8
    vision_intermediate: int = 1408
    full_attention: int = 2  # full-attention layers, evenly spread
    dtype: str = "bfloat16"


class Recorder(RandomWeights):
    """Random weights that remembers every tensor asked for: all that a checkpoint must hold."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__(seed, torch.device("cpu"))
        self.dtype = dtype
        self.tensors: dict[str, torch.Tensor] = {}

    def read(
        self, name: str, shape: tuple[int, ...], rows: slice | None = None, cols: slice | None = None
    ) -> torch.Tensor:
        if name not in self.tensors:
            self.tensors[name] = super().read(name, shape).to(self.dtype)
        whole = self.tensors[name] if rows is None else self.tensors[name][rows]
        return whole if cols is None else whole[:, cols]


def config_of(size: Size, special_ids: dict[str, Any]) -> dict[str, Any]:
    """config.json, with the text fields at the top as in the published files."""
    every = size.vision_depth // size.full_attention
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "torch_dtype": size.dtype,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.hidden // 64,
        "num_key_value_heads": size.kv_heads,
        "vocab_size": size.vocab,
        "max_position_embeddings": size.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
        "hidden_act": "silu",
        "tie_word_embeddings": size.tied,
        "use_sliding_window": False,
        **special_ids,
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": size.vision_depth,
            "hidden_size": size.vision_hidden,
            "intermediate_size": size.vision_intermediate,
            "num_heads": size.vision_hidden // 64,
            "out_hidden_size": size.hidden,
            "fullatt_block_indexes": list(range(every - 1, size.vision_depth, every)),
            "hidden_act": "silu",
            "in_chans": 3,
            "patch_size": 14,
            "spatial_patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "window_size": 112,
        },
    }


def _special_ids(size: Size, source: Path) -> dict[str, Any]:
    """Those of the checkpoint whose tokenizer is reused; without one, the last ids of the vocabulary."""
    path = source / "config.json"
    if path.is_file():
        saved = json.loads(path.read_text(encoding="utf-8"))
        fields = {**(saved.get("text_config") or {}), **saved}
        return {name: fields[name] for name in SPECIAL_IDS if fields.get(name) is not None}
    return {name: size.vocab - 1 - i for i, name in enumerate(SPECIAL_IDS)}


def write_checkpoint(
    target: Path, size: Size | None = None, *, seed: int = 0, tokenizer: Path = DEMO_CHECKPOINT
) -> int:
    """Write config.json, model.safetensors and, where there are some, the tokenizer and processor files of the
    checkpoint folder `tokenizer`. Returns the number of parameters."""
    size = size or Size()
    target.mkdir(parents=True, exist_ok=True)
    raw = config_of(size, _special_ids(size, tokenizer))
    recorder = Recorder(seed, getattr(torch, size.dtype))
    where: dict[str, Any] = {"dtype": recorder.dtype, "device": torch.device("cpu")}
    text = text_config(raw)
    Qwen2(text, range(text.num_layers), SINGLE, load_backend("sdpa"), **where).load(recorder)
    VisionTransformer(vision_config(raw), SINGLE, **where).load(recorder)
    save_file(recorder.tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, target / name)
    return sum(tensor.numel() for tensor in recorder.tensors.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    defaults = Size()
    for name in Size.__slots__:
        value = getattr(defaults, name)
        kind = (lambda text: text.lower() in ("1", "true", "yes")) if isinstance(value, bool) else type(value)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=value)
    args = vars(parser.parse_args())
    target, seed = args.pop("target"), args.pop("seed")
    count = write_checkpoint(target, Size(**args), seed=seed)
    print(json.dumps({"checkpoint": str(target), "parameters": count}))


if __name__ == "__main__":
    main()
