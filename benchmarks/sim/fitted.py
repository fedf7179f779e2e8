"""The two numbers that are fitted to the paper; `python -m benchmarks.figures.fit` makes the file anew."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.sim.cost import Efficiency

FILE = Path(__file__).parent / "fitted.json"


def load_efficiency() -> Efficiency:
    numbers = json.loads(FILE.read_text())
    return Efficiency(numbers["llm_efficiency"]["value"], numbers["vision_efficiency"]["value"])


def describe() -> list[str]:
    """One line for each fitted number, naming the figure that it comes from."""
    return [
        f"{name} = {entry['value']:.4f}, fitted to figure {entry['figure']}: {entry['target']}"
        for name, entry in json.loads(FILE.read_text()).items()
    ]
