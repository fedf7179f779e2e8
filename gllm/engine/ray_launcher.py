"""The process that starts workers on a Ray cluster and reports their end.

    python -m gllm.engine.ray_launcher FD NUM_WORKERS

It speaks with its owner over FD, as `gllm.worker.launcher` does. A process of its own, so that Ray's threads, signal
handlers and output stay out of the API process, and so that all actors end when either of the two does.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import Any

import msgspec
import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gllm.config import usable_cores
from gllm.engine.ray_messages import End, Failed, Joined, Order, Reserve, Seated, TakeSeat
from gllm.worker.launcher import Exited, Lines, Start
from gllm.worker.ray_worker import NICENESS, RayWorker

KNOCK_SECONDS = 5.0
END_SECONDS = 3.0  # what workers get to end by themselves
LOCAL_STORE_BYTES = 100 << 20  # of a Ray that is started here: no objects go through it


class RayLauncher:
    """Each order runs in a task of its own; a worker is started once it is seated."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._group: PlacementGroup | None = None
        self._actors: dict[str, Any] = {}
        self._seats: dict[str, Seated] = {}
        self._has_room = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._runs: set[asyncio.Task[None]] = set()

    def tell(self, message: msgspec.Struct) -> None:
        if not self._writer.is_closing():
            self._writer.write(Lines.encode(message))

    def obey(self, order: Any) -> None:
        task = asyncio.get_running_loop().create_task(self._obey(order))
        for tasks in (self._tasks, self._runs) if isinstance(order, Start) else (self._tasks,):
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def close(self) -> None:
        """Workers that were told to end do so now; the others are ended."""
        if self._runs:
            await asyncio.wait(self._runs, timeout=END_SECONDS)
        for name in list(self._actors):
            self._end(name)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)

    async def _obey(self, order: Any) -> None:
        match order:
            case Reserve():
                await self._reserve(order)
            case TakeSeat():
                await self._seat(order)
            case Start():
                await self._run(order)
            case End(name):
                self._end(name)

    async def _reserve(self, order: Reserve) -> None:
        self._group = placement_group(order.bundles, strategy=order.strategy)
        if not await asyncio.to_thread(self._group.wait, order.seconds):
            self.tell(Failed(f"the Ray cluster had no room for all workers within {order.seconds:g} seconds"))
        else:
            self._has_room.set()

    async def _seat(self, order: TakeSeat) -> None:
        await self._has_room.wait()
        assert self._group is not None
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=order.bundle)
        resources = self._group.bundle_specs[order.bundle]
        actor_class: Any = ray.remote(RayWorker)
        actor = actor_class.options(
            num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0), scheduling_strategy=strategy,
            max_restarts=0, max_task_retries=0,
        ).remote()  # fmt: skip
        self._actors[order.name] = actor
        try:
            seat = Seated(name=order.name, **await actor.seat.remote())
        except ray.exceptions.RayError as error:
            self._exited(order.name, actor, 0, _first_line(error))
            return
        if self._actors.get(order.name) is actor:
            self._seats[order.name] = seat
            self.tell(seat)

    async def _run(self, order: Start) -> None:
        actor, seat = self._actors.get(order.name), self._seats.get(order.name)
        if actor is None or seat is None:
            return  # lost meanwhile, and reported
        try:
            status = await actor.run.remote(order.target, order.kwargs, seat.address)
            how = f"status {status}"
        except ray.exceptions.RayError as error:
            how = _first_line(error)
        self._exited(order.name, actor, seat.pid, how)

    def _end(self, name: str) -> None:
        """Its node may be out of reach: whatever becomes of the process, it counts as ended."""
        actor, seat = self._actors.get(name), self._seats.get(name)
        if actor is not None:
            self._exited(name, actor, seat.pid if seat else 0, "a kill")

    def _exited(self, name: str, actor: Any, pid: int, how: str) -> None:
        if self._actors.get(name) is actor:
            del self._actors[name]
            self._seats.pop(name, None)
            ray.kill(actor)
            self.tell(Exited(name, pid, how))


def join(num_workers: int) -> dict[str, float]:
    """Join the cluster that RAY_ADDRESS names or that runs on this host, or start one here; what it has. Raises
    ConnectionError or RuntimeError, which say why not. num_workers: fit into one that is started here, as they do
    without Ray."""
    _knock(os.environ.get("RAY_ADDRESS", ""))
    quiet = {"log_to_driver": True, "logging_level": "error", "configure_logging": True}
    try:
        ray.init(address="auto", **quiet)
    except ConnectionError:
        if os.environ.get("RAY_ADDRESS"):
            raise
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", NICENESS: "0"}
        own = {"num_cpus": max(num_workers, len(usable_cores())), "object_store_memory": LOCAL_STORE_BYTES}
        ray.init(address="local", include_dashboard=False, **own, **quiet)
    return {name: float(count) for name, count in ray.cluster_resources().items() if name in ("CPU", "GPU")}


def _knock(address: str) -> None:
    """Ray itself would try for minutes. Raises ConnectionError when nobody answers at host:port."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=KNOCK_SECONDS).close()
        except OSError as error:
            raise ConnectionError(f"RAY_ADDRESS {address} does not answer ({error})") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


async def serve(owner: socket.socket, num_workers: int) -> None:
    """Until the owner is gone."""
    reader, writer = await asyncio.open_connection(sock=owner)
    launcher, lines = RayLauncher(writer), Lines(Order)
    joining = asyncio.create_task(asyncio.to_thread(join, num_workers))
    data = asyncio.create_task(reader.read(1 << 16))
    await asyncio.wait((joining, data), return_when=asyncio.FIRST_COMPLETED)
    if not joining.done():
        os._exit(1)  # given up before the cluster was there; what Ray has started here ends with this process
    try:
        launcher.tell(Joined(joining.result()))
    except Exception as error:
        launcher.tell(Failed(f"no Ray cluster could be joined or started: {_first_line(error)}"))
    try:
        while received := await data:
            for order in lines.feed(received):
                launcher.obey(order)
            data = asyncio.create_task(reader.read(1 << 16))
    except ConnectionError:
        pass  # gone while it was told something
    await launcher.close()


def main() -> None:
    owner = socket.socket(fileno=int(sys.argv[1]))
    os.dup2(2, 1)  # workers' output belongs into the log
    asyncio.run(serve(owner, int(sys.argv[2])))
    ray.shutdown()


if __name__ == "__main__":
    main()
