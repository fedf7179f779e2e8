"""The sampling that a checkpoint's authors recommend, for requests that do not say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gllm.errors import StartupError
from gllm.sampling_params import SamplingParams

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(checkpoint: Path) -> dict[str, Any]:
    """SamplingParams fields from generation_config.json, where there is one; `do_sample` false is temperature 0.

    Raises StartupError when a value cannot be used.
    """
    path = checkpoint / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        values = {name: saved[name] for name in _FIELDS if saved.get(name) is not None}
        if saved.get("do_sample") is False:
            values["temperature"] = 0.0
        SamplingParams(**values)
    except (ValueError, TypeError, AttributeError) as error:
        raise StartupError(f"generation_config.json: {error}; --generation-config none leaves it out") from None
    return values
