"""What a server's event log tells about its workers and its driver: how long each piece of work took, and the time
around it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.real.cost import Delays, encode_features, least_squares, step_features
from gllm.core.eventlog import Record

PATCH_PIXELS = 14 * 14  # Qwen2.5-VL's patches
Window = tuple[float, float]  # begin and end, seconds of the monotonic clock


@dataclass(frozen=True, slots=True)
class Work:
    """One busy span. worker: "stage" or "encoder"; kind: "encode" or "step"; features: those of `cost`."""

    worker: str
    kind: str
    features: tuple[float, ...]
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was served alone, as its client saw it. arrival, first_token: seconds of the monotonic clock."""

    arrival: float
    first_token: float
    body_bytes: int


class Log:
    """A server's event log by what belongs together. One stage."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._patches: dict[int, list[int]] = {}  # of a request's images
        self._admitted: dict[int, float] = {}
        self._ready: dict[int, float] = {}  # a request's last image
        self._steps: dict[int, Record] = {}  # next_batch, by batch
        self._encodes: dict[int, Record] = {}  # next_encode, by batch
        self._done: dict[int, float] = {}
        self._encoded: dict[int, float] = {}
        self._spans: list[Record] = []
        for record in records:
            self._take(record)
        self._spans.sort(key=lambda span: float(span["start"]))

    def _take(self, record: Record) -> None:
        event = record["e"]
        if event == "span":
            self._spans.append(record)
        elif event == "on_request" and "error" not in record:
            (request,) = record["in"]
            grids = [item["grid"] for item in request["items"]]
            self._patches[request["request_id"]] = [t * h * w for t, h, w in grids]
            self._admitted[request["request_id"]] = record["t"]
        elif event == "on_item_ready":
            request_id, _ = record["in"]
            self._ready[request_id] = max(record["t"], self._ready.get(request_id, 0.0))
        elif event == "next_batch" and record["out"]:
            self._steps[record["out"]["batch_id"]] = record
        elif event == "next_encode" and record["out"]:
            self._encodes[record["out"]["batch_id"]] = record
        elif event == "on_batch_done":
            self._done[record["in"][0]] = record["t"]
        elif event == "on_encoded":
            self._encoded[record["in"][0]] = record["t"]

    def works(self, windows: Sequence[Window]) -> Iterator[Work]:
        """Spans that began within these windows."""
        for span in self._spans:
            if not any(begin <= span["start"] <= end for begin, end in windows):
                continue
            worker, batch = span["worker"].split()[0], span["args"]["batch"]
            if span["kind"] == "encode":
                features = encode_features([self._patches[r][i] for r, i in span["args"]["items"]])
                kind = "encode"
            else:
                chunks = self._steps[batch]["out"]["chunks"]
                spans = [(chunk["start"], chunk["num_tokens"]) for chunk in chunks]
                features = step_features(spans, sum(chunk["sample"] for chunk in chunks))
                kind = "step"
            yield Work(worker, kind, features, span["start"], span["end"])

    def delays(self, asked: Sequence[Asked]) -> Delays:
        """From requests that were alone in the server. Raises ValueError when the log knows none of them: an engine
        that recovered has begun a new one."""
        windows, admit, ready, answer = [], [], [], []
        for one in asked:
            inside = [n for n, t in self._admitted.items() if one.arrival <= t <= one.first_token]
            if not inside:
                continue
            (request_id,) = inside
            windows.append((one.arrival, one.first_token))
            admitted, patches = self._admitted[request_id], self._patches[request_id]
            admit.append(((1.0, one.body_bytes), admitted - one.arrival))
            if patches:
                pixels = ((len(patches), sum(patches) * PATCH_PIXELS / 1e6), self._ready[request_id] - admitted)
                ready.append(pixels)
            answer.append(one.first_token - max(t for t in self._done.values() if t <= one.first_token))
        if not windows:
            raise ValueError("the event log has none of the requests that were asked alone")
        steps = list(self._around_steps(windows))
        return Delays(
            admit=_line(admit), ready=_line(ready), step=_mean(steps), hop=_line(list(self._around_encodes(windows))),
            answer=_mean(answer),
        )  # fmt: skip

    def _around_steps(self, windows: Sequence[Window]) -> Iterator[float]:
        """From the decision to the result, less the spans of the micro-batch."""
        busy: dict[int, float] = {}
        for span in self._spans:
            if span["worker"].startswith("stage"):
                batch = span["args"]["batch"]
                busy[batch] = busy.get(batch, 0.0) + span["end"] - span["start"]
        for batch, record in self._steps.items():
            if batch in self._done and any(begin <= record["t"] <= end for begin, end in windows):
                yield self._done[batch] - record["t"] - busy[batch]

    def _around_encodes(self, windows: Sequence[Window]) -> Iterator[tuple[tuple[float, float], float]]:
        """The same of encode batches that met an idle encoder."""
        idle_since = 0.0
        for span in self._spans:
            if not span["worker"].startswith("encoder"):
                continue
            batch = span["args"]["batch"]
            decided = self._encodes[batch]["t"]
            if idle_since <= decided and any(begin <= decided <= end for begin, end in windows):
                tokens = sum(item["num_tokens"] for item in self._encodes[batch]["out"]["items"])
                yield (1.0, tokens), self._encoded[batch] - decided - (span["end"] - span["start"])
            idle_since = span["end"]


def _line(rows: Sequence[tuple[tuple[float, float], float]]) -> tuple[float, float]:
    if not rows:
        return 0.0, 0.0
    first, second = least_squares([features for features, _ in rows], [seconds for _, seconds in rows])
    return first, second


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
