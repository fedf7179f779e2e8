"""Costs of this machine for the simulator: the calls of `benchmarks.sim.cost.CostModel`, answered from what `profile`
measured. Least squares over the spans of live servers that were asked other requests than those that are predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.real.pace import Pace
from benchmarks.sim.cluster import Cluster
from benchmarks.sim.images import num_patches
from benchmarks.sim.model_spec import ModelSpec
from gllm.core.batch import Batch

Grid = tuple[int, int, int]
Span = tuple[int, int]  # tokens before the chunk, tokens of the chunk
ROUNDS = 5  # of weighted least squares; the weights hardly change after the third


def encode_features(patches: Sequence[int]) -> tuple[float, ...]:
    """A batch, an image, a patch, and a pair of patches of one image (full attention). patches: of every image."""
    return 1.0, float(len(patches)), float(sum(patches)), float(sum(p * p for p in patches))


def step_features(spans: Sequence[Span], num_samples: int) -> tuple[float, ...]:
    """A micro-batch, a chunk of a prompt, a token of it, a pair of tokens that attend, a decode, a token of its
    context, and a position that is sampled."""
    decodes = [start for start, new in spans if new == 1 and start]
    prefills = [(start, new) for start, new in spans if not (new == 1 and start)]
    pairs = sum(new * (start + new / 2) for start, new in prefills)
    tokens = sum(new for _, new in prefills)
    return (1.0, *map(float, (len(prefills), tokens, pairs, len(decodes), sum(decodes), num_samples)))


def least_squares(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Coefficients of least squared errors relative to the prediction, none below 0: a feature that would get a
    negative one is left out. All predictions together add up to all seconds. Errors relative to what was measured would
    not do: times scatter upwards, and the fit would come out too low."""
    rows, wanted = np.asarray(features, dtype=float), np.asarray(seconds, dtype=float)
    scale = np.maximum(rows.max(axis=0), 1e-300)  # so that the sizes of coefficients compare
    predicted = np.full(len(wanted), wanted.mean())
    found = np.zeros(rows.shape[1])
    for _ in range(ROUNDS if wanted.any() else 0):
        weights = 1 / np.sqrt(np.maximum(predicted, 1e-3 * wanted.mean()))
        found = _not_negative(rows / scale * weights[:, None], wanted * weights) / scale
        predicted = rows @ found
    return [float(c) for c in found]


def _not_negative(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    used = list(range(rows.shape[1]))
    found = np.zeros(rows.shape[1])
    while used:
        part = np.linalg.lstsq(rows[:, used], wanted, rcond=None)[0]
        if (part >= 0).all():
            found[used] = part
            break
        used.pop(int(part.argmin()))
    return found


def dot(coefficients: Sequence[float], features: Sequence[float]) -> float:
    return sum(c * f for c, f in zip(coefficients, features, strict=True))


@dataclass(frozen=True, slots=True)
class WorkerCost:
    """A worker at its seat: coefficients of its work in seconds at pace 1, empty where it never does it. cores: on
    which it computes."""

    cores: tuple[int, ...]
    encode: tuple[float, ...]
    step: tuple[float, ...]

    @classmethod
    def read(cls, found: dict[str, Any]) -> WorkerCost:
        return cls(*(tuple(found[name]) for name in ("cores", "encode", "step")))

    def encode_seconds(self, patches: Sequence[int]) -> float:
        """One encode batch of images with so many patches each."""
        return dot(self.encode, encode_features(patches))

    def step_seconds(self, batch: Batch) -> float:
        """One micro-batch through the whole model."""
        spans = [(chunk.start, chunk.num_tokens) for chunk in batch.chunks]
        return dot(self.step, step_features(spans, sum(chunk.sample for chunk in batch.chunks)))


@dataclass(frozen=True, slots=True)
class Delays:
    """Time around the workers' spans, in seconds, at whatever pace the cores had: it is short beside them. admit: from
    a request's due time to the core, (a request, a byte of its body). ready: until its pixels are there, (an image, a
    megapixel). step: of the driver around a micro-batch. hop: to an encoder and back, (a batch, a token). answer: from
    the first token to the client."""

    admit: tuple[float, float]
    ready: tuple[float, float]
    step: float
    hop: tuple[float, float]
    answer: float

    @classmethod
    def read(cls, found: dict[str, Any]) -> Delays:
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in found.items()})

    def described(self) -> dict[str, Any]:
        return asdict(self)


class MeasuredCost:
    """What a `Cluster` asks of its cost model, for one stage on one machine, at the pace that its cores have at that
    moment. encoder: None where the stage encodes. Virtual time 0 is the begin of `pace`'s."""

    def __init__(
        self, model: ModelSpec, stage: WorkerCost, encoder: WorkerCost | None, *, delays: Delays, pace: Pace,
        num_kv_tokens: int,
    ) -> None:  # fmt: skip
        self.model = model
        self._stage = stage
        self._encoder = encoder
        self._delays = delays
        self._pace = pace
        self._num_kv_tokens = num_kv_tokens
        self._cluster: Cluster | None = None
        self._encoded_at = 0.0

    def watch(self, cluster: Cluster) -> None:
        """Whose clock tells the moment."""
        self._cluster = cluster

    def encode_seconds(self, grids: Iterable[Grid], tp: int = 1) -> float:
        patches = [num_patches(grid) for grid in grids]
        if not patches:
            return 0.0
        worker = self._encoder or self._stage
        end = self._pace.done_at(worker.cores, self._now, worker.encode_seconds(patches))
        if self._encoder is None:
            self._encoded_at = end
        return end - self._now

    def stage_seconds(self, batch: Batch, num_layers: int, tp: int, is_last: bool) -> float:
        """Of the chunks, which begin when the batch's own images are encoded."""
        begin = max(self._now, self._encoded_at)
        end = self._pace.done_at(self._stage.cores, begin, self._stage.step_seconds(batch))
        return end - begin + self._delays.step

    def embedding_seconds(self, tokens: int, tp: int) -> float:
        """There and back: the message that starts a batch is on no clock of the simulator."""
        return dot(self._delays.hop, (1.0, tokens))

    def activation_seconds(self, tokens: int) -> float:
        """There is one stage."""
        return 0.0

    def num_kv_tokens(self, pp: int, tp: int, utilization: float = 0.9) -> int:
        return self._num_kv_tokens

    @property
    def _now(self) -> float:
        return self._cluster.now if self._cluster is not None else 0.0
