"""A checkpoint's config.json as typed facts. Both layouts are read: text fields at the top, or under `text_config`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gllm.errors import StartupError

if TYPE_CHECKING:
    from gllm.layers.parallel import Parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """The language model. mrope_sections: frequencies driven by the (t, h, w) positions; one section is plain RoPE."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    mrope_sections: tuple[int, ...]
    tie_word_embeddings: bool
    context_length: int

    def check_parallel(self, parallel: Parallel) -> None:
        """Raises StartupError when the heads do not divide over the tensor-parallel ranks."""
        tp = parallel.tp_size
        if self.num_heads % tp:
            raise StartupError(f"--tp {tp} does not divide the {self.num_heads} attention heads of this model")
        if max(self.num_kv_heads, tp) % min(self.num_kv_heads, tp):
            raise StartupError(f"--tp {tp} and the {self.num_kv_heads} KV heads of this model do not divide")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The vision encoder. Sizes are in pixels (patch_size, window_size) or counts."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    window_size: int
    full_attention_layers: frozenset[int]
    out_hidden_size: int
    rope_theta: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def merge_unit(self) -> int:
        """Patches that become one token."""
        return self.merge_size**2

    def check_parallel(self, parallel: Parallel) -> None:
        """Raises StartupError when the heads do not divide over the tensor-parallel ranks."""
        if self.num_heads % parallel.tp_size:
            raise StartupError(f"--tp {parallel.tp_size} does not divide the {self.num_heads} heads of the encoder")


def read_json(checkpoint: Path, name: str, *, required: bool = True) -> dict[str, Any]:
    """A JSON object of the checkpoint folder; {} when it is missing and not required. Raises StartupError."""
    if not checkpoint.is_dir():
        raise StartupError(f"no checkpoint folder {str(checkpoint)!r}: pass --model-path a folder with config.json")
    path = checkpoint / name
    if not path.is_file():
        if required:
            raise StartupError(f"{str(checkpoint)!r} has no {name}: is it a Hugging Face checkpoint folder?")
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StartupError(f"{str(path)!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise StartupError(f"{str(path)!r} is not a JSON object")
    return value


def text_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The language model's fields: those under `text_config` win over those at the top."""
    return {**raw, **(raw.get("text_config") or {})}


def text_config(raw: dict[str, Any]) -> TextConfig:
    """Raises StartupError for a missing field or a variant that is not supported."""
    fields = text_fields(raw)
    try:
        hidden, heads = int(fields["hidden_size"]), int(fields["num_attention_heads"])
        head_dim = int(fields.get("head_dim") or hidden // heads)
        rope = {**(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}
        _check_variant(fields, rope)
        return TextConfig(
            hidden_size=hidden,
            num_layers=int(fields["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(fields.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            intermediate_size=int(fields["intermediate_size"]),
            vocab_size=int(fields["vocab_size"]),
            rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or fields.get("rope_theta") or 1e6),
            mrope_sections=tuple(rope.get("mrope_section") or (head_dim // 2,)),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", fields.get("tie_word_embeddings", False))),
            context_length=int(fields.get("max_position_embeddings") or 32768),
        )
    except KeyError as error:
        raise StartupError(f"config.json lacks {error.args[0]!r}") from None


def _check_variant(fields: dict[str, Any], rope: dict[str, Any]) -> None:
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ("default", "mrope"):
        raise StartupError(f"config.json asks for rope type {rope_type!r}; only the default (and mrope) is supported")
    if fields.get("use_sliding_window") and "sliding_attention" in (fields.get("layer_types") or ["sliding_attention"]):
        raise StartupError("config.json asks for sliding-window attention, which is not supported")
    if fields.get("hidden_act", "silu") != "silu":
        raise StartupError(f"config.json asks for activation {fields['hidden_act']!r}; only silu is supported")


def vision_config(raw: dict[str, Any]) -> VisionConfig:
    """Raises StartupError for a missing field."""
    fields = raw.get("vision_config") or {}
    try:
        return VisionConfig(
            depth=int(fields["depth"]),
            hidden_size=int(fields["hidden_size"]),
            intermediate_size=int(fields["intermediate_size"]),
            num_heads=int(fields["num_heads"]),
            in_channels=int(fields.get("in_channels") or fields.get("in_chans") or 3),
            patch_size=int(fields.get("patch_size") or 14),
            temporal_patch_size=int(fields.get("temporal_patch_size") or 2),
            merge_size=int(fields.get("spatial_merge_size") or 2),
            window_size=int(fields.get("window_size") or 112),
            full_attention_layers=frozenset(fields.get("fullatt_block_indexes") or ()),
            out_hidden_size=int(fields.get("out_hidden_size") or text_fields(raw)["hidden_size"]),
            rope_theta=float((fields.get("rope_parameters") or {}).get("rope_theta") or 10000.0),
        )
    except KeyError as error:
        raise StartupError(f"config.json lacks {error.args[0]!r} of the vision encoder") from None
