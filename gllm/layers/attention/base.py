"""The interface of paged attention, and its backends by name: one is imported only when it is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import torch

# name -> "module:class"; a new backend is one file and one line here.
BACKENDS = {
    "sdpa": "gllm.layers.attention.sdpa:SdpaAttention",
    "triton": "gllm.layers.attention.triton:TritonAttention",
    "flash": "gllm.layers.attention.flash:FlashAttention",
}
# What "auto" takes on a type of device: the first that can serve the model there.
PREFERRED = {"cpu": ("sdpa",), "cuda": ("flash", "triton", "sdpa")}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSetting:
    """What decides whether a backend can serve a stage; page_size in tokens."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    page_size: int


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Where the tokens of a ragged micro-batch stand in the paged KV cache. Sequence i has `query_lens[i]` new tokens,
    the last ones of `context_lens[i]` tokens in all; its tokens are in the pages `block_tables[i]`.

    Counts are there twice: on the host, so that planning never waits for the device, and on the device for kernels.
    """

    query_lens: Sequence[int]
    context_lens: Sequence[int]
    host_block_tables: np.ndarray  # int32 [num_seqs, max_blocks], padded with block 0
    block_tables: torch.Tensor  # the same on the device
    query_starts: torch.Tensor  # int32 [num_seqs + 1] on the device: row of each sequence's first new token
    context_lens_device: torch.Tensor  # int32 [num_seqs]
    slots: torch.Tensor  # int64 [num_tokens]: page * page_size + offset of every new token
    page_size: int


class AttentionBackend(Protocol):
    """Causal attention of new tokens over a paged KV cache. Holds no state between micro-batches."""

    @staticmethod
    def refusal(setting: AttentionSetting) -> str | None:
        """Why the backend cannot serve this setting, and what to change; None when it can. Imports nothing heavy."""
        ...

    def plan(self, inputs: AttentionInputs, dtype: torch.dtype, device: torch.device) -> Any:
        """What every layer of this micro-batch shares (groups, masks, indices); made once, given to `forward`."""
        ...

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        plan: Any,
    ) -> torch.Tensor:
        """Write the new keys and values [num_tokens, kv_heads, head_dim] to the cache
        [num_blocks, page_size, kv_heads, head_dim], and attend: query [num_tokens, heads, head_dim] -> the same shape.

        Entries of the cache past a sequence's context may be anything finite, and never change its result. The three
        may be views of one tensor: only heads and head_dim are contiguous.
        """
        ...


def load_backend(name: str, setting: AttentionSetting | None = None) -> AttentionBackend:
    """The backend of that name; with a setting, it is checked, and "auto" is the best one for it.

    Raises ValueError with the known names for an unknown one, or in one line why it cannot be used here.
    """
    if name == "auto" and setting is not None:
        return _best(setting)
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}: use one of auto, {', '.join(sorted(BACKENDS))}")
    module, _, attribute = BACKENDS[name].partition(":")
    try:
        backend = getattr(import_module(module), attribute)
        refusal = None if setting is None else backend.refusal(setting)
        if refusal is None:
            return backend()
    except ImportError as error:
        refusal = str(error)
    raise ValueError(f"attention backend {name!r} cannot be used here: {refusal}")


def _best(setting: AttentionSetting) -> AttentionBackend:
    refusals = []
    for name in PREFERRED.get(setting.device.type, ("sdpa",)):
        try:
            return load_backend(name, setting)
        except ValueError as error:
            refusals.append(str(error))
    raise ValueError("; ".join(refusals))
