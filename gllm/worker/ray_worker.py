"""The actor in which Ray runs one worker. Loads nothing heavy before the worker's own module."""

from __future__ import annotations

import contextlib
import os
import socket
import traceback
from importlib import import_module
from typing import Any

from gllm.worker.environment import QUIET, interface_of

NICENESS = "RAY_worker_niceness"  # 0 in the environment of a Ray node that is to serve
NUM_PORTS = 2  # for the driver: its control socket, and where the ranks meet


class RayWorker:
    """`seat` says where it is; `run` is the worker's whole life. A worker that crashes takes its process, and so the
    actor, with it."""

    def __init__(self) -> None:
        # Ray lets workers wait for every other process of the host; only root may undo that (see NICENESS).
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)

    def seat(self) -> dict[str, Any]:
        """address: of this node, as Ray knows it. ports: free there, and for a minute only for who asks by number."""
        import ray

        address: str = ray.util.get_node_ip_address()
        cores = sorted(os.sched_getaffinity(0))
        return {"address": address, "pid": os.getpid(), "cores": cores, "ports": _free_ports(address, NUM_PORTS)}

    def run(self, target: str, kwargs: dict[str, Any], address: str) -> int:
        """Calls `target` ("module:function"); returns its exit code. Errors of its own end the process."""
        interface = interface_of(address)
        places = {f"{library}_SOCKET_IFNAME": interface for library in ("GLOO", "NCCL")} if interface else {}
        for name, value in (QUIET | places).items():
            os.environ.setdefault(name, value)
        module, _, function = target.partition(":")
        try:
            getattr(import_module(module), function)(**kwargs)
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else 1
        except Exception:
            traceback.print_exc()
            os._exit(1)
        return 0


def _free_ports(address: str, count: int) -> list[int]:
    """A port that a closed connection still lingers on is given to nobody who does not name it; who names it and
    reuses addresses, as servers do, gets it."""
    ports = []
    for _ in range(count):
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, 0))
            listener.listen(1)
            with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
                ports.append(listener.getsockname()[1])
                accepted.close()  # who closes first lingers
    return ports
