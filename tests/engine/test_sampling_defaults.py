"""What a checkpoint recommends is taken over, and a recommendation that makes no sense stops the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from gllm.engine.sampling_defaults import sampling_defaults
from gllm.errors import StartupError


def test_a_checkpoint_without_recommendations(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}


def test_recommendations_are_taken_over(tmp_path: Path) -> None:
    saved = '{"do_sample": true, "temperature": 0.1, "top_k": 1, "top_p": null, "eos_token_id": [1], "bos_token_id": 2}'
    (tmp_path / "generation_config.json").write_text(saved)
    assert sampling_defaults(tmp_path) == {"temperature": 0.1, "top_k": 1}


def test_a_checkpoint_that_is_not_meant_to_be_sampled_is_greedy(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.7}')
    assert sampling_defaults(tmp_path) == {"temperature": 0.0}


@pytest.mark.parametrize("saved", ["{", "[]", '{"temperature": -1}', '{"temperature": "hot"}'])
def test_nonsense_is_named(tmp_path: Path, saved: str) -> None:
    (tmp_path / "generation_config.json").write_text(saved)
    with pytest.raises(StartupError, match=r"generation_config\.json"):
        sampling_defaults(tmp_path)
