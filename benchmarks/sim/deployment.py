"""A scheme on a number of devices, and the core that decides for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.sim.catalog import UnknownName
from benchmarks.sim.cost import CostModel
from benchmarks.sim.vllm import VllmScheduler
from gllm.core.batch import Batch
from gllm.core.policy import FixedBudget
from gllm.core.request import Request
from gllm.core.scheduler import Sampled, SchedulerConfig, Stats
from rserve.config import RServeConfig
from rserve.core.orchestrator import build, describe

SCHEMES = ("vllm", "gllm", "gllm-epd", "rserve-intra", "rserve", "rserve-elastic")
SEPARATE = ("gllm-epd", "rserve-intra", "rserve", "rserve-elastic")  # schemes with encoders of their own


class Core(Protocol):
    """What the simulator asks of any core; those with encoders have `on_encoded` and `next_encode` as well."""

    def on_request(self, request: Request, now: float) -> None: ...
    def on_item_ready(self, request_id: int, index: int, now: float) -> None: ...
    def on_batch_fed(self, batch_id: int, now: float) -> None: ...
    def on_batch_done(self, batch_id: int, tokens: Mapping[int, int], now: float) -> tuple[Sampled, ...]: ...
    def next_batch(self, now: float) -> Batch | None: ...
    def stats(self) -> Stats: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """pp stages of tp devices each, and `encoders` devices that only encode. The defaults are the engine's.

    token_budget: B, the same for all schemes. encoder_batch_tokens: C of Algorithm 1 where the scheme overlaps; the
    others encode a request as one batch. chunked_pipeline: False is vanilla pipeline parallelism.
    """

    scheme: str
    pp: int = 1
    tp: int = 1
    encoders: int = 0
    token_budget: int = 2048
    encoder_batch_tokens: int = 1024
    min_chunk_tokens: int = 1
    embedding_capacity: int = 65536
    max_num_seqs: int = 128
    chunked_pipeline: bool = True

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise UnknownName(f"unknown scheme {self.scheme!r}; known: {', '.join(SCHEMES)}")
        if (self.scheme in SEPARATE) != (self.encoders > 0):
            raise ValueError(f"scheme {self.scheme} with {self.encoders} encoders")

    @property
    def num_devices(self) -> int:
        return self.pp * self.tp + self.encoders

    @property
    def layout(self) -> str:
        """As the paper writes it: PP4, TP4+E1, PP2xTP2."""
        parts = [f"PP{self.pp}"] if self.pp > 1 else []
        parts += [f"TP{self.tp}"] if self.tp > 1 else []
        encoders = f"+E{self.encoders}" if self.encoders else ""
        return ("x".join(parts) or "1 GPU") + encoders

    @property
    def forms_ahead(self) -> bool:
        """vLLM's engine process fills its queue of batches at once; in our engine the driver is stage 0 and forms a
        micro-batch when it can run it."""
        return self.scheme == "vllm"

    @property
    def is_elastic(self) -> bool:
        return self.scheme == "rserve-elastic"

    def scheduler_config(self, cost: CostModel, block_size: int = 16) -> SchedulerConfig:
        """Raises ValueError when the model does not fit."""
        return SchedulerConfig(
            num_blocks=cost.num_kv_tokens(self.pp, self.tp) // block_size,
            block_size=block_size,
            max_num_seqs=self.max_num_seqs,
            max_in_flight=self.pp,
            chunked_pipeline=self.chunked_pipeline,
        )

    def rserve_config(self) -> RServeConfig:
        """The same switches that the engine's flags set."""
        return RServeConfig(
            num_encoders=self.encoders,
            encoder_batch_tokens=None if self.scheme in ("gllm", "gllm-epd") else self.encoder_batch_tokens,
            intra_request_overlap=self.scheme != "gllm-epd",
            inter_request_batching=self.scheme != "rserve-intra",
            embedding_capacity=self.embedding_capacity,
            min_chunk_tokens=self.min_chunk_tokens,
            elastic_encode=self.is_elastic,
        )


def build_core(deployment: Deployment, cost: CostModel) -> Core:
    """The engine's own core; for vLLM, the one of `vllm.py`."""
    config = deployment.scheduler_config(cost)
    if deployment.scheme == "vllm":
        model = cost.model
        pixels_per_token = (model.vision.patch_size * model.vision.spatial_merge_size) ** 2
        return VllmScheduler(config, deployment.token_budget, model.max_pixels // pixels_per_token)
    core: Any = build(config, FixedBudget(deployment.token_budget), deployment.rserve_config())
    return core  # type: ignore[no-any-return]


def describe_core(deployment: Deployment, cost: CostModel) -> dict[str, Any]:
    """The first record of an event log. A log of vLLM's rules names them; `orchestrator.rebuild` makes no such core."""
    config, policy = deployment.scheduler_config(cost), FixedBudget(deployment.token_budget)
    record = describe(config, policy, deployment.rserve_config())
    return record | ({"rules": "vllm"} if deployment.scheme == "vllm" else {})
