"""Rows and pixels between hosts: through sockets as they are, closed to peers without the run's keys."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from gllm.engine.control import Endpoint, Keys, connect, disconnects, listen, receive
from gllm.engine.pixel_outlet import FrameOutlet
from gllm.worker.pixels import PixelFile, PixelFrames
from rserve.transport.base import Receiver, Sender
from rserve.transport.shm import ARENA, ShmReceiver, ShmSender
from rserve.transport.wire import WireReceiver, WireSender

WAIT_MS = 5000
SILENCE_MS = 300


class Wire:
    """A driver's socket and a client's, each in a context of its own, as in two processes."""

    def __init__(self) -> None:
        self.keys = Keys.make()
        self.sockets: list[zmq.Socket[bytes]] = []
        self.driver = listen(zmq.Context(), Endpoint("tcp://127.0.0.1:*", self.keys))
        self.endpoint = Endpoint(self.driver.last_endpoint.decode(), self.keys.of_client())
        self.client = self.connect(self.endpoint)

    def connect(self, endpoint: Endpoint) -> zmq.Socket[bytes]:
        self.sockets.append(connect(zmq.Context(), endpoint, "worker"))
        return self.sockets[-1]

    def close(self) -> None:
        for socket in (self.driver, *self.sockets):
            socket.close(0)
            socket.context.term()  # not destroy: the driver's has a socket that a thread waits on

    def to_driver(self, *parts: Any) -> list[Any]:
        """What the driver hears of these parts."""
        self.client.send_multipart(parts, copy=False)
        assert self.driver.poll(WAIT_MS)
        _, *heard = receive(self.driver, 2)
        return heard

    def to_client(self, *parts: Any) -> list[Any]:
        self.driver.send_multipart([b"worker", *parts], copy=False)
        assert self.client.poll(WAIT_MS)
        return receive(self.client, 1)


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.close()


@pytest.fixture(params=["shm", "wire"])
def ends(request, tmp_path) -> Iterator[tuple[Receiver, Sender]]:
    """Both transports behind the same two protocols, with 12 rows of 5."""
    if request.param == "shm":
        receiver: Any = ShmReceiver(tmp_path / ARENA, 12, 5, torch.bfloat16)
        sender: Any = ShmSender(tmp_path / ARENA, 12, 5, torch.bfloat16)
    else:
        receiver, sender = WireReceiver(12, 5, torch.bfloat16), WireSender()
    yield receiver, sender
    sender.close()
    receiver.close()


def test_rows_arrive_as_they_were_sent_by_either_transport(ends, wire):
    receiver, sender = ends
    first, _gap, last = (receiver.allocate(4) for _ in range(3))
    receiver.free(first)
    receiver.free(last)
    place = receiver.allocate(7)
    assert len(place) == 2
    for rows in (torch.randn(7, 5).bfloat16(), torch.randn(5, 7).bfloat16().T, torch.randn(9, 5).bfloat16()[2:]):
        payload = sender.write(place, rows)
        if payload is not None:
            _, payload = wire.to_driver(b"rows", payload)
        receiver.deliver(place, payload)
        for start in range(7):
            out = torch.zeros(7 - start, 5, dtype=torch.bfloat16)
            receiver.read(place, start, out)
            assert torch.equal(out, rows[start:])
    with pytest.raises(ValueError, match="6 rows for a place of 7"):
        sender.write(place, rows[:6])
    with pytest.raises(ValueError, match="3 rows asked for, the item has 2"):
        receiver.read(place, 5, torch.zeros(3, 5, dtype=torch.bfloat16))


@pytest.mark.parametrize("num_bytes", [0, 60, 71, 80])
def test_a_payload_of_another_size_is_refused(num_bytes):
    receiver = WireReceiver(12, 5, torch.bfloat16)
    place = receiver.allocate(7)
    with pytest.raises(ValueError, match=f"{num_bytes} bytes came for a place of 70"):
        receiver.deliver(place, bytearray(num_bytes))


def test_pixels_go_to_the_driver_and_on_to_an_encoder_and_are_let_go(wire):
    outlet, store = FrameOutlet(), PixelFrames()
    pixels = np.random.default_rng(0).integers(0, 256, (112, 140, 3), dtype=np.uint8)
    message, frames = asyncio.run(outlet.put(3, 1, pixels))
    assert (message.file, message.height, message.width) == ("", 112, 140)
    _, *heard = wire.to_driver(b"pixels", *frames)
    store.put(3, 1, PixelFile("", 112, 140), heard)
    assert store.num_bytes == outlet.num_bytes == pixels.nbytes
    assert np.array_equal(store.pixels(3, 1).numpy(), pixels)
    for _ in range(2):  # as when the first encoder is lost
        _, frame = wire.to_client(b"encode", *store.frames(3, 1))
        assert bytes(frame) == pixels.tobytes()
    store.put(4, 0, PixelFile("", 14, 14), heard)
    with pytest.raises(LookupError, match="47040 bytes of pixels came for an item of 14 x 14"):
        store.pixels(4, 0)
    for request_id in (3, 4, 3, 99):
        store.drop(request_id)
        outlet.drop(request_id)
    assert store.num_bytes == outlet.num_bytes == 0
    with pytest.raises(LookupError, match="no pixels"):
        store.pixels(3, 1)


def test_a_peer_without_the_keys_gets_nothing(wire):
    assert wire.to_driver(b"hello") == [b"hello"]
    own_pair = (part.decode() for part in zmq.curve_keypair())
    other_run = Keys.make().of_client()
    for keys in (None, Keys(wire.keys.server_public, *own_pair), other_run):
        stranger = wire.connect(Endpoint(wire.endpoint.address, keys))
        stranger.send(b"let me in")
        assert not wire.driver.poll(SILENCE_MS)
        assert not stranger.poll(0)
    assert wire.to_client(b"still there") == [b"still there"]


def test_keys_do_not_show(wire):
    text = f"{wire.endpoint} {wire.keys!r} {wire.keys}"
    assert not any(key in text for key in (wire.keys.server_secret, wire.keys.client_secret, wire.keys.server_public))
    assert wire.endpoint.keys is not None
    assert wire.endpoint.keys.server_secret == ""


def test_a_broken_connection_is_noticed(wire):
    gone = disconnects(wire.client, wire.endpoint)
    assert gone is not None
    assert wire.to_driver(b"hello") == [b"hello"]
    assert not gone.poll(0)
    wire.driver.close(0)
    assert gone.poll(WAIT_MS)
    wire.client.disable_monitor()
    assert disconnects(wire.client, Endpoint("ipc:///x")) is None
