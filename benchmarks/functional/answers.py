"""Result files of Table 1: who answered how many questions rightly, and whether all gave the same answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.results import Result

FIGURE = "table1"
# Keyword arguments of `LLM` for each scheme.
SCHEMES: dict[str, dict[str, Any]] = {
    "gllm": {},
    "gllm-epd": {"encoders": 1},
    "rserve-intra": {"rserve": True, "inter_request_batching": False},
    "rserve": {"rserve": True},
}


def digest(answers: Sequence[str]) -> str:
    """Equal for equal answers in equal order."""
    return hashlib.sha256(json.dumps(list(answers)).encode()).hexdigest()[:16]


def write(
    folder: Path, system: str, dataset: str, answers: Sequence[str], right: Sequence[bool], *, seed: int,
    config: dict[str, Any], **body: Any,
) -> Path:  # fmt: skip
    """One system's answers. body: what else is worth keeping."""
    return results.write(
        folder,
        Result(
            kind="measured",
            name=f"table1-{_slug(dataset)}-{system}",
            config={"figure": FIGURE, "system": system, "dataset": dataset, **config},
            seed=seed,
            commit=results.commit(),
            machine=results.this_machine(),
            body={
                "questions": len(answers),
                "correct": sum(right),
                "accuracy": sum(right) / len(right),
                "answers_digest": digest(answers),
                **body,
            },
        ),
    )


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.lower())
