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


def place(config: EngineConfig, cores: Sequence[int], num_ranks: int, num_encoders: int) -> list[Seat]:
    """Seats of the ranks and then of the encoders that run on one host: an even share of its cores for every worker,
    those left over for the LLM's; at least one thread each. Workers are bound only when each can have its threads'
    cores for itself."""
    encoder_threads = config.encoder_threads or max(1, len(cores) // (num_ranks + num_encoders))
    left = len(cores) - encoder_threads * num_encoders
    llm_threads = config.llm_threads or max(1, left // max(1, num_ranks))
    bind = config.pin_cores and llm_threads * num_ranks + encoder_threads * num_encoders <= len(cores)
    free = list(cores)

    def seat(threads: int) -> Seat:
        taken, free[:threads] = tuple(free[:threads]), []
        return Seat(taken if bind else (), threads)

    return [seat(llm_threads) for _ in range(num_ranks)] + [seat(encoder_threads) for _ in range(num_encoders)]
