"""Model and hardware descriptions by name, read from the JSON files beside this module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class UnknownName(ValueError):
    """A name that no file describes; the message lists those that are known."""


def known(kind: str) -> list[str]:
    """Names of all descriptions of a kind: "models" or "hardware"."""
    return sorted(path.stem for path in (HERE / kind).glob("*.json"))


def load(kind: str, name: str) -> dict[str, Any]:
    """The description as it stands in its file. Raises UnknownName."""
    if name not in known(kind):
        raise UnknownName(f"unknown name {name!r} in {kind}; known: {', '.join(known(kind))}")
    description: dict[str, Any] = json.loads((HERE / kind / f"{name}.json").read_text())
    return description
