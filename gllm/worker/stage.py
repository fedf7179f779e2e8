"""One rank of one stage: takes micro-batches in the driver's order, receives, computes, sends on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gllm.config import EngineConfig, ModelInfo
from gllm.core.batch import Batch, Chunk
from gllm.errors import StartupError
from gllm.models.loader import resolve_dtype
from gllm.sampling_params import SamplingParams
from gllm.worker.comm import Neighbours, SharedEmbeddings, SharedPixels, connect
from gllm.worker.embeddings import EmbeddingSource, PixelSource
from gllm.worker.kv_cache import KVCache, KVShape
from gllm.worker.layout import Layout, stage_layers
from gllm.worker.runner import StageRunner
from gllm.worker.step import RequestSpec, StepInput, StepOutput

CPU_KV_BYTES = 512 << 20
ACTIVATION_BYTES = 2 << 30  # left free on a GPU


@dataclass(frozen=True, slots=True)
class Fed:
    """All embeddings of a micro-batch have been gathered."""

    batch_id: int


@dataclass(frozen=True, slots=True)
class Done:
    """A micro-batch has left the stage. start, end: seconds on the host's monotonic clock; start: its input was there.
    output: from the last stage. failures: requests of which an item could not be used, and why."""

    batch_id: int
    start: float
    end: float
    output: StepOutput | None
    failures: dict[int, str]


class Stage:
    """Loads its part of the model; `make_cache` before the first `run`. One call at a time."""

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        layout: Layout,
        rendezvous: str,
        device: str,
        *,
        colocated: bool,
        embeddings: EmbeddingSource | None = None,
        pixels: PixelSource | None = None,
    ) -> None:
        """colocated: items are encoded in stage 0. embeddings, pixels: of stage 0's first rank. Raises StartupError."""
        self._device = torch.device(device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self.layout = layout
        self._config = config
        self._info = info
        parallel = connect(layout, rendezvous, self._device)
        first = layout.stage == 0
        if first and layout.tp > 1:
            embeddings = None if colocated else SharedEmbeddings(parallel, embeddings)
            pixels = SharedPixels(parallel, pixels, self._device)
        self.runner = StageRunner.build(
            config.checkpoint, num_blocks=1, page_size=config.page_size, dtype=config.dtype, device=self._device,
            load_format=config.load_format, seed=config.seed, parallel=parallel,
            layers=stage_layers(config, info)[layout.stage], attention=config.attention_backend,
            with_vision=colocated and first, embeddings=embeddings, pixels=pixels, eos_token_ids=info.eos_token_ids,
        )  # fmt: skip
        dtype = resolve_dtype(config.checkpoint, config.dtype)
        self._neighbours = Neighbours(layout, info.hidden_size, dtype, self._device)

    def num_kv_blocks(self) -> int:
        """KV blocks that this rank has room for, now that its weights are loaded."""
        return num_kv_blocks(self._config, self._info, self.runner.cache.shape, self._device)

    def make_cache(self, num_blocks: int) -> None:
        """The KV pool; and a first micro-batch, because the first run of every kernel is slow: no request shall pay."""
        self.runner.cache = KVCache(self.runner.cache.shape, num_blocks, self._device)
        num_tokens = min(64, num_blocks * self._config.page_size)
        tokens, blocks = (0,) * num_tokens, tuple(range(-(-num_tokens // self._config.page_size)))
        spec = RequestSpec(0, num_tokens, tokens, (), SamplingParams(temperature=0.0))
        self.run(StepInput(Batch(0, (Chunk(0, 0, num_tokens, blocks, True),)), tokens, (spec,)))
        self.runner.forget((0,))

    def run(self, step: StepInput, on_fed: Callable[[], None] | None = None) -> Done:
        """One micro-batch. A stage that is not the first prepares its inputs while it waits for the hidden states."""
        num_tokens, batch_id = step.batch.num_tokens, step.batch.batch_id
        start = time.monotonic()
        hidden: Callable[[], torch.Tensor] | None = None
        if self.layout.stage:
            wait = self._neighbours.receive(num_tokens)

            def hidden() -> torch.Tensor:
                nonlocal start
                tensor = wait()
                start = time.monotonic()
                return tensor

        result = self.runner.execute(step, hidden=hidden, on_fed=on_fed)
        output = result if isinstance(result, StepOutput) else None
        if output is None:
            self._neighbours.send(result)
        return Done(batch_id, start, time.monotonic(), output, self.runner.take_failures())


def num_kv_blocks(config: EngineConfig, info: ModelInfo, shape: KVShape, device: torch.device) -> int:
    """KV blocks by the configuration, or by memory; never more than all sequences at full length could fill. Weights
    must be loaded: what is left is measured. Raises StartupError."""
    if config.num_kv_blocks:
        return config.num_kv_blocks
    num_bytes = config.kv_cache_memory_bytes or _kv_bytes(config, device)
    length = min(config.max_model_len or info.context_length, info.context_length)
    useful = config.max_num_seqs * -(-length // config.page_size)
    blocks = min(shape.num_blocks_for(num_bytes), useful)
    if blocks < 1:
        raise StartupError(f"{num_bytes:,} bytes for KV hold no block of {shape.bytes_per_block:,} bytes")
    return blocks


def _kv_bytes(config: EngineConfig, device: torch.device) -> int:
    """What is left of the GPU's share, less room for activations."""
    if device.type == "cpu":
        return CPU_KV_BYTES
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(config.gpu_memory_utilization * total) - (total - free) - ACTIVATION_BYTES)
