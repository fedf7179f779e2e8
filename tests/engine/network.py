"""Hosts for tests: network namespaces with addresses of their own on one bridge, each with its own /tmp and shared
memory, so that what only looks as if it were shared between machines is not."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from tests.live_server import wait_until

COMMAND_SECONDS = 60.0


class NoNetwork(Exception):
    """Why this machine lets nobody make hosts."""


@dataclass(frozen=True)
class Host:
    """namespace: of its network. keeper: a process inside that keeps its mounts."""

    namespace: str
    address: str
    keeper: subprocess.Popen[bytes]

    @property
    def prefix(self) -> tuple[str, ...]:
        """In front of a command that is to run there."""
        return ("nsenter", "-t", str(self.keeper.pid), "-m", "-n", "--")

    def run(self, *command: str, **environment: str) -> None:
        """Raises CalledProcessError or TimeoutExpired."""
        subprocess.run(
            [*self.prefix, *command], check=True, timeout=COMMAND_SECONDS, stdout=subprocess.DEVNULL,
            env={**os.environ, **environment},
        )  # fmt: skip

    def pids(self) -> list[int]:
        """Of all processes there but the keeper."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False)
        return [pid for pid in map(int, listed.stdout.split()) if pid != self.keeper.pid]

    def power_off(self) -> None:
        """All its processes end at once."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Hosts that reach each other and this process. Raises NoNetwork."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "nsenter", "unshare"))):
        raise NoNetwork("network namespaces need root, ip, nsenter and unshare")
    tag, subnet = f"rs{os.getpid()}", f"10.{64 + os.getpid() % 64}.{os.getpid() // 64 % 256}"
    bridge = f"{tag}b"
    made: list[Host] = []
    try:
        try:
            _ip("link", "add", bridge, "type", "bridge")
            _ip("addr", "add", f"{subnet}.254/24", "dev", bridge)
            _ip("link", "set", bridge, "up")
            for index in range(1, count + 1):
                made.append(_make(f"{tag}n{index}", f"{tag}v{index}", bridge, f"{subnet}.{index}"))
        except subprocess.CalledProcessError as error:
            raise NoNetwork(f"no network namespaces here: {error.stderr.strip()}") from None
        yield made
    finally:
        for host in made:
            host.power_off()
            wait_until(lambda host=host: not host.pids(), 10, "the host's processes end")
            host.keeper.kill()
            host.keeper.wait()
        for index in range(1, count + 1):
            _ip("netns", "del", f"{tag}n{index}", check=False)
        _ip("link", "del", bridge, check=False)


def _make(namespace: str, cable: str, bridge: str, address: str) -> Host:
    _ip("netns", "add", namespace)
    _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    _ip("link", "set", cable, "master", bridge, "up")
    _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
    for interface in ("eth0", "lo"):
        _ip("-n", namespace, "link", "set", interface, "up")
    tmpfs = "mount -t tmpfs tmpfs"
    # Names are looked up in vain in a network without a name server, and for long: here all are known.
    names = "\n".join((f"{address} {socket.gethostname()} {namespace}", "127.0.0.1 localhost"))
    own = f"""set -e; mount --make-rprivate /; {tmpfs} /tmp; {tmpfs} /dev/shm
        echo "$0" > /tmp/hosts; mount --bind /tmp/hosts /etc/hosts
        echo "options attempts:1 timeout:1" > /tmp/resolv.conf; mount --bind /tmp/resolv.conf /etc/resolv.conf
        echo ready; exec sleep infinity"""
    keeper = subprocess.Popen(
        ["ip", "netns", "exec", namespace, "unshare", "--mount", "sh", "-c", own, names], stdout=subprocess.PIPE
    )
    assert keeper.stdout is not None
    with keeper.stdout:
        if not keeper.stdout.readline():
            raise NoNetwork("no mount namespaces here")
    return Host(namespace, address, keeper)


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True, timeout=COMMAND_SECONDS)
