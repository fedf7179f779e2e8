"""What the environment of a worker's process says. Set before anything heavy is loaded; loads nothing itself."""

from __future__ import annotations

import fcntl
import socket
import struct

# Workers set their thread counts themselves; OpenMP threads that spin between products would eat a shared core.
QUIET = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}

SIOCGIFADDR = 0x8915  # netdevice(7)


def interface_of(address: str) -> str | None:
    """The name of this host's network interface that has the IPv4 address, if one has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, request)
            except OSError:
                continue  # no IPv4 address
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None
