"""What travels between the driver and the stage workers for one micro-batch. Values only; msgspec encodes them."""

from __future__ import annotations

from dataclasses import dataclass

from gllm.core.batch import Batch
from gllm.core.request import Item
from gllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What a worker must know of a request before its first chunk. `token_ids` are those known so far (prompt, and
    output tokens sampled before a preemption): penalties count the ones from `num_prompt_tokens` on as output."""

    request_id: int
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    items: tuple[Item, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class StepInput:
    """One micro-batch. `new` holds a spec for every request of `batch` that the workers do not know (never seen, or
    dropped since). `token_ids` are the batch's tokens, chunk after chunk (`batch.num_tokens` of them; item positions
    hold the placeholder id)."""

    batch: Batch
    token_ids: tuple[int, ...]
    new: tuple[RequestSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """`token_ids` and their `logprobs`: the sampled token first, then the most likely ones in falling order."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Sampled tokens, one for each chunk with `sample`, in the batch's order, as (request_id, token_id) pairs."""

    batch_id: int
    tokens: tuple[tuple[int, int], ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
