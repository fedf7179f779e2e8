"""What processes say to each other: typed structs, encoded as msgpack. No pickle on any socket."""

from __future__ import annotations

from typing import Any

import msgspec

from gllm.core.request import Request
from gllm.sampling_params import SamplingParams
from gllm.worker.step import StepInput, StepOutput, TokenLogprobs


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The tag names the type; fields travel by position."""


# ---- API process -> driver ------------------------------------------------------------------------------------------


class AddRequest(Message):
    """A laid-out request; its pixels follow."""

    request: Request
    sampling: SamplingParams


class ItemPixels(Message):
    """Pixels of an item, uint8 [height, width, 3]: in this file of the run directory; "": in the frame that follows."""

    request_id: int
    index: int
    file: str
    height: int
    width: int


class Abort(Message):
    """The client left, or a stop string ended the output."""

    request_id: int


class WorkerLost(Message):
    """This worker process has ended and writes no more."""

    name: str


class GetStatus(Message):
    """Answered with Status; `probe`: after asking every worker for a sign of life."""

    query: int
    probe: bool = False


class Shutdown(Message):
    """Finish nothing, end now."""


# ---- driver -> API process ------------------------------------------------------------------------------------------


class DriverReady(Message):
    """All workers are up. num_kv_tokens and embedding_capacity: what the pools hold, in tokens."""

    num_kv_tokens: int
    embedding_capacity: int


class Output(msgspec.Struct, frozen=True, array_like=True):
    """One output token of a request."""

    request_id: int
    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: str | None


class Outputs(Message):
    """The tokens of one micro-batch."""

    outputs: tuple[Output, ...]


class Refused(Message):
    """The request is over without (further) output. retry: it may succeed later (503), else it is wrong (400)."""

    request_id: int
    message: str
    retry: bool


class WorkerHung(Message):
    """A worker has work but gave no sign of life for too long: end it."""

    name: str


class Status(Message):
    """workers: name -> "ok" or what is wrong. gauges: counts at this moment."""

    query: int
    workers: dict[str, str]
    gauges: dict[str, float]


# ---- driver <-> the other stages and ranks -----------------------------------------------------------------------


class MakeCache(Message):
    """All workers are up: this is the size of the KV pool."""

    num_blocks: int


class RunStep(Message):
    """The next micro-batch; hidden states come from the stage before."""

    step: StepInput


class Forget(Message):
    """These requests are gone, and no micro-batch will say so soon."""

    request_ids: tuple[int, ...]


class StepDone(Message):
    """A micro-batch has left the first rank of a stage. start, end: seconds on its host's monotonic clock."""

    batch_id: int
    start: float
    end: float
    output: StepOutput | None


# ---- driver <-> encoder ---------------------------------------------------------------------------------------------


class Hello(Message):
    """A worker is up. error: it cannot start, in one line. kv_blocks: what a stage has room for."""

    name: str
    pid: int
    error: str | None = None
    kv_blocks: int = 0


class EncodeItem(msgspec.Struct, frozen=True, array_like=True):
    """One item to encode. file: as in ItemPixels. place: where its rows go, in the transport's own terms."""

    file: str
    height: int
    width: int
    grid: tuple[int, int, int]
    place: tuple[tuple[int, int], ...]


class Encode(Message):
    """An encode batch; where the pixels are in frames, one for each item follows."""

    batch_id: int
    items: tuple[EncodeItem, ...]


class Encoded(Message):
    """The rows of an encode batch are in place, or in frames that follow, one for each item (empty for one with an
    error). start, end: seconds on the host's monotonic clock. errors: why an item (by position in the batch) could not
    be encoded."""

    batch_id: int
    start: float
    end: float
    errors: dict[int, str]


class Ping(Message):
    """Asks for a Pong at once, whatever the worker is doing."""


class Pong(Message):
    """A sign of life."""


ToDriver = AddRequest | ItemPixels | Abort | WorkerLost | GetStatus | Shutdown | Hello | StepDone | Encoded | Pong
ToApi = DriverReady | Outputs | Refused | WorkerHung | Status | Hello
ToStage = MakeCache | RunStep | Forget | Ping | Shutdown
ToEncoder = Encode | Ping | Shutdown


class Codec:
    """Encodes any message, decodes those of one direction."""

    def __init__(self, incoming: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(incoming)

    def encode(self, message: Message) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: bytes) -> Any:
        """Raises msgspec.DecodeError (a ValueError) for anything else."""
        return self._decoder.decode(data)
