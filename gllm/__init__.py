"""gLLM: a small engine for large (multimodal) language models. Importing it loads nothing; names resolve when used."""

from __future__ import annotations

from typing import Any

_NAMES = {
    "LLM": "gllm.engine.llm",
    "SamplingParams": "gllm.sampling_params",
    "RequestOutput": "gllm.outputs",
    "EngineConfig": "gllm.config",
}
__all__ = ["LLM", "EngineConfig", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'gllm' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
