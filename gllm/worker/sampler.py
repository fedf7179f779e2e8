"""From logits to next tokens. A draw depends on the request's seed and output position alone, never on the batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gllm.sampling_params import SamplingParams
from gllm.worker.step import TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What the sampler needs to know of the request of one row of logits.

    token_ids: prompt and output so far; seed: used when the parameters have none.
    """

    sampling: SamplingParams
    token_ids: Sequence[int]
    num_prompt_tokens: int
    seed: int

    @property
    def position(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def uniform(self) -> float:
        """The draw in [0, 1) for this output position: a hash of (seed, position), the same on every device."""
        seed = self.seed if self.sampling.seed is None else self.sampling.seed
        digest = hashlib.blake2b(f"{seed} {self.position}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Sampler:
    """Samples a batch of rows. eos_token_ids: with a request's own stop tokens, banned before `min_tokens`."""

    def __init__(self, eos_token_ids: Sequence[int] = ()) -> None:
        self.eos_token_ids = tuple(eos_token_ids)

    def sample(
        self, logits: torch.Tensor, rows: Sequence[SampleRow]
    ) -> tuple[list[int], tuple[TokenLogprobs | None, ...]]:
        """logits [n, vocabulary] (any float dtype) -> n token ids, and the logprobs of the rows that asked (or ()).

        Logprobs are those of the unchanged distribution, before penalties and temperature.
        """
        scores = logits
        if any(_changes_logits(row) for row in rows):
            scores = logits.float().clone()
            self._penalise(scores, rows)
            self._ban_stops(scores, rows)
        tokens = scores.max(dim=-1).indices  # for bfloat16 on CPUs argmax takes 8 x as long
        drawn = [i for i, row in enumerate(rows) if not row.sampling.is_greedy]
        if drawn:
            picked = torch.tensor(drawn, device=logits.device)
            tokens[picked] = _draw(scores.index_select(0, picked).float(), [rows[i] for i in drawn])
        chosen: list[int] = tokens.tolist()
        wanted = any(row.sampling.logprobs is not None for row in rows)
        return chosen, _logprobs(logits, chosen, rows) if wanted else ()

    def _penalise(self, scores: torch.Tensor, rows: Sequence[SampleRow]) -> None:
        """Repetition over prompt and output tokens, presence and frequency over output tokens alone."""
        for i, row in enumerate(rows):
            s = row.sampling
            if s.repetition_penalty != 1.0:
                seen = _ids(set(row.token_ids), scores)
                values = scores[i, seen]
                scores[i, seen] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
            if (s.presence_penalty or s.frequency_penalty) and row.position:
                ids, counts = np.unique(np.array(row.token_ids[row.num_prompt_tokens :]), return_counts=True)
                change = s.frequency_penalty * counts + s.presence_penalty
                scores[i, _ids(ids, scores)] -= torch.from_numpy(change).to(scores)

    def _ban_stops(self, scores: torch.Tensor, rows: Sequence[SampleRow]) -> None:
        for i, row in enumerate(rows):
            if row.position < row.sampling.min_tokens:
                scores[i, _ids({*self.eos_token_ids, *row.sampling.stop_token_ids}, scores)] = float("-inf")


def _changes_logits(row: SampleRow) -> bool:
    s = row.sampling
    penalised = s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1.0
    return bool(penalised) or row.position < s.min_tokens


def _ids(ids: object, scores: torch.Tensor) -> torch.Tensor:
    """Those of some token ids that the model has, as an index."""
    kept = [int(i) for i in ids if 0 <= i < scores.shape[-1]]  # type: ignore[attr-defined]
    return torch.tensor(kept, dtype=torch.int64, device=scores.device)


def _draw(scores: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Token ids drawn from float32 scores [n, vocabulary]: temperature, then the filters, then the inverse of the
    distribution (cumulated in token order, whatever other rows need) at each row's uniform draw."""
    # The maximum becomes 0 before the division: no score overflows to +inf, and so none becomes NaN.
    scores = scores - scores.amax(dim=-1, keepdim=True)
    probs = torch.softmax(scores / _column([row.sampling.temperature for row in rows], scores).float(), dim=-1)
    if any(row.sampling.min_p > 0 for row in rows):
        floor = probs.amax(dim=-1, keepdim=True) * _column([row.sampling.min_p for row in rows], scores)
        probs = probs.masked_fill(probs < floor, 0.0)
    if any(row.sampling.top_k > 0 or row.sampling.top_p < 1 for row in rows):
        probs = _keep_top(probs, rows)
    total = probs.double().cumsum(dim=-1)
    point = _column([row.uniform for row in rows], scores) * total[:, -1:]
    place = torch.searchsorted(total, point, right=True)
    # Rounding must never pick a token of probability zero: stay at or before the last one that has some.
    last = (total >= total[:, -1:]).to(torch.uint8).argmax(dim=-1, keepdim=True)
    return torch.minimum(place, last).squeeze(1)


def _keep_top(probs: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """The top_k most likely tokens, and of these the fewest that hold top_p of their mass; all others become zero."""
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    size = probs.shape[-1]
    limits = _column([row.sampling.top_k if row.sampling.top_k > 0 else size for row in rows], probs)
    ranked = ranked.masked_fill(torch.arange(size, device=probs.device) >= limits, 0.0)
    total = ranked.double().cumsum(dim=-1)
    share = _column([row.sampling.top_p for row in rows], probs)
    enough = total - ranked >= share * total[:, -1:]  # what more likely tokens hold is enough already
    enough[:, 0] = False  # a top_p so small that its share of the mass rounds to 0 keeps the most likely one, too
    return torch.zeros_like(probs).scatter_(1, order, ranked.masked_fill(enough & (share < 1), 0.0))


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """float64 [n, 1]"""
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(1)


def _logprobs(
    logits: torch.Tensor, chosen: Sequence[int], rows: Sequence[SampleRow]
) -> tuple[TokenLogprobs | None, ...]:
    asked = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    logprobs = logits[asked].float().log_softmax(dim=-1)
    most = max(rows[i].sampling.logprobs or 0 for i in asked)
    top_values, top_ids = (part.tolist() for part in logprobs.topk(min(most, logits.shape[-1]), dim=-1))
    index = torch.tensor([[chosen[i]] for i in asked], device=logits.device)
    own = logprobs.gather(1, index).squeeze(1).tolist()
    out: list[TokenLogprobs | None] = [None] * len(rows)
    for n, i in enumerate(asked):
        count = rows[i].sampling.logprobs or 0
        out[i] = TokenLogprobs((chosen[i], *top_ids[n][:count]), (own[n], *top_values[n][:count]))
    return tuple(out)
