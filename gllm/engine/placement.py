"""Which cores and how many threads each worker gets, so that processes do not fight over cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gllm.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Seat:
    """cores: what the worker is bound to, empty: to nothing. threads: of its matrix products."""

    cores: tuple[int, ...]
    threads: int


@dataclass(frozen=True, slots=True)
class Placement:
    """stages: for every rank of every stage, in order; the first is the driver's."""

    stages: tuple[Seat, ...]
    encoders: tuple[Seat, ...]


def place(config: EngineConfig, cores: Sequence[int]) -> Placement:
    """An even share of the cores for every worker, those left over for the LLM's; at least one thread each. Workers are
    bound only when each can have its threads' cores for itself."""
    num_ranks, num_encoders = config.pp * config.tp, config.num_encoders
    encoder_threads = config.encoder_threads or max(1, len(cores) // (num_ranks + num_encoders))
    left = len(cores) - encoder_threads * num_encoders
    llm_threads = config.llm_threads or max(1, left // num_ranks)
    bind = config.pin_cores and llm_threads * num_ranks + encoder_threads * num_encoders <= len(cores)
    free = list(cores)

    def seat(threads: int) -> Seat:
        taken, free[:threads] = tuple(free[:threads]), []
        return Seat(taken if bind else (), threads)

    return Placement(
        tuple(seat(llm_threads) for _ in range(num_ranks)), tuple(seat(encoder_threads) for _ in range(num_encoders))
    )
