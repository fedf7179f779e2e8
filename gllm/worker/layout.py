"""Which ranks there are, what they are called, and which layers each stage has. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from gllm.config import EngineConfig, ModelInfo
from gllm.errors import StartupError
from gllm.layers.parallel import split_layers


@dataclass(frozen=True, slots=True)
class Layout:
    """pp stages of tp ranks each, and which of them this process is. Ranks count through the tensor-parallel ranks of
    stage 0, then those of stage 1, and so on."""

    pp: int = 1
    tp: int = 1
    rank: int = 0

    @property
    def world_size(self) -> int:
        return self.pp * self.tp

    @property
    def stage(self) -> int:
        return self.rank // self.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def name(self) -> str:
        """The name of the rank's process."""
        return f"stage {self.stage}" if self.tp_rank == 0 else f"stage {self.stage} rank {self.tp_rank}"


def other_ranks(config: EngineConfig) -> list[Layout]:
    """All ranks but the first, which is the driver's."""
    return [Layout(config.pp, config.tp, rank) for rank in range(1, config.pp * config.tp)]


def stage_layers(config: EngineConfig, info: ModelInfo) -> tuple[range, ...]:
    """The layers of every stage: as --assigned-layers says, else as even as can be. Raises StartupError."""
    if config.assigned_layers is None:
        try:
            return split_layers(info.num_layers, config.pp)
        except ValueError as error:
            raise StartupError(f"{error}: lower --pp") from None
    try:
        counts = [int(part) for part in config.assigned_layers.split(",")]
    except ValueError:
        raise StartupError("--assigned-layers takes a count for each stage, as 7,7,8,6") from None
    if len(counts) != config.pp or sum(counts) != info.num_layers or min(counts) < 1:
        raise StartupError(
            f"--assigned-layers {config.assigned_layers} does not give {info.num_layers} layers to {config.pp} stages, "
            "at least one each"
        )
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))
