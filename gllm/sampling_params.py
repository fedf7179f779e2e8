"""How the next token is chosen and when an output ends; names and defaults follow vLLM's SamplingParams."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

MIN_TEMPERATURE = 1e-5  # below, dividing by it overflows, and the distribution has all its mass on one token anyway
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """temperature 0 (below 1e-5) is greedy. top_k 0 or -1 keeps all tokens. seed makes the draws of this request
    reproducible whatever it is batched with. logprobs: number of most likely tokens to report at each output position
    (the chosen token is always among the reported). stop: strings that end the text (left out of it). stop_token_ids
    end it too.

    Raises ValueError, naming the field, when a value is out of range or not of its type.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, kind in (("stop", str), ("stop_token_ids", int)):
            value = getattr(self, name)
            if isinstance(value, kind):
                value = (value,)
            if not (value is None or isinstance(value, list | tuple | set | frozenset)):
                raise ValueError(f"{name} must be a list, got {_shown(value)}")
            object.__setattr__(self, name, tuple(value or ()))
        # Parameters travel between processes: what the codec does not carry has to be refused here.
        for rule, fits, names in _TYPES:
            for name in names:
                if not fits(getattr(self, name)):
                    raise ValueError(f"{name} must be {rule}, got {_shown(getattr(self, name))}")
        checks = [
            ("n", self.n == 1, "only 1 is supported"),
            ("temperature", 0.0 <= self.temperature <= 2.0, "must be in [0, 2]"),
            ("top_p", 0.0 < self.top_p <= 1.0, "must be in (0, 1]"),
            ("top_k", self.top_k >= -1, "must be -1, 0 (all tokens) or a positive count"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "must be in [0, 1]"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "must be in [-2, 2]"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "must be in [-2, 2]"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 2.0, "must be in [0.01, 2]"),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "must be non-empty strings"),
            ("stop", len(self.stop) <= MAX_STOPS, f"must be at most {MAX_STOPS} strings"),
            (
                "stop",
                all(len(str(s)) <= MAX_STOP_LENGTH for s in self.stop),
                f"allows {MAX_STOP_LENGTH:,} characters each",
            ),
            ("stop_token_ids", all(map(_is_int, self.stop_token_ids)), "must be integers of 64 bits"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "must be at least 1"),
            ("min_tokens", self.min_tokens >= 0, "must be at least 0"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "must be between 0 and 20"),
        ]
        for name, ok, rule in checks:
            if not ok:
                raise ValueError(f"{name} {rule}, got {_shown(getattr(self, name))}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE


def _is_int(value: object) -> bool:
    """A plain one (no bool, no numpy scalar) that fits in 64 bits with its sign."""
    return type(value) is int and -(2**63) <= value < 2**63


def _is_number(value: object) -> bool:
    return _is_int(value) or (type(value) is float and math.isfinite(value))


_TYPES: tuple[tuple[str, Callable[[object], bool], tuple[str, ...]], ...] = (
    ("an integer of 64 bits", _is_int, ("n", "top_k", "min_tokens")),
    ("an integer of 64 bits", lambda value: value is None or _is_int(value), ("seed", "max_tokens", "logprobs")),
    (
        "a finite number",
        _is_number,
        ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    ),
    (
        "true or false",
        lambda value: type(value) is bool,
        ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
    ),
)


def _shown(value: object) -> str:
    try:
        return f"{value!r:.100}"
    except ValueError:  # the interpreter refuses to print integers of thousands of digits
        return "an integer of very many digits"
