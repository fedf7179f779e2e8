"""Draws an event log as a Chrome trace (opens in Perfetto and chrome://tracing).

python -m gllm.core.timeline events.jsonl trace.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gllm.core.eventlog import Record, read

MICROSECONDS = 1e6


def trace(records: Iterable[Record]) -> dict[str, Any]:
    """Chrome's trace format: a row for each worker with its busy spans, and marks for requests that come and go."""
    rows: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    start = None
    for record in records:
        if start is None and "t" in record:
            start = record["t"]
        origin = start or 0.0
        if record["e"] == "span":
            row = rows.setdefault(record["worker"], len(rows) + 1)
            events.append(
                {
                    "name": record["name"],
                    "cat": record["kind"],
                    "ph": "X",
                    "pid": 1,
                    "tid": row,
                    "ts": (record["start"] - origin) * MICROSECONDS,
                    "dur": (record["end"] - record["start"]) * MICROSECONDS,
                    "args": record["args"],
                }
            )
        elif record["e"] in ("on_request", "on_item_ready", "on_abort"):
            what = record["in"][0]["request_id"] if record["e"] == "on_request" else record["in"]
            events.append(
                {"name": f"{record['e'][3:]} {what}", "ph": "i", "s": "g", "pid": 1, "tid": 0}
                | {"ts": (record["t"] - origin) * MICROSECONDS}
            )
    names = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": row, "args": {"name": name}} for name, row in rows.items()
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        print("usage: python -m gllm.core.timeline EVENTS.jsonl TRACE.json", file=sys.stderr)
        return 2
    with Path(argv[0]).open() as lines:
        result = trace(read(lines))
    Path(argv[1]).write_text(json.dumps(result))
    print(f"{len(result['traceEvents'])} trace events in {argv[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
