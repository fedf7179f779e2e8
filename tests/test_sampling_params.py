"""Values that parameters take, and that everything else is refused by the field's name."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from gllm.sampling_params import SamplingParams

INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs")
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in INTEGERS for value in (1.0, True, "1", np.int64(1), 2**63, -(2**63) - 1)),
        *((name, value) for name in NUMBERS for value in (True, "1", None, float("nan"), float("inf"), np.float32(1))),
        *(pytest.param(name, 10**5000, id=f"{name}-many-digits") for name in (*INTEGERS, *NUMBERS)),
        *((name, value) for name in FLAGS for value in (1, None, "yes", np.bool_(True))),
        *(("stop_token_ids", value) for value in (["1"], "12", [1.0], [True], [np.int64(1)], [2**63], 1.5)),
        *(("stop", value) for value in (["a", 1], [""], 5, ["a"] * 65, "a" * 1025, ["b", "a" * 1025])),
        ("repetition_penalty", 1e-45),
        ("repetition_penalty", 0.0099),
        ("temperature", -1e-9),
    ],
)
def test_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} ") as caught:
        SamplingParams(**{name: value})
    assert len(str(caught.value)) < 300


def test_whatever_is_accepted_survives_the_codec() -> None:
    params = SamplingParams(
        temperature=1, top_p=1, min_p=0, repetition_penalty=0.01, top_k=2**63 - 1, seed=-(2**63), max_tokens=2**63 - 1,
        min_tokens=1, logprobs=20, stop=["a" * 1024] * 64, stop_token_ids={5}, ignore_eos=True,
    )  # fmt: skip
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    assert SamplingParams(stop="end", stop_token_ids=7) == SamplingParams(stop=["end"], stop_token_ids=[7])
