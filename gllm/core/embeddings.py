"""Accounting of item embeddings, in tokens. Their bytes live in stage 0 and in the encoders."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EmbeddingStats:
    """Item tokens: held (encoded, not yet prefilled), the most ever held, being encoded, and room in all."""

    held: int
    peak_held: int
    encoding: int
    capacity: int


class EmbeddingPool:
    """Room for the embeddings of `capacity` item tokens. used <= capacity, always."""

    __slots__ = ("capacity", "peak", "used")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.peak = 0

    def fits(self, num_tokens: int) -> bool:
        return self.used + num_tokens <= self.capacity

    def reserve(self, num_tokens: int) -> None:
        """Raises ValueError when there is no room: callers ask `fits` first."""
        if not self.fits(num_tokens):
            raise ValueError(f"{num_tokens} embedding tokens wanted, {self.capacity - self.used} free")
        self.used += num_tokens
        self.peak = max(self.peak, self.used)

    def release(self, num_tokens: int) -> None:
        if num_tokens > self.used:
            raise ValueError(f"{num_tokens} embedding tokens released, {self.used} in use")
        self.used -= num_tokens
