"""What work costs in seconds, from shapes and datasheets: FLOPs, bytes and messages of the ViT and of the LLM.

Two numbers are not from datasheets: the efficiencies (shares of peak FLOP/s that large products reach), fitted to the
paper in `fit.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.sim.hardware import HardwareSpec
from benchmarks.sim.images import num_patches
from benchmarks.sim.model_spec import ModelSpec
from gllm.core.batch import Batch, Chunk

Grid = tuple[int, int, int]

# Kernels of one layer in eager mode, counted from the architecture: norms, products, rotary, attention, activation,
# residuals, and (LLM) the KV write.
VISION_KERNELS = 14
LLM_KERNELS = 12
# Reads and writes of activations between the products of a layer, in values per token: about ten of the hidden size
# (norms, residuals, rotary) and four of the intermediate size (gate, up, their product).
HIDDEN_PASSES = 10
INTERMEDIATE_PASSES = 4


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the datasheet's FLOP/s."""

    llm: float
    vision: float


class CostModel:
    """Seconds of all work of one model on one kind of device. Remembers what it computed: a run asks for the same
    sizes over and over."""

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, efficiency: Efficiency) -> None:
        self.model = model
        self.hardware = hardware
        self.efficiency = efficiency
        self._linear: dict[tuple[int, int], float] = {}
        self._images: dict[tuple[int, tuple[int, ...]], float] = {}

    # ---- vision -------------------------------------------------------------------------------------------------

    def encode_seconds(self, grids: Iterable[Grid], tp: int = 1) -> float:
        """The ViT over a batch of images on `tp` devices (weights sharded over them, two all-reduces a layer). Images
        attend within themselves: windows in most layers, the whole image in the full-attention layers."""
        patches = tuple(sorted(num_patches(grid) for grid in grids))
        if not patches:
            return 0.0
        key = (tp, patches)
        if key not in self._images:
            self._images[key] = self._encode_seconds(patches, tp)
        return self._images[key]

    def _encode_seconds(self, patches: Sequence[int], tp: int) -> float:
        vision, hardware, efficiency = self.model.vision, self.hardware, self.efficiency.vision
        rows, hidden, inter = sum(patches), vision.hidden_size, vision.intermediate_size
        layer = (
            self._product(rows, hidden, 3 * hidden, tp, efficiency)
            + hardware.matmul_seconds(rows, hidden // tp, hidden, efficiency)
            + self._product(rows, hidden, 2 * inter, tp, efficiency)
            + hardware.matmul_seconds(rows, inter // tp, hidden, efficiency)
            + hardware.memory_seconds(2.0 * rows * (HIDDEN_PASSES * hidden + INTERMEDIATE_PASSES * inter // tp))
            + 2 * hardware.link.all_reduce_seconds(2.0 * rows * hidden, tp)
        )
        windowed = rows * vision.window_patches
        whole = sum(count * count for count in patches)
        num_full = len(vision.full_attention_layers)
        attention = 4.0 * hidden / tp * ((vision.depth - num_full) * windowed + num_full * whole)
        merged = hidden * vision.patches_per_token
        tokens = rows // vision.patches_per_token
        values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2  # of one patch
        ends = (
            hardware.matmul_seconds(rows, values, hidden, efficiency)
            + self._product(tokens, merged, merged, tp, efficiency)
            + hardware.matmul_seconds(tokens, merged // tp, self.model.hidden_size, efficiency)
        )
        on_device = vision.depth * layer + attention / (hardware.flops * efficiency) + ends
        return max(on_device, vision.depth * VISION_KERNELS * hardware.launch_s) + hardware.step_overhead_s

    # ---- language model -----------------------------------------------------------------------------------------

    def stage_seconds(self, batch: Batch, num_layers: int, tp: int, is_last: bool) -> float:
        """A micro-batch through `num_layers` layers on `tp` devices; the last stage adds the head for the positions
        that sample. Without co-located encoding."""
        tokens = batch.num_tokens
        on_device = num_layers * (self._linear_seconds(tokens, tp) + self._attention_seconds(batch.chunks, tp))
        on_device = max(on_device, num_layers * LLM_KERNELS * self.hardware.launch_s)
        if is_last:
            samples = sum(chunk.sample for chunk in batch.chunks)
            if samples:
                on_device += self._product(
                    samples, self.model.hidden_size, self.model.vocab_size, tp, self.efficiency.llm
                )
        return on_device + self.hardware.step_overhead_s

    def _linear_seconds(self, tokens: int, tp: int) -> float:
        """Everything of one layer that depends on the number of tokens alone."""
        key = (tokens, tp)
        if key not in self._linear:
            model, hardware, efficiency = self.model, self.hardware, self.efficiency.llm
            heads = model.num_heads * model.head_dim
            qkv = heads + 2 * model.num_kv_heads * model.head_dim
            self._linear[key] = (
                self._product(tokens, model.hidden_size, qkv, tp, efficiency)
                + hardware.matmul_seconds(tokens, heads // tp, model.hidden_size, efficiency)
                + self._product(tokens, model.hidden_size, 2 * model.intermediate_size, tp, efficiency)
                + hardware.matmul_seconds(tokens, model.intermediate_size // tp, model.hidden_size, efficiency)
                + hardware.memory_seconds(
                    model.bytes_per_value
                    * tokens
                    * (HIDDEN_PASSES * model.hidden_size + INTERMEDIATE_PASSES * model.intermediate_size // tp)
                )
                + 2 * hardware.link.all_reduce_seconds(model.bytes_per_value * tokens * model.hidden_size, tp)
            )
        return self._linear[key]

    def _attention_seconds(self, chunks: Iterable[Chunk], tp: int) -> float:
        """Causal attention of one layer: every token of a chunk attends to the prefix and to its own past."""
        model, hardware = self.model, self.hardware
        pairs = context = 0
        for chunk in chunks:
            pairs += chunk.num_tokens * chunk.start + chunk.num_tokens * (chunk.num_tokens + 1) // 2
            context += chunk.start + chunk.num_tokens
        compute = 4.0 * pairs * model.num_heads * model.head_dim / tp / (hardware.flops * self.efficiency.llm)
        return max(compute, hardware.memory_seconds(context * model.kv_bytes_per_layer / tp))

    def _product(self, rows: int, inner: int, columns: int, tp: int, efficiency: float) -> float:
        """A product whose columns are split over `tp` devices."""
        return self.hardware.matmul_seconds(rows, inner, columns // tp, efficiency)

    # ---- messages -----------------------------------------------------------------------------------------------

    def activation_seconds(self, tokens: int) -> float:
        """Hidden states and residual of a micro-batch, from one stage to the next."""
        return self.hardware.link.seconds(2.0 * tokens * self.model.hidden_size * self.model.bytes_per_value)

    def embedding_seconds(self, tokens: int, tp: int) -> float:
        """Embeddings from an encoder to stage 0: one message to each of its `tp` devices."""
        return tp * self.hardware.link.seconds(tokens * self.model.hidden_size * self.model.bytes_per_value)

    # ---- memory -------------------------------------------------------------------------------------------------

    def num_kv_tokens(self, pp: int, tp: int, utilization: float = 0.9) -> int:
        """Tokens whose KV fits beside the weights on the fullest device. Raises ValueError when the weights alone do
        not fit."""
        model, hardware = self.model, self.hardware
        layers = max(model.layers_of(pp))
        table = model.vocab_size * model.hidden_size
        weights = (layers * model.layer_parameters + table) * model.bytes_per_value / tp
        room = hardware.memory_bytes * utilization - hardware.reserved_bytes - weights
        tokens = int(room / (layers * model.kv_bytes_per_layer / tp))
        if tokens <= 0:
            raise ValueError(f"{model.name} does not fit on {pp * tp} devices of {hardware.name}")
        return tokens
