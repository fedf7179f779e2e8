"""Every event that goes into a core and every decision that comes out, as JSON lines; and their replay.

The first record describes the core. Records of workers' busy times ("span") stand between, for the timeline; a replay
passes over them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gllm.core.batch import Batch, ItemRef
from gllm.core.request import Item, Request

INPUTS = (
    "on_request", "on_item_ready", "on_encoded", "on_encoder_lost", "on_batch_fed", "on_batch_done", "on_abort",
    "next_encode", "next_batch", "take_dropped",
)  # fmt: skip

Record = dict[str, Any]


class ReplayMismatch(AssertionError):
    """A fresh core decided otherwise than the log says."""


class Recorder:
    """Stands before a core and has its methods; hands each call, with its result, to `sink` as one record."""

    def __init__(self, core: Any, sink: Callable[[Record], None]) -> None:
        self._core = core
        self._sink = sink

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._core, name)
        if name not in INPUTS:
            return method

        def recorded(*args: Any) -> Any:
            *inputs, now = args
            try:
                result = method(*args)
            except ValueError as error:
                self._sink({"t": now, "e": name, "in": plain(inputs), "error": str(error)})
                raise
            if result or name != "take_dropped":  # taking nothing changes nothing, and an idle engine does it often
                self._sink({"t": now, "e": name, "in": plain(inputs), "out": plain(result)})
            return result

        # The next call of this name takes the short way.
        self.__dict__[name] = recorded
        return recorded


def replay(records: Iterable[Record], core: Any) -> Iterator[tuple[Record, Any]]:
    """Feed the logged events into a fresh core; yields (record, result) for each. Raises ReplayMismatch at the first
    result that differs."""
    for number, record in enumerate(records):
        if record["e"] not in INPUTS:
            continue
        try:
            result = getattr(core, record["e"])(*_inputs(record), record["t"])
        except ValueError as error:
            if record.get("error") != str(error):
                raise ReplayMismatch(f"record {number}: {record['e']} raised {error}, the log says {record}") from error
            continue
        if plain(result) != record.get("out"):
            raise ReplayMismatch(
                f"record {number}: {record['e']} gave {plain(result)}, the log says {record.get('out')}"
            )
        yield record, result


def batch_span(worker: str, batch: Batch, start: float, end: float) -> Record:
    """A worker was busy with a micro-batch; times in seconds on the log's clock."""
    chunks = [[chunk.request_id, chunk.start, chunk.num_tokens] for chunk in batch.chunks]
    kind = "decode" if all(chunk.num_tokens == 1 for chunk in batch.chunks) else "prefill"
    what = {"e": "span", "worker": worker, "kind": kind, "name": f"{kind} {batch.num_tokens} tokens"}
    return what | {"start": start, "end": end, "args": {"batch": batch.batch_id, "chunks": chunks}}


def encode_span(worker: str, batch_id: int, refs: Sequence[ItemRef], start: float, end: float) -> Record:
    """A worker was busy with encoding: an encoder with an encode batch, stage 0 with the items of a micro-batch."""
    tokens = sum(ref.num_tokens for ref in refs)
    what = {"e": "span", "worker": worker, "kind": "encode", "name": f"encode {tokens} tokens"}
    items = [[ref.request_id, ref.index] for ref in refs]
    return what | {"start": start, "end": end, "args": {"batch": batch_id, "items": items}}


def plain(value: Any) -> Any:
    """The value in JSON's types: dataclasses as objects, sets sorted, keys as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {key: plain(item) for key, item in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def dump(record: Record) -> str:
    """One line of the log."""
    return json.dumps(record, separators=(",", ":"))


def read(lines: Iterable[str]) -> Iterator[Record]:
    """Records of a log. A last line cut short by a crash is left out."""
    for line in lines:
        if line.endswith("\n"):
            yield json.loads(line)


def _inputs(record: Record) -> list[Any]:
    inputs = list(record["in"])
    if record["e"] == "on_request":
        fields = dict(inputs[0])
        items = tuple(Item(item["offset"], item["num_tokens"], tuple(item["grid"])) for item in fields.pop("items"))
        tokens, stops = tuple(fields.pop("token_ids")), frozenset(fields.pop("stop_token_ids"))
        inputs[0] = Request(token_ids=tokens, items=items, stop_token_ids=stops, **fields)
    elif record["e"] == "on_batch_done":
        inputs[1] = {int(request_id): token for request_id, token in inputs[1].items()}
    return inputs
