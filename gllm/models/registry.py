"""Which architectures there are, and what the engine must know of a checkpoint before any weight is read.

Light: importing this loads no torch, and no model until one is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from gllm.config import ModelInfo
from gllm.errors import StartupError
from gllm.models.config import read_json, text_config, text_fields


@dataclass(frozen=True, slots=True)
class Architecture:
    """The classes of a model, as "module:class"."""

    language: str
    vision: str | None = None


ARCHITECTURES = {
    "Qwen2ForCausalLM": Architecture("gllm.models.qwen2:Qwen2"),
    "Qwen2_5_VLForConditionalGeneration": Architecture(
        "gllm.models.qwen2:Qwen2", "gllm.models.qwen2_5_vit:VisionTransformer"
    ),
}

DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "bfloat16"}  # float16 runs as bfloat16


def architecture(raw: dict[str, Any]) -> tuple[str, Architecture]:
    """The name and classes for a config.json. Raises StartupError, listing the known ones, for any other."""
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            if raw.get("quantization_config"):
                raise StartupError(f"quantised checkpoints are not supported: use the unquantised {name}")
            return name, ARCHITECTURES[name]
    known = ", ".join(sorted(ARCHITECTURES))
    raise StartupError(f"architecture {', '.join(map(str, names)) or '(none named)'} is not supported; known: {known}")


def model_class(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def model_info(checkpoint: Path) -> ModelInfo:
    """Facts from config.json and generation_config.json. Raises StartupError in one line."""
    raw = read_json(checkpoint, "config.json")
    name, classes = architecture(raw)
    text = text_config(raw)
    generation = read_json(checkpoint, "generation_config.json", required=False)
    image_token_id = raw.get("image_token_id") if classes.vision else None
    if classes.vision and image_token_id is None:
        raise StartupError("config.json lacks 'image_token_id'")
    return ModelInfo(
        architecture=name,
        hidden_size=text.hidden_size,
        num_layers=text.num_layers,
        context_length=text.context_length,
        vocab_size=text.vocab_size,
        image_token_id=image_token_id,
        eos_token_ids=_eos_token_ids(generation, raw),
        dtype=dtype_name(raw),
    )


def dtype_name(raw: dict[str, Any], asked: str = "auto") -> str:
    """ "float32" or "bfloat16": as asked, or (auto) as config.json says."""
    if asked != "auto":
        return asked
    fields = text_fields(raw)
    saved = raw.get("dtype") or raw.get("torch_dtype") or fields.get("dtype") or fields.get("torch_dtype") or "float32"
    if saved not in DTYPES:
        raise StartupError(f"config.json has dtype {saved!r}: pass --dtype bfloat16 or float32")
    return DTYPES[saved]


def _eos_token_ids(generation: dict[str, Any], raw: dict[str, Any]) -> tuple[int, ...]:
    for source in (generation, raw, text_fields(raw)):
        ids = source.get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()
