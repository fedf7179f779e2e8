"""Metrics against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from benchmarks.metrics import attainment, percentile, summarise


@dataclass
class Done:
    arrival: float
    first_token: float
    finish: float
    prompt_tokens: int = 100
    output_tokens: int = 1


def test_summary_of_two_requests():
    summary = summarise([Done(1.0, 2.0, 2.0), Done(2.0, 5.0, 11.0, 300, 4)], slo=2.0)
    assert summary["ttft_mean"] == 2.0
    assert summary["e2e_mean"] == 5.0
    assert summary["seconds"] == 10.0
    assert summary["input_tokens_per_s"] == 40.0
    assert summary["output_tokens_per_s"] == 0.5
    assert summary["attainment"] == 0.5
    assert summary["goodput"] == pytest.approx(0.1)
    assert summary["tpot_mean"] == 2.0
    assert (summary["ttft_p50"], summary["ttft_p99"]) == (1.0, 3.0)


def test_percentiles_and_attainment():
    values = [float(v) for v in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (50.0, 99.0, 100.0)
    assert attainment(values, 25.0) == 0.25
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)
