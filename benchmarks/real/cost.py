"""Costs of this machine for the simulator: the calls of `benchmarks.sim.cost.CostModel`, answered from what `profile`
measured. Interpolation and least squares over single pieces of work; no number comes from a run that is predicted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.sim.cluster import Cluster
from benchmarks.sim.images import num_patches
from benchmarks.sim.model_spec import ModelSpec
from gllm.core.batch import Batch

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Line:
    """Straight pieces between measured points; beyond them the nearest piece goes on."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    def at(self, x: float) -> float:
        if len(self.xs) == 1:
            return self.ys[0]
        right = min(max(bisect_left(self.xs, x), 1), len(self.xs) - 1)
        (x0, x1), (y0, y1) = self.xs[right - 1 : right + 1], self.ys[right - 1 : right + 1]
        return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def least_squares(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Coefficients of least relative error, none below 0: a feature that would get a negative one is left out."""
    rows = np.asarray(features, dtype=float) / np.asarray(seconds, dtype=float)[:, None]
    used = list(range(rows.shape[1]))
    while used:
        found = np.linalg.lstsq(rows[:, used], np.ones(len(rows)), rcond=None)[0]
        if (found >= 0).all():
            break
        used.pop(int(found.argmin()))
    coefficients = [0.0] * rows.shape[1]
    for column, value in zip(used, found if used else (), strict=True):
        coefficients[column] = float(value)
    return coefficients


class SeatCost:
    """Seconds of work on one seat, from what `seat.collect` made of its passes."""

    def __init__(self, measured: dict[str, Any]) -> None:
        points = [([h // 14 * (w // 14) for h, w in row["sizes"]], row["seconds"]) for row in measured["encode"]]
        self._encode = least_squares([_vision_features(p) for p, _ in points], [s for _, s in points])
        self.encode_error = max(abs(self.encode(p) / s - 1) for p, s in points)
        chunks = sorted((row["spans"][0][1], row["seconds"]) for row in measured["prefill"])
        self._prefill = Line(tuple(float(n) for n, _ in chunks), tuple(s for _, s in chunks))
        self._prefix = self._fit_prefix(measured["prefixed"])
        self._pair = self._fit_pairs(measured["pairs"])
        extra = [s["seconds"] - u["seconds"] for s, u in zip(measured["sampled"], measured["unsampled"], strict=True)]
        few, many = (len(row["spans"]) for row in measured["sampled"])
        self._sample = Line((float(few), float(many)), (max(0.0, extra[0]), max(0.0, *extra)))
        self._decode = self._fit_decodes(measured["decode"])

    def encode(self, patches: Sequence[int]) -> float:
        """One encode batch of images with so many patches each."""
        return sum(c * f for c, f in zip(self._encode, _vision_features(patches), strict=True))

    def step(self, batch: Batch) -> float:
        """One micro-batch through the whole model."""
        spans = [(chunk.start, chunk.num_tokens) for chunk in batch.chunks]
        return self.chunks(spans) + self.sample(sum(chunk.sample for chunk in batch.chunks))

    def sample(self, count: int) -> float:
        """Logits and tokens of so many positions."""
        return self._sample.at(count) if count else 0.0

    def chunks(self, spans: Sequence[tuple[int, int]]) -> float:
        """Chunks as (tokens before, tokens): the products by their sum, attention by chunk."""
        decodes = [start for start, new in spans if new == 1 and start]
        prefills = [(start, new) for start, new in spans if not (new == 1 and start)]
        total = sum(new for _, new in prefills)
        seconds = self._prefill.at(total + len(decodes))
        if len(prefills) > 1:
            a_chunk, a_pair = self._pair
            # The table's prompt of `total` tokens would attend across its chunks; these do not.
            seconds += a_chunk * (len(prefills) - 1) - a_pair * (total**2 - sum(new * new for _, new in prefills)) / 2
        for start, new in prefills:
            if start:
                seconds += sum(c * f for c, f in zip(self._prefix, (1.0, start, start * new), strict=True))
        if decodes:
            a_step, a_decode, a_token = self._decode
            seconds += a_step + a_decode * len(decodes) + a_token * sum(decodes)
        return max(0.0, seconds)

    def _fit_prefix(self, rows: Sequence[dict[str, Any]]) -> list[float]:
        spans = [row["spans"][0] for row in rows]
        extra = [max(1e-6, row["seconds"] - self._prefill.at(row["spans"][0][1])) for row in rows]
        return least_squares([(1.0, start, start * new) for start, new in spans], extra)

    def _fit_pairs(self, rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
        """(seconds of a further chunk, seconds of a pair of tokens that attend)."""
        counts = np.asarray([row["spans"][0][1] for row in rows], dtype=float)
        extra = [row["seconds"] - self._prefill.at(2 * n) for row, n in zip(rows, counts, strict=True)]
        features = np.stack([np.ones_like(counts), -(counts**2)], axis=1)
        chunk, pair = np.linalg.lstsq(features, np.asarray(extra), rcond=None)[0]
        return float(chunk), max(0.0, float(pair))

    def _fit_decodes(self, rows: Sequence[dict[str, Any]]) -> list[float]:
        features, extra = [], []
        for row in rows:
            count, context = len(row["spans"]), row["spans"][0][0]
            features.append((1.0, count, count * context))
            extra.append(max(1e-6, row["seconds"] - self._prefill.at(count) - self._sample.at(count)))
        return least_squares(features, extra)


def _vision_features(patches: Sequence[int]) -> tuple[float, ...]:
    """A batch, an image, a patch, and a pair of patches of one image (full attention)."""
    return 1.0, float(len(patches)), float(sum(patches)), float(sum(p * p for p in patches))


class MeasuredCost:
    """What a `Cluster` asks of its cost model, for one stage on one machine.

    stage, encoder: seats of the two workers. step_s: the driver's own time around a micro-batch. hop_s: a message
    between driver and encoder. token_s: an embedding's way through shared memory. beside: how much slower each works
    while the other does ("encode", "prefill"; 1: not at all). stolen: (encoder, stage) share of their cores that the
    API process takes. pace: how many times longer everything takes than when it was measured.
    """

    def __init__(
        self, model: ModelSpec, stage: SeatCost, encoder: SeatCost | None, *, num_kv_tokens: int, step_s: float,
        hop_s: float, token_s: float, beside: dict[str, float], stolen: tuple[float, float] = (0.0, 0.0),
        pace: float = 1.0,
    ) -> None:  # fmt: skip
        self.model = model
        self._stage = stage
        self._encoder = encoder
        self._num_kv_tokens = num_kv_tokens
        self._step_s = step_s * pace
        self._hop_s = hop_s * pace
        self._token_s = token_s * pace
        self._beside = beside
        self._encoder_pace, self._stage_pace = (pace / (1 - share) for share in stolen)
        self._cluster: Cluster | None = None

    def watch(self, cluster: Cluster) -> None:
        """Whose workers slow each other down."""
        self._cluster = cluster

    def encode_seconds(self, grids: Iterable[Grid], tp: int = 1) -> float:
        patches = [num_patches(grid) for grid in grids]
        if not patches:
            return 0.0
        if self._encoder is None:
            return self._stage.encode(patches) * self._stage_pace
        pace = self._beside["encode"] if self._is_busy("stage") else 1.0
        return self._encoder.encode(patches) * pace * self._encoder_pace

    def stage_seconds(self, batch: Batch, num_layers: int, tp: int, is_last: bool) -> float:
        pace = self._beside["prefill"] if self._encoder is not None and self._is_busy("encoder") else 1.0
        return self._stage.step(batch) * pace * self._stage_pace + self._step_s

    def embedding_seconds(self, tokens: int, tp: int) -> float:
        """There and back: the message that starts a batch is on no clock of the simulator."""
        return 2 * self._hop_s + tokens * self._token_s

    def activation_seconds(self, tokens: int) -> float:
        """There is one stage."""
        return 0.0

    def num_kv_tokens(self, pp: int, tp: int, utilization: float = 0.9) -> int:
        return self._num_kv_tokens

    def _is_busy(self, kind: str) -> bool:
        if self._cluster is None:
            return False
        workers = self._cluster.stages if kind == "stage" else self._cluster.encoders
        return any(one.worker.is_busy for one in workers)
