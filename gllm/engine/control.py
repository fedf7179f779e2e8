"""Control sockets: a driver listens, everybody else connects.

On one host they lie in a private directory, which keeps others out. Between hosts they are TCP with CURVE: encrypted,
and closed to every peer that does not have the run's keys.
"""

from __future__ import annotations

import hmac
import threading
from dataclasses import dataclass, replace
from typing import Any

import zmq
from zmq.utils import z85

HEARTBEAT_MS = 5000  # a peer whose host is gone sends no farewell
SILENCE_MS = 20000


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """CURVE keys of one run, in Z85. All clients have the same pair; the server's secret is the driver's alone."""

    server_public: str
    client_public: str
    client_secret: str
    server_secret: str = ""

    @classmethod
    def make(cls) -> Keys:
        (public, secret), (client_public, client_secret) = zmq.curve_keypair(), zmq.curve_keypair()
        return cls(public.decode(), client_public.decode(), client_secret.decode(), secret.decode())

    def of_client(self) -> Keys:
        return replace(self, server_secret="")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the driver listens. keys: for TCP."""

    address: str
    keys: Keys | None = None


def listen(context: zmq.Context[Any], endpoint: Endpoint) -> zmq.Socket[bytes]:
    """The driver's socket. A peer without keys is not heard; it gets no answer either."""
    socket = context.socket(zmq.ROUTER)
    _unbounded(socket)
    if (keys := endpoint.keys) is not None:
        gate = context.socket(zmq.REP)
        gate.bind("inproc://zeromq.zap.01")  # where libzmq asks (ZAP, RFC 27) whom to let in
        threading.Thread(target=_let_in, args=(gate, z85.decode(keys.client_public)), daemon=True).start()
        socket.curve_server = True
        socket.curve_secretkey = keys.server_secret.encode()
        socket.curve_publickey = keys.server_public.encode()
        _watch_for_silence(socket)
    socket.bind(endpoint.address)
    return socket


def connect(context: zmq.Context[Any], endpoint: Endpoint, identity: str) -> zmq.Socket[bytes]:
    """A DEALER to the driver, which need not listen yet."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity.encode())
    _unbounded(socket)
    if (keys := endpoint.keys) is not None:
        socket.curve_serverkey = keys.server_public.encode()
        socket.curve_publickey = keys.client_public.encode()
        socket.curve_secretkey = keys.client_secret.encode()
        _watch_for_silence(socket)
    socket.connect(endpoint.address)
    return socket


def disconnects(socket: zmq.Socket[bytes], endpoint: Endpoint) -> zmq.Socket[bytes] | None:
    """A socket that becomes readable when the connection to the driver breaks: what was on the way is lost then, so a
    worker of a TCP endpoint ends and is started anew. None on one host, where a connection ends only with a process."""
    return socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) if endpoint.keys is not None else None


def receive(socket: zmq.Socket[bytes], head: int) -> list[Any]:
    """A message whole: `head` parts as bytes (on the driver's side the sender's identity comes first), then frames that
    were not copied (payloads)."""
    parts: list[Any] = [socket.recv()]
    while socket.getsockopt(zmq.RCVMORE):
        parts.append(socket.recv(copy=len(parts) < head))
    return parts


def _let_in(gate: zmq.Socket[bytes], client_key: bytes) -> None:
    """Answer for every peer that knocks; without that, anybody who knows the server's public key could come in."""
    with gate:
        try:
            while True:
                version, request_id, _, _, _, mechanism, *credentials = gate.recv_multipart()
                known = mechanism == b"CURVE" and hmac.compare_digest(credentials[0], client_key)
                verdict = (b"200", b"OK") if known else (b"400", b"unknown key")
                gate.send_multipart([version, request_id, *verdict, b"", b""])
        except zmq.ContextTerminated:
            return


def _unbounded(socket: zmq.Socket[bytes]) -> None:
    """Sending never waits and drops nothing: what is in flight is bounded by those who send."""
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


def _watch_for_silence(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
