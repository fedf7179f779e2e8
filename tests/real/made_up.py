"""Outcomes and results that nobody measured, for tests of what is computed from them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.real.client import Outcome
from benchmarks.results import Result


def outcome(arrival: float, ttft: float, decode: float = 0.0, tokens: int = 1, **fields: Any) -> Outcome:
    first = arrival + ttft
    times = {"sent": arrival, "first_token": first, "finish": first + decode}
    return Outcome(arrival, 1, prompt_tokens=100, output_tokens=tokens, **{**times, **fields})


def result(system: str, rate: float, seed: int, ttft: float, **config: Any) -> Result:
    body = {
        "requests": 4,
        "failed": 0,
        "summary": {"ttft_mean": ttft, "ttft_p90": ttft, "input_tokens_per_s": 100.0, "attainment": 1.0},
        "outcomes": [asdict(outcome(number / rate, ttft)) for number in range(4)],
    }
    fields = {"system": system, "devices": "2 cores", "rate": rate, **config}
    return Result(
        kind="measured", name=f"{system}-{rate}-{seed}", config=fields, seed=seed, commit="", machine="", body=body
    )
