"""Properties of sampling: what each parameter keeps, and that draws depend on seed and position alone."""

from __future__ import annotations

import math

import pytest
import torch

from gllm.sampling_params import SamplingParams
from gllm.worker.sampler import Sampler, SampleRow

VOCAB = 50
SAMPLER = Sampler(eos_token_ids=(2,))


def row(output: list[int] | None = None, prompt: tuple[int, ...] = (7, 8), given: int = 0, **params) -> SampleRow:
    """given: the seed that a request without one gets from the engine."""
    return SampleRow(SamplingParams(**params), (*prompt, *(output or [])), len(prompt), given)


def logits(num: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def draws(score: torch.Tensor, num: int = 400, **params) -> list[int]:
    """Tokens of many requests that differ in their seed alone."""
    tokens, _ = SAMPLER.sample(score.expand(num, VOCAB), [row(given=n, **params) for n in range(num)])
    return tokens


def test_greedy_is_the_maximum():
    scores = logits(4)
    tokens, logprobs = SAMPLER.sample(scores, [row(temperature=0.0)] * 4)
    assert tokens == scores.argmax(-1).tolist()
    assert logprobs == ()


def test_frequencies_follow_the_distribution():
    score = logits(1)
    tokens = torch.tensor(draws(score, 20000, temperature=0.8))
    seen = torch.bincount(tokens, minlength=VOCAB) / len(tokens)
    torch.testing.assert_close(seen, torch.softmax(score[0] / 0.8, -1), atol=0.015, rtol=0)


def test_top_k_keeps_the_k_most_likely():
    score = logits(1)
    assert set(draws(score, top_k=3)) == set(score[0].topk(3).indices.tolist())
    assert set(draws(score, top_k=1)) == {score[0].argmax().item()}


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    score = logits(1)
    probs, order = torch.softmax(score[0], -1).sort(descending=True)
    size = int((probs.cumsum(-1) < 0.6).sum()) + 1
    assert set(draws(score, 2000, top_p=0.6)) == set(order[:size].tolist())
    assert set(draws(score, top_p=1e-6)) == {order[0].item()}


def test_top_p_is_taken_of_what_top_k_leaves():
    score = torch.full((1, VOCAB), -20.0)
    score[0, :4] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert set(draws(score, 1000, top_k=2, top_p=0.5)) == {0}  # 0.4 / 0.7 reaches 0.5 alone
    assert set(draws(score, 1000, top_p=0.5)) == {0, 1}


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-50}, {"temperature": 1e-39}, {"temperature": 5e-324}, {"temperature": 1e-5},
        {"top_p": 5e-324}, {"top_p": 1e-320, "top_k": 1},
        {"temperature": 1e-5, "repetition_penalty": 0.01}, {"temperature": 0.0, "repetition_penalty": 0.01},
    ],
)  # fmt: skip
def test_the_smallest_values_still_pick_the_most_likely(params):
    score = logits(1)
    score[0, 7] = 30.0
    assert set(draws(score, 20, **params)) == {7}


def test_min_p_is_relative_to_the_most_likely():
    score = torch.full((1, VOCAB), -20.0)
    score[0, :4] = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(draws(score, 1000, min_p=0.4)) == {0, 1}


def test_parameters_of_one_row_leave_the_others_alone():
    scores = logits(5)
    kinds = [{"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.3}, {"temperature": 1.3, "min_p": 0.1}, {}]
    rows = [row([3, 3], given=n, logprobs=2, repetition_penalty=1 + n / 4, **kind) for n, kind in enumerate(kinds)]
    together, logprobs = SAMPLER.sample(scores, rows)
    for n in range(5):
        one, own = SAMPLER.sample(scores[n : n + 1], rows[n : n + 1])
        assert one == together[n : n + 1]
        assert own[0].token_ids == logprobs[n].token_ids
    backwards, _ = SAMPLER.sample(scores.flip(0), rows[::-1])
    assert backwards == together[::-1]


def test_draws_depend_on_seed_and_position_alone():
    scores = logits(1).expand(64, VOCAB)
    first, _ = SAMPLER.sample(scores, [row([1] * n, given=n, seed=5) for n in range(64)])
    again, _ = SAMPLER.sample(scores, [row([2] * n, prompt=(1, 2, 3), seed=5) for n in range(64)])
    other, _ = SAMPLER.sample(scores, [row([1] * n, seed=6) for n in range(64)])
    assert first == again
    assert first != other
    assert len(set(first)) > 5
    chosen, _ = SAMPLER.sample(scores, [SampleRow(SamplingParams(seed=5), (0,) * n, 0, 99) for n in range(64)])
    assert chosen == first  # the request's own seed wins over the engine's


def test_penalties():
    score = torch.zeros(1, VOCAB)
    score[0, 7], score[0, 3], score[0, 4] = 5.0, 4.9, 4.8
    greedy = {"temperature": 0.0}

    def pick(output: list[int], **params) -> int:
        return SAMPLER.sample(score, [row(output, prompt=(7,), **greedy, **params)])[0][0]

    assert pick([]) == 7
    assert pick([], presence_penalty=2.0) == 7  # output tokens only, not the prompt's
    assert pick([7], presence_penalty=0.15) == 3
    assert pick([7, 7, 3], frequency_penalty=0.08) == 7
    assert pick([7, 7, 7], frequency_penalty=0.05) == 3
    assert pick([], repetition_penalty=1.03) == 3  # prompt tokens count
    assert pick([3], repetition_penalty=1.05) == 4


def test_repetition_penalty_makes_negative_logits_smaller():
    score = torch.full((1, VOCAB), -1.0)
    score[0, 5] = -0.9
    token, _ = SAMPLER.sample(score, [row([5], temperature=0.0, repetition_penalty=1.5)])
    assert token != [5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_bans_eos_and_stop_tokens(temperature):
    score = torch.full((1, VOCAB), -5.0)
    score[0, 2], score[0, 9], score[0, 4] = 20.0, 19.0, 18.0
    common = {"temperature": temperature, "min_tokens": 2, "stop_token_ids": (9,)}
    assert SAMPLER.sample(score, [row([], **common)])[0] == [4]
    assert SAMPLER.sample(score, [row([1], **common)])[0] == [4]
    assert SAMPLER.sample(score, [row([1, 1], temperature=0.0, min_tokens=2)])[0] == [2]


def test_logprobs_are_those_of_the_raw_distribution():
    scores = logits(3)
    kinds = [
        row(temperature=0.0, logprobs=2, presence_penalty=1.0),
        row(temperature=0.5),
        row(temperature=2.0, logprobs=0),
    ]
    tokens, logprobs = SAMPLER.sample(scores, kinds)
    raw = scores.log_softmax(-1)
    best = raw[0].topk(2)
    assert logprobs[0].token_ids == (tokens[0], *best.indices.tolist())
    assert logprobs[0].logprobs == pytest.approx((raw[0, tokens[0]].item(), *best.values.tolist()), abs=1e-5)
    assert logprobs[1] is None
    assert logprobs[2].token_ids == (tokens[2],)
    assert math.isclose(logprobs[2].logprobs[0], raw[2, tokens[2]].item(), abs_tol=1e-5)
