"""Shapes of a vision-language model, as far as costs and token counts depend on them. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.sim.catalog import load


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """The ViT. One item token stands for `spatial_merge_size` squared patches of `patch_size` squared pixels; attention
    is limited to windows of `window_pixels` squared pixels except in `full_attention_layers`."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    window_pixels: int
    full_attention_layers: tuple[int, ...]
    in_channels: int

    @property
    def window_patches(self) -> int:
        return (self.window_pixels // self.patch_size) ** 2

    @property
    def patches_per_token(self) -> int:
        return self.spatial_merge_size**2

    @property
    def num_parameters(self) -> int:
        """Weights of the transformer layers, without embedding and merger."""
        layer = 4 * self.hidden_size**2 + 3 * self.hidden_size * self.intermediate_size
        return self.depth * layer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The whole model. min_pixels, max_pixels: the image processor's default limits of one image."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool
    bytes_per_value: int
    min_pixels: int
    max_pixels: int
    vision: VisionSpec

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def num_parameters(self) -> int:
        """Weights of the language model, with embeddings."""
        tables = 1 if self.tied_embeddings else 2
        return self.num_layers * self.layer_parameters + tables * self.vocab_size * self.hidden_size

    @property
    def kv_bytes_per_layer(self) -> int:
        """KV bytes of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.bytes_per_value

    def layers_of(self, num_stages: int) -> tuple[int, ...]:
        """Layers of each pipeline stage: even, the first stages take what is left over."""
        share, rest = divmod(self.num_layers, num_stages)
        return tuple(share + (stage < rest) for stage in range(num_stages))


def load_model(name: str) -> ModelSpec:
    """Raises catalog.UnknownName, which lists the known models."""
    fields: dict[str, Any] = dict(load("models", name))
    del fields["source"]
    vision = dict(fields.pop("vision"))
    vision["full_attention_layers"] = tuple(vision["full_attention_layers"])
    return ModelSpec(vision=VisionSpec(**vision), **fields)
