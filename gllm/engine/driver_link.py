"""What stages and encoders have in common: a worker process's connection to the driver, from Hello to the end."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import zmq

from gllm.engine.control import Endpoint, Keys, connect, disconnects, receive
from gllm.engine.messages import Codec, Hello, Message, Ping, Pong, Shutdown
from gllm.errors import StartupError
from gllm.worker.process import Compute


class DriverLink:
    """incoming: the messages that the driver sends to such a worker (`messages.ToStage`, ...)."""

    def __init__(self, name: str, address: str, keys: dict[str, str] | None, incoming: Any) -> None:
        self._name = name
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._endpoint = Endpoint(address, Keys(**keys) if keys else None)
        self._socket = connect(self._context, self._endpoint, f"{name}.{os.getpid()}")
        self._codec = Codec(incoming)

    def send(self, message: Message, payloads: Sequence[Any] = ()) -> None:
        """payloads: frames that travel behind the message; not copied."""
        self._socket.send_multipart([self._codec.encode(message), *payloads], copy=not payloads)

    def hello(self, kv_blocks: int = 0) -> None:
        self.send(Hello(self._name, os.getpid(), None, kv_blocks))

    @contextmanager
    def loading(self) -> Iterator[None]:
        """A StartupError in it is told to the driver, and ends the process."""
        try:
            yield
        except StartupError as error:
            self.send(Hello(self._name, os.getpid(), str(error)))
            self._context.term()
            raise SystemExit(1) from None

    def compute(self) -> Compute:
        """The thread that computes. A job that raises ends the process: the driver starts a new one."""
        return Compute(self._context, self._name, self._crash)

    def serve(
        self, compute: Compute, on_message: Callable[[Any, list[Any]], None], on_result: Callable[[Any], None]
    ) -> None:
        """Until the driver says Shutdown. on_message: gets each message and its frames; pings are answered here.
        on_result: gets what the thread posted. An error ends the process, as does a broken connection: what was on
        the way is lost then."""
        try:
            self._serve(compute, on_message, on_result)
        except ConnectionError as error:
            print(f"{self._name}: {error}", flush=True)
            os._exit(1)
        except Exception:
            traceback.print_exc()
            os._exit(1)

    def _serve(
        self, compute: Compute, on_message: Callable[[Any, list[Any]], None], on_result: Callable[[Any], None]
    ) -> None:
        gone = disconnects(self._socket, self._endpoint)
        poller = zmq.Poller()
        for socket in (self._socket, compute.socket, gone):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if gone in ready and self._socket not in ready:
                raise ConnectionError("the connection to the driver is broken")
            if compute.socket in ready:
                on_result(compute.take())
            if self._socket not in ready:
                continue
            data, *frames = receive(self._socket, 1)
            match self._codec.decode(data):
                case Ping():
                    self.send(Pong())
                case Shutdown():
                    return
                case message:
                    on_message(message, frames)

    def _crash(self, trace: str) -> None:
        print(f"{self._name} failed:\n{trace}", flush=True)
        os._exit(1)
