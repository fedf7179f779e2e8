"""Where this process stands in the tensor-parallel and pipeline-parallel layout, and the collectives of its group.

A value that is handed to every layer that needs it; there is no global state, and one process needs no
torch.distributed. Which processes exist and how they find each other is not decided here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class Shard:
    """The part `start .. stop - 1` of a dimension of `size` that one rank holds, in a buffer of `padded` entries.

    The entries past `stop - start` stay zero: they let sizes that do not divide evenly be split exactly.
    """

    size: int
    start: int
    stop: int
    padded: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Parallel:
    """Ranks and sizes. `tp_group` is the process group of the tensor-parallel ranks, needed when `tp_size` > 1."""

    tp_rank: int = 0
    tp_size: int = 1
    tp_group: ProcessGroup | None = None
    pp_rank: int = 0
    pp_size: int = 1

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def shard(self, size: int) -> Shard:
        """This rank's part of a dimension of any size: equal parts, the last ones short and padded with zeros."""
        part = -(-size // self.tp_size)
        start = min(self.tp_rank * part, size)
        return Shard(size=size, start=start, stop=min(start + part, size), padded=part)

    def head_shard(self, num_heads: int, head_dim: int) -> Shard:
        """This rank's part of `num_heads * head_dim`, in whole heads; heads fewer than ranks are replicated.

        Raises ValueError when heads and ranks do not divide.
        """
        if max(num_heads, self.tp_size) % min(num_heads, self.tp_size):
            raise ValueError(f"{num_heads} attention heads cannot be split over {self.tp_size} tensor-parallel ranks")
        heads = max(1, num_heads // self.tp_size)
        first = self.tp_rank * num_heads // self.tp_size
        return Shard(
            size=num_heads * head_dim,
            start=first * head_dim,
            stop=(first + heads) * head_dim,
            padded=heads * head_dim,
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of `x` over the tensor-parallel ranks, in place."""
        if self.tp_size > 1:
            import torch  # only here: sizes are also asked by processes that never load torch

            torch.distributed.all_reduce(x, group=self.tp_group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, k] of every rank side by side, in rank order: [n, tp_size * k]."""
        if self.tp_size == 1:
            return x
        import torch

        parts = [torch.empty_like(x) for _ in range(self.tp_size)]
        torch.distributed.all_gather(parts, x.contiguous(), group=self.tp_group)
        return torch.cat(parts, dim=-1)


SINGLE = Parallel()


def split_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Layer ranges of the stages, as even as can be; the last stage, which also has the head, never gets an extra one.

    Raises ValueError when a stage would be empty.
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_layers} layers cannot be split over {num_stages} pipeline stages")
    size, extra = divmod(num_layers, num_stages)
    ends = [(i + 1) * size + min(i + 1, extra) for i in range(num_stages)]
    return tuple(range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True))
