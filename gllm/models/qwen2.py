"""The Qwen2 language model (also the one inside Qwen2.5-VL); any range of its layers is a pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gllm.layers.attention.base import AttentionBackend
from gllm.layers.embedding import Head, VocabEmbedding
from gllm.layers.linear import GatedLinear, QKVLinear, RowLinear
from gllm.layers.norm import RMSNorm
from gllm.layers.packed import num_padding_rows
from gllm.layers.parallel import Parallel
from gllm.layers.rotary import Rotary, rotate_
from gllm.layers.row_blocks import join, row_blocks
from gllm.layers.weights import Weights
from gllm.models.config import TextConfig

KVPair = tuple[torch.Tensor, torch.Tensor]
Angles = tuple[torch.Tensor, torch.Tensor]


class Attention(nn.Module):
    """Grouped-query attention over the paged cache, in its three steps: `project`, `attend`, `out`."""

    def __init__(self, config: TextConfig, parallel: Parallel, backend: AttentionBackend, **where: Any) -> None:
        super().__init__()
        heads, kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.backend = backend
        self.qkv = QKVLinear(config.hidden_size, heads, kv_heads, self.head_dim, parallel, bias=True, **where)
        self.out = RowLinear(self.qkv.shards[0], config.hidden_size, parallel, bias=False, **where)

    def project(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> queries, keys (both rotated) and values, [n, heads + 2 * kv_heads, head_dim]."""
        qkv = self.qkv(x).view(len(x), -1, self.head_dim)
        rotate_(qkv[:, : self.qkv.num_heads + self.qkv.num_kv_heads], cos, sin)
        return qkv

    def attend(self, qkv: torch.Tensor, cache: KVPair, plan: Any) -> torch.Tensor:
        """What `project` gave -> [n, heads * head_dim]; keys and values are written to the cache."""
        query, key, value = qkv.split([self.qkv.num_heads, self.qkv.num_kv_heads, self.qkv.num_kv_heads], dim=1)
        return self.backend.forward(query, key, value, *cache, plan).reshape(len(qkv), -1)

    def load(self, weights: Weights, name: str) -> None:
        self.qkv.load(weights, [f"{name}.{part}_proj" for part in "qkv"])
        self.out.load(weights, f"{name}.o_proj")


class MLP(nn.Module):
    """The gated feed-forward layer: [n, hidden] -> [n, hidden]."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, parallel: Parallel, *, bias: bool, **where: Any
    ) -> None:
        super().__init__()
        self.gate_up = GatedLinear(hidden_size, intermediate_size, parallel, bias=bias, **where)
        self.down = RowLinear(self.gate_up.shards[0], hidden_size, parallel, bias=bias, **where)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate_up(x))

    def load(self, weights: Weights, name: str) -> None:
        self.gate_up.load(weights, [f"{name}.gate_proj", f"{name}.up_proj"])
        self.down.load(weights, f"{name}.down_proj")


class DecoderLayer(nn.Module):
    """One layer; `x` [n + padding, hidden] is updated in place, being the residual stream. The rows of padding attend
    to nothing."""

    def __init__(self, config: TextConfig, parallel: Parallel, backend: AttentionBackend, **where: Any) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **where)
        self.attention = Attention(config, parallel, backend, **where)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **where)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, parallel, bias=False, **where)

    def forward(
        self, x: torch.Tensor, angles: Angles, cache: KVPair, plan: Any, blocks: Sequence[slice], padding: int
    ) -> None:
        cos, sin = angles
        qkv = join(self.attention.project(self.attention_norm(x[rows]), cos[rows], sin[rows]) for rows in blocks)
        attended = self.attention.attend(qkv[: len(x) - padding], cache, plan)
        attended = F.pad(attended, (0, 0, 0, padding)) if padding else attended
        for rows in blocks:
            part = x[rows]
            part.add_(self.attention.out(attended[rows]))
            part.add_(self.mlp(self.mlp_norm(part)))

    def load(self, weights: Weights, name: str) -> None:
        self.attention_norm.load(weights, f"{name}.input_layernorm")
        self.attention.load(weights, f"{name}.self_attn")
        self.mlp_norm.load(weights, f"{name}.post_attention_layernorm")
        self.mlp.load(weights, f"{name}.mlp")


class Qwen2(nn.Module):
    """Layers `layers` of the model; with the embedding when it has the first layer, with final norm and head when it
    has the last one. A tied head that is not on the embedding's stage has a copy of the matrix."""

    def __init__(
        self,
        config: TextConfig,
        layers: range,
        parallel: Parallel,
        backend: AttentionBackend,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        where = {"dtype": dtype, "device": device}
        self.config = config
        self.layer_range = layers
        self.backend = backend
        self.dtype = dtype
        self.device = device
        self.is_first = layers.start == 0
        self.is_last = layers.stop == config.num_layers
        sizes = (config.vocab_size, config.hidden_size, parallel)
        self.embedding = VocabEmbedding(*sizes, **where) if self.is_first else None
        self.layers = nn.ModuleList(DecoderLayer(config, parallel, backend, **where) for _ in layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **where) if self.is_last else None
        self.head: Head | None = None
        if self.is_last:
            shared = self.embedding if config.tie_word_embeddings else None
            self.head = Head(*sizes, shared=shared, **where)
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.mrope_sections, **where)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """First stage only: int64 [n] -> [n, hidden], a fresh tensor that the caller may overwrite rows of."""
        assert self.embedding is not None
        return self.embedding(token_ids)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, plan: Any, caches: list[KVPair]) -> torch.Tensor:
        """hidden [n, hidden] (overwritten), positions int [axes, n] -> the hidden states after this stage's layers."""
        num_rows, padding = len(hidden), num_padding_rows(hidden)
        positions = positions[: len(self.config.mrope_sections)]
        if padding:
            hidden, positions = F.pad(hidden, (0, 0, 0, padding)), F.pad(positions, (0, padding))
        angles = self.rotary.table(positions)
        blocks = row_blocks(len(hidden), self.device)
        for layer, cache in zip(self.layers, caches, strict=True):
            layer(hidden, angles, cache, plan, blocks, padding)
        return hidden[:num_rows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Last stage only: hidden states [n, hidden] -> [n, vocabulary]."""
        assert self.norm is not None
        assert self.head is not None
        return self.head(self.norm(hidden))

    def load(self, weights: Weights) -> None:
        """Reads the tensors of this stage and rank, and no other. Raises StartupError (see `Weights`)."""
        if self.embedding is not None:
            self.embedding.load(weights, "model.embed_tokens")
        for index, layer in zip(self.layer_range, self.layers, strict=True):
            layer.load(weights, f"model.layers.{index}")
        if self.norm is not None and self.head is not None:
            self.norm.load(weights, "model.norm")
            if not self.head.is_shared:
                self.head.load(weights, "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head")
