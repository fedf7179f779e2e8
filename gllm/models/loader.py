"""From a checkpoint folder to a model in memory: only the tensors, and of them only the slices, that it holds."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gllm.errors import StartupError
from gllm.layers.attention.base import AttentionBackend
from gllm.layers.parallel import Parallel
from gllm.layers.weights import Weights
from gllm.models.config import read_json, text_config, vision_config
from gllm.models.registry import architecture, dtype_name, model_class

INDEX = "model.safetensors.index.json"

# Our names are those of the published Qwen2.5-VL files; later transformers versions save others for the same tensors.
PREFIXES = {
    "model.": ("model.", "model.language_model.", "language_model.model."),
    "lm_head.": ("lm_head.", "language_model.lm_head."),
    "visual.": ("visual.", "model.visual."),
}


class SafetensorsWeights:
    """Weights of a folder with one or more .safetensors files. `names_read` tells what was read of it."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.names_read: set[str] = set()
        self._handles: dict[str, Any] = {}
        index = read_json(checkpoint, INDEX, required=False)
        self._file_of: dict[str, str] = index.get("weight_map") or self._scan()

    def _scan(self) -> dict[str, str]:
        files = sorted(path.name for path in self.checkpoint.glob("*.safetensors"))
        if not files:
            raise StartupError(f"{str(self.checkpoint)!r} has no .safetensors weights (--load-format dummy needs none)")
        return {name: file for file in files for name in self._handle(file).keys()}  # noqa: SIM118 (not a dict)

    def _handle(self, file: str) -> Any:
        if file not in self._handles:
            try:
                self._handles[file] = safe_open(self.checkpoint / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise StartupError(f"cannot read weights {str(self.checkpoint / file)!r}: {error}") from None
        return self._handles[file]

    def _stored_name(self, name: str) -> str:
        for prefix, others in PREFIXES.items():
            if name.startswith(prefix):
                for other in others:
                    stored = other + name.removeprefix(prefix)
                    if stored in self._file_of:
                        return stored
        raise StartupError(f"weights in {str(self.checkpoint)!r} lack the tensor {name!r}")

    def read(
        self, name: str, shape: tuple[int, ...], rows: slice | None = None, cols: slice | None = None
    ) -> torch.Tensor:
        """See `Weights`. Raises StartupError for a missing tensor or another shape."""
        stored = self._stored_name(name)
        handle = self._handle(self._file_of[stored])
        try:
            view = handle.get_slice(stored)
            if tuple(view.get_shape()) != shape:
                raise StartupError(f"tensor {stored!r} is {list(view.get_shape())}, config.json implies {list(shape)}")
            self.names_read.add(stored)
            if cols is not None:
                return view[rows or slice(None), cols]
            return handle.get_tensor(stored) if rows is None else view[rows]
        except SafetensorError as error:
            raise StartupError(f"cannot read tensor {stored!r}: {error}") from None


class RandomWeights:
    """Seeded random weights (`--load-format dummy`): each tensor depends on the seed and its name alone, so every split
    into ranks and stages holds parts of the same model. Norm weights are one; all else is small."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.device = device

    def read(
        self, name: str, shape: tuple[int, ...], rows: slice | None = None, cols: slice | None = None
    ) -> torch.Tensor:
        if len(shape) == 1 and name.endswith(".weight"):
            whole = torch.ones(shape, device=self.device)
        else:
            digest = hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=7).digest()
            generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest, "little"))
            whole = torch.empty(shape, device=self.device).normal_(std=0.02, generator=generator)
        whole = whole if rows is None else whole[rows]
        return whole if cols is None else whole[:, cols]


def open_weights(checkpoint: Path, load_format: str, seed: int, device: torch.device) -> Weights:
    """load_format: "auto" reads the folder's files, "dummy" makes weights from `seed`."""
    return RandomWeights(seed, device) if load_format == "dummy" else SafetensorsWeights(checkpoint)


def resolve_dtype(checkpoint: Path, dtype: str) -> torch.dtype:
    """dtype: "auto", "float32" or "bfloat16"."""
    return getattr(torch, dtype_name(read_json(checkpoint, "config.json"), dtype))


@torch.no_grad()
def load_language_model(
    checkpoint: Path,
    layers: range,
    parallel: Parallel,
    backend: AttentionBackend,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
) -> Any:
    """Layers `layers` of the language model (embedding and head with the first and last). Raises StartupError."""
    raw = read_json(checkpoint, "config.json")
    _, classes = architecture(raw)
    config = text_config(raw)
    config.check_parallel(parallel)
    model = model_class(classes.language)(config, layers, parallel, backend, dtype=dtype, device=device)
    model.load(open_weights(checkpoint, load_format, seed, device))
    return model.eval()


@torch.no_grad()
def load_vision_model(
    checkpoint: Path,
    parallel: Parallel,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
) -> Any:
    """The vision encoder alone. Raises StartupError, also for a model that has none."""
    raw = read_json(checkpoint, "config.json")
    name, classes = architecture(raw)
    if classes.vision is None:
        raise StartupError(f"{name} has no vision encoder")
    config = vision_config(raw)
    config.check_parallel(parallel)
    model = model_class(classes.vision)(config, parallel, dtype=dtype, device=device)
    model.load(open_weights(checkpoint, load_format, seed, device))
    return model.eval()
