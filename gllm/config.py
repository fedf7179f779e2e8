"""One frozen configuration, built once at the entry point; the command line and `LLM(...)` are made from its fields."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEMO_CHECKPOINT = Path(__file__).parent / "assets" / "demo"


def option(default: Any, help: str, *names: str, choices: tuple[str, ...] = (), metavar: str | None = None) -> Any:
    """A config field with its help text and the further flag names (gLLM's, vLLM's) that set it."""
    metadata = {"help": help, "names": names, "choices": choices, "metavar": metavar}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that the engine needs to start. Raises ValueError in one line that says what to change."""

    # Model
    model_path: str | None = option(None, "checkpoint folder (Hugging Face layout); default: the demo", "model")
    load_format: str = option("auto", "auto reads the weights, dummy makes random ones", choices=("auto", "dummy"))
    dtype: str = option("auto", "auto: as the checkpoint says", choices=("auto", "bfloat16", "float32"))
    device: str = option("auto", "auto: CUDA where there is one", choices=("auto", "cpu", "cuda"))
    attention_backend: str = option(
        "auto",
        "auto: sdpa on CPU; on CUDA flash where flash-attn is installed and takes the model and pages, else triton",
        choices=("auto", "sdpa", "triton", "flash"),
    )
    seed: int = option(0, "seed of dummy weights and of sampling without a seed of its own")
    max_model_len: int | None = option(None, "longest prompt plus output, in tokens; default: what model and KV hold")

    # KV cache and scheduling
    page_size: int = option(16, "tokens in a KV block", "block_size")
    num_kv_blocks: int | None = option(None, "KV blocks; default: by memory", "num_gpu_blocks_override")
    kv_cache_memory_bytes: int | None = option(None, "bytes for KV; default: 512 MiB on CPU, by memory on GPU")
    gpu_memory_utilization: float = option(0.9, "share of the GPU that weights and KV may use", "gpu_memory_util")
    max_num_batched_tokens: int = option(2048, "token budget B of a micro-batch", "token_budget", "maxp")
    max_num_seqs: int = option(128, "requests that hold KV at once")
    schedule_method: str = option(
        "chunked_prefill", "how the token budget is spent", choices=("chunked_prefill", "token_throttling")
    )
    maxd: int = option(512, "most decode tokens in a micro-batch")
    minp: int | None = option(None, "token throttling: least prefill tokens in a micro-batch; default: 32")
    iterp: int | None = option(None, "token throttling: micro-batches that waiting tokens are spread over; default: 8")
    kvthresh: float | None = option(None, "token throttling: share of free KV below which none prefills; default: 0.05")
    chunked_pipeline: bool = option(True, "consecutive chunks of a request in the pipeline together (CPP)")

    # Parallelism
    pp: int = option(1, "pipeline stages", "pipeline_parallel_size")
    tp: int = option(1, "tensor-parallel ranks of every stage", "tensor_parallel_size")
    assigned_layers: str | None = option(None, "layers of each stage, as 7,7,8,6; default: an even split")
    distributed_executor_backend: str = option(
        "mp",
        "mp: workers on this host; ray: on the cluster of RAY_ADDRESS, or one that runs here, else a new local one",
        choices=("mp", "ray"),
    )
    ray_placement: str = option(
        "pack",
        "ray: pack fills one machine after the other, spread uses as many as there are",
        choices=("pack", "spread"),
    )
    max_queued_requests: int = option(4096, "requests inside the server; further ones get 503")

    # RServe
    rserve: bool = option(False, "overlap encode and prefill (one separate encoder unless --encoders says otherwise)")
    encoders: int | None = option(None, "separate encoder processes; 0: the encoder shares stage 0", metavar="E")
    encoder_batch_tokens: int | None = option(
        None, "item tokens C that make an encode batch (Algorithm 1); default: 1024 on GPU, 256 on CPU", metavar="C"
    )
    intra_request_overlap: bool = option(True, "prefill a request's ready prefix while its later items are encoded")
    inter_request_batching: bool = option(True, "fill a micro-batch with ready tokens of several requests")
    embedding_capacity: int | None = option(None, "item tokens whose embeddings may be held at once; default: 65536")
    min_chunk_tokens: int | None = option(
        None, "smallest prefill chunk while more of the prompt is still to come; waived when nothing else could run"
    )
    event_log: str | None = option(
        None,
        "write every scheduler event to this file, a JSON line each; with ray on the machine of stage 0",
        metavar="FILE",
    )

    # Media
    limit_mm_per_prompt: dict[str, int] = option({"image": 256}, 'most items a request, as JSON: {"image": 16}')
    mm_processor_kwargs: dict[str, Any] = option({}, 'image processor settings, as JSON: {"max_pixels": 1003520}')
    allowed_media_domains: tuple[str, ...] = option((), "hosts that image URLs may name (default: any public host)")
    allowed_local_media_path: str | None = option(None, "folder below which file:// images may be read")
    media_workers: int | None = option(None, "threads that fetch, decode and resize; default: by cores, 2 to 8")
    media_timeout: float = option(20.0, "seconds in which one item has to be fetched")
    max_media_bytes: int = option(64 << 20, "largest encoded item, in bytes")

    # Processes
    llm_threads: int | None = option(None, "CPU threads of an LLM stage; default: the cores left by the encoders")
    encoder_threads: int | None = option(None, "CPU threads of an encoder; default: an even share of the cores")
    pin_cores: bool = option(True, "bind each worker to cores of its own when there are enough")
    heartbeat_timeout: float = option(10.0, "seconds without a sign of life after which a worker counts as hung")
    startup_timeout: float = option(600.0, "seconds in which all workers have to be ready")

    def __post_init__(self) -> None:
        def need(ok: bool, text: str) -> None:
            if not ok:
                raise ValueError(text)

        object.__setattr__(self, "allowed_media_domains", tuple(self.allowed_media_domains))
        for f in dataclasses.fields(self):
            choices, value = f.metadata["choices"], getattr(self, f.name)
            need(
                not choices or value in choices, f"--{flag(f.name)} must be one of {', '.join(choices)}, got {value!r}"
            )
        counts = (
            "page_size", "max_num_batched_tokens", "max_num_seqs", "max_queued_requests", "max_media_bytes", "maxd",
            "pp", "tp",
        )  # fmt: skip
        for name in counts:
            need(getattr(self, name) >= 1, f"--{flag(name)} must be at least 1, got {getattr(self, name)}")
        optional_counts = (
            "max_model_len", "num_kv_blocks", "kv_cache_memory_bytes", "encoder_batch_tokens", "embedding_capacity",
            "min_chunk_tokens", "minp", "iterp", "media_workers", "llm_threads", "encoder_threads",
        )  # fmt: skip
        for name in optional_counts:
            value = getattr(self, name)
            need(value is None or value >= 1, f"--{flag(name)} must be at least 1, got {value}")
        for name in ("minp", "iterp", "kvthresh"):
            need(
                self.schedule_method == "token_throttling" or getattr(self, name) is None,
                f"--{flag(name)} belongs to --schedule-method token_throttling",
            )
        need(self.kvthresh is None or 0 <= self.kvthresh < 1, "--kvthresh must be in [0, 1)")
        need(0 < self.gpu_memory_utilization <= 1, "--gpu-memory-utilization must be in (0, 1]")
        for name in ("media_timeout", "heartbeat_timeout", "startup_timeout"):
            need(getattr(self, name) > 0, f"--{flag(name)} must be above 0 seconds")
        need(self.encoders is None or self.encoders >= 0, "--encoders must be 0 or more")
        need(not (self.rserve and self.encoders == 0), "--rserve needs an encoder of its own: use --encoders 1 or more")
        for name in ("intra_request_overlap", "inter_request_batching"):
            need(self.rserve or getattr(self, name), f"--no-{flag(name)} is a variant of --rserve: add --rserve")
        for name in ("encoder_batch_tokens", "min_chunk_tokens"):
            need(self.rserve or getattr(self, name) is None, f"--{flag(name)} belongs to --rserve: add --rserve")
        need(
            set(self.limit_mm_per_prompt) <= {"image"} and all(n >= 0 for n in self.limit_mm_per_prompt.values()),
            '--limit-mm-per-prompt takes counts of images only, as {"image": 16}',
        )
        unknown = set(self.mm_processor_kwargs) - {"min_pixels", "max_pixels"}
        need(not unknown, f"--mm-processor-kwargs knows min_pixels and max_pixels, not {', '.join(sorted(unknown))}")

    @property
    def num_encoders(self) -> int:
        """Encoder processes; 0 when stage 0 encodes."""
        if self.encoders is not None:
            return self.encoders
        return 1 if self.rserve else 0

    @property
    def scheme(self) -> str:
        """The name of this configuration's scheme in the paper and in the figures."""
        if not self.rserve:
            return "gllm-epd" if self.num_encoders else "gllm"
        if not self.intra_request_overlap:
            return "rserve-inter"
        return "rserve" if self.inter_request_batching else "rserve-intra"

    @property
    def checkpoint(self) -> Path:
        """The checkpoint folder: `model_path`, or the bundled demo."""
        return Path(self.model_path) if self.model_path else DEMO_CHECKPOINT


def flag(name: str) -> str:
    return name.replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts of a checkpoint that the engine needs before (and without) loading weights; made by
    `gllm.models.registry.model_info`."""

    architecture: str
    hidden_size: int
    num_layers: int
    context_length: int
    vocab_size: int
    image_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str  # "float32" | "bfloat16"


def json_option(text: str) -> Any:
    """Parse a JSON flag value. Raises ValueError with the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {text!r} ({error})") from None


def usable_cores() -> list[int]:
    """The CPU cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))
