"""One pipeline stage: runs whatever micro-batch it gets. It knows requests and blocks, and no scheme."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gllm.core.batch import Chunk, ItemRef
from gllm.errors import StartupError
from gllm.layers.attention.base import AttentionSetting, load_backend
from gllm.layers.packed import compile_products, pack_weights
from gllm.layers.parallel import SINGLE, Parallel, split_layers
from gllm.models.config import read_json, text_config
from gllm.models.loader import load_language_model, resolve_dtype
from gllm.worker.embeddings import EmbeddingSource, LocalEmbeddings, PixelSource
from gllm.worker.inputs import ModelInputs, RequestState, build_inputs
from gllm.worker.kv_cache import KVCache, KVShape
from gllm.worker.sampler import Sampler, SampleRow
from gllm.worker.step import StepInput, StepOutput
from gllm.worker.vision import VisionEncoder


class StageRunner:
    """Runs micro-batches through one stage's layers. Not thread safe; `execute` is called in the driver's order."""

    def __init__(
        self,
        model: Any,
        cache: KVCache,
        *,
        embeddings: EmbeddingSource | None = None,
        vision: VisionEncoder | None = None,
        pixels: PixelSource | None = None,
        eos_token_ids: Sequence[int] = (),
        seed: int = 0,
        merge_size: int = 2,
    ) -> None:
        """embeddings: where rows of item tokens come from (first stage); default: encoded here. vision and pixels:
        needed for a batch with `encode`. seed: for requests whose sampling has none."""
        self.model = model
        self.cache = cache
        self.embeddings = LocalEmbeddings() if embeddings is None else embeddings
        self.vision = vision
        self.pixels = pixels
        self.sampler = Sampler(eos_token_ids)
        self.seed = seed
        self.merge_size = merge_size
        self.states: dict[int, RequestState] = {}
        self._failures: dict[int, str] = {}

    @classmethod
    def build(
        cls,
        checkpoint: Path,
        *,
        num_blocks: int,
        page_size: int = 16,
        dtype: str = "auto",
        device: torch.device | str = "cpu",
        load_format: str = "auto",
        seed: int = 0,
        parallel: Parallel = SINGLE,
        layers: range | None = None,
        attention: str = "auto",
        with_vision: bool = False,
        embeddings: EmbeddingSource | None = None,
        pixels: PixelSource | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> StageRunner:
        """Load a stage. layers: its range, default an even split over `parallel.pp_size`. attention: a backend's name,
        "auto" for the best one here. with_vision: load the vision encoder too (co-located encoding). Raises
        StartupError in one line."""
        raw = read_json(checkpoint, "config.json")
        config = text_config(raw)
        device = torch.device(device)
        torch_dtype = resolve_dtype(checkpoint, dtype)
        setting = AttentionSetting(device=device, dtype=torch_dtype, head_dim=config.head_dim, page_size=page_size)
        try:
            layers = layers or split_layers(config.num_layers, parallel.pp_size)[parallel.pp_rank]
            backend = load_backend(attention, setting)
        except ValueError as error:
            raise StartupError(str(error)) from None
        common = {"device": device, "load_format": load_format, "seed": seed}
        model = load_language_model(checkpoint, layers, parallel, backend, dtype=torch_dtype, **common)
        pack_weights(model)
        compile_products(model)
        vision = VisionEncoder(checkpoint, dtype=dtype, parallel=parallel, **common) if with_vision else None
        shape = KVShape.of(checkpoint, layers, parallel, dtype=dtype, page_size=page_size)
        return cls(
            model,
            KVCache(shape, num_blocks, device),
            embeddings=embeddings,
            vision=vision,
            pixels=pixels,
            eos_token_ids=eos_token_ids,
            seed=seed,
            merge_size=int((raw.get("vision_config") or {}).get("spatial_merge_size") or 2),
        )

    @torch.inference_mode()
    def execute(
        self,
        step: StepInput,
        *,
        hidden: torch.Tensor | Callable[[], torch.Tensor] | None = None,
        on_fed: Callable[[], None] | None = None,
    ) -> StepOutput | torch.Tensor:
        """Run one micro-batch.

        hidden: [num_tokens, hidden] from the stage before (overwritten), or what waits for it, called once the inputs
        are prepared; None on the first stage. on_fed: called as soon as all embeddings have been gathered, before the
        forward pass. Returns the hidden states [num_tokens, hidden], and on the last stage the sampled tokens.

        An item whose pixels or embeddings are broken does not fail the batch: see `take_failures`.
        """
        batch = step.batch
        self.forget(batch.dropped)
        for spec in step.new:
            self.states[spec.request_id] = RequestState(spec, self.merge_size)
        self._encode(batch.encode)
        self._append(step)
        inputs = self._inputs(step)
        if self.model.is_first:
            hidden = self._embed(step, inputs)
        if on_fed is not None:
            on_fed()
        if callable(hidden):
            hidden = hidden()
        if inputs is not None and hidden is not None:
            plan = self.model.backend.plan(inputs.attention, self.model.dtype, self.model.device)
            hidden = self.model(hidden, inputs.positions, plan, self.cache.layers)
        if not self.model.is_last:
            return hidden if hidden is not None else self._nothing()
        return self._sample(step, inputs, hidden)

    def take_failures(self) -> dict[int, str]:
        """Requests of which an item could not be encoded or gathered since the last call, and why. Their item tokens
        ran as zeros, so their output is worthless; all other requests are as they should be."""
        failures, self._failures = self._failures, {}
        return failures

    def forget(self, request_ids: Sequence[int]) -> None:
        """These requests are gone, or start anew."""
        for request_id in request_ids:
            self.states.pop(request_id, None)
            if self.model.is_first:
                self.embeddings.drop(request_id)

    def _nothing(self) -> torch.Tensor:
        return torch.empty(0, self.model.config.hidden_size, dtype=self.model.dtype, device=self.model.device)

    def _encode(self, refs: Sequence[ItemRef]) -> None:
        """Encode items in this process, all in one batch."""
        if not refs or not self.model.is_first:
            return
        if self.vision is None or self.pixels is None or not isinstance(self.embeddings, LocalEmbeddings):
            raise RuntimeError("a batch asks this stage to encode, but it was built without a vision encoder")
        good, images, grids = [], [], []
        for ref in refs:
            try:
                image = self.pixels.pixels(ref.request_id, ref.index)
                grid = self.vision.grid_of(image)
                self.vision.check(image, grid, ref.num_tokens)
            except (LookupError, ValueError) as error:
                self._failures[ref.request_id] = f"item {ref.index}: {error}"
                continue
            good.append(ref)
            images.append(image)
            grids.append(grid)
        for ref, rows in zip(good, self.vision.encode(images, grids), strict=True):
            self.embeddings.put(ref.request_id, ref.index, rows)

    def _append(self, step: StepInput) -> None:
        at = 0
        for chunk in step.batch.chunks:
            self.states[chunk.request_id].append(chunk, step.token_ids[at : at + chunk.num_tokens])
            at += chunk.num_tokens

    def _inputs(self, step: StepInput) -> ModelInputs | None:
        if not step.batch.chunks:
            return None
        page_size, device = self.cache.shape.page_size, self.model.device
        return build_inputs(step.batch.chunks, step.token_ids, self.states, page_size, device)

    def _embed(self, step: StepInput, inputs: ModelInputs | None) -> torch.Tensor | None:
        if inputs is None:
            return None
        hidden = self.model.embed(inputs.token_ids)
        at = 0
        for chunk in step.batch.chunks:
            self._gather(chunk, hidden[at : at + chunk.num_tokens])
            at += chunk.num_tokens
        return hidden

    def _gather(self, chunk: Chunk, hidden: torch.Tensor) -> None:
        """Overwrite the chunk's item positions with the items' rows."""
        for part in chunk.items:
            out = hidden[part.at : part.at + part.num_tokens]
            try:
                self.embeddings.gather(chunk.request_id, part.index, part.start, part.num_tokens, out)
            except (LookupError, ValueError, RuntimeError) as error:
                self._failures.setdefault(chunk.request_id, f"item {part.index}: {error}")
                out.zero_()
            # A NaN would stay in the KV cache, and reach the request that gets its block next.
            out.nan_to_num_(0.0, 0.0, 0.0)

    def _sample(self, step: StepInput, inputs: ModelInputs | None, hidden: torch.Tensor | None) -> StepOutput:
        chosen = [chunk.request_id for chunk in step.batch.chunks if chunk.sample]
        if not chosen or inputs is None or hidden is None:
            return StepOutput(step.batch.batch_id, ())
        logits = self.model.logits(hidden.index_select(0, inputs.sample_rows))
        tokens, logprobs = self.sampler.sample(logits, [self._sample_row(request_id) for request_id in chosen])
        return StepOutput(step.batch.batch_id, tuple(zip(chosen, tokens, strict=True)), logprobs)

    def _sample_row(self, request_id: int) -> SampleRow:
        state = self.states[request_id]
        return SampleRow(
            sampling=state.spec.sampling,
            token_ids=state.token_ids,
            num_prompt_tokens=state.spec.num_prompt_tokens,
            seed=_request_seed(self.seed, request_id),
        )


def _request_seed(seed: int, request_id: int) -> int:
    """The seed of a request that came without one."""
    digest = hashlib.blake2b(f"{seed} {request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
