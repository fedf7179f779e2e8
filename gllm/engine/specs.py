"""What every worker process is started with: the same for all executors, but for where things are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from gllm.config import EngineConfig, ModelInfo
from gllm.engine.control import Endpoint
from gllm.engine.executor import DRIVER, encoder_names, is_colocated
from gllm.engine.placement import Seat
from gllm.worker.launcher import Start
from gllm.worker.layout import other_ranks

ENCODER = "rserve.encoder:main"  # by name: nothing of rserve is loaded here


def worker_names(config: EngineConfig) -> list[str]:
    """All workers: the ranks in order, the first being the driver's, then the encoders."""
    return [DRIVER, *(layout.name for layout in other_ranks(config)), *encoder_names(config)]


def worker_specs(
    config: EngineConfig,
    info: ModelInfo,
    endpoint: Endpoint,
    rendezvous: str,
    seats: Sequence[Seat],
    devices: Sequence[str],
    embedding_capacity: int,
    run_dir: str | None = None,
) -> list[Start]:
    """In the order of `worker_names`, as are seats and devices. rendezvous: an init_method URL of torch.distributed.
    run_dir: None where workers share no memory."""

    def common(index: int, name: str) -> dict[str, Any]:
        keys = endpoint.keys
        own = None if keys is None else dataclasses.asdict(keys if name == DRIVER else keys.of_client())
        return {
            "name": name, "address": endpoint.address, "keys": own, "config": dataclasses.asdict(config),
            "device": devices[index], "cores": list(seats[index].cores), "threads": seats[index].threads,
        }  # fmt: skip

    names, num_ranks = worker_names(config), config.pp * config.tp
    more = {"encoders": encoder_names(config), "embedding_capacity": embedding_capacity, "run_dir": run_dir}
    specs = [Start(DRIVER, "gllm.engine.driver_process:main", common(0, DRIVER) | more | {"rendezvous": rendezvous})]
    colocated = is_colocated(config, info)
    for rank, name in enumerate(names[1:num_ranks], start=1):
        own = {"rank": rank, "rendezvous": rendezvous, "colocated": colocated}
        specs.append(Start(name, "gllm.engine.stage_process:main", common(rank, name) | own))
    for index, name in enumerate(names[num_ranks:], start=num_ranks):
        own = {"arena_rows": embedding_capacity, "hidden": info.hidden_size, "run_dir": run_dir}
        specs.append(Start(name, ENCODER, common(index, name) | own))
    return specs
