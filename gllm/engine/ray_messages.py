"""What the API process and its Ray launcher say to each other, besides Start and Exited. Loads no Ray."""

from __future__ import annotations

import msgspec

from gllm.worker.launcher import Exited, Start


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Take room: a bundle of resources for each worker, in one placement group. seconds: how long to wait for it."""

    bundles: list[dict[str, float]]
    strategy: str
    seconds: float


class TakeSeat(msgspec.Struct, frozen=True, tag=True):
    """Make an actor in the bundle of this index, once there is room."""

    name: str
    bundle: int


class End(msgspec.Struct, frozen=True, tag=True):
    """End a worker, whatever it does."""

    name: str


class Joined(msgspec.Struct, frozen=True, tag=True):
    """resources: CPU and GPU of the whole cluster."""

    resources: dict[str, float]


class Seated(msgspec.Struct, frozen=True, tag=True):
    """An actor is there. address: of its node. cores, ports: what it may use there."""

    name: str
    address: str
    pid: int
    cores: list[int]
    ports: list[int]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """There is no cluster or no room; in one line."""

    error: str


Order = Reserve | TakeSeat | Start | End
Report = Joined | Seated | Exited | Failed
