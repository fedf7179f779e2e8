"""What an iteration of the driver costs without any model: schedule, dispatch and bookkeeping of the core.

python -m benchmarks.real.driver_cost                  # 64 running, 1,000 and 10,000 waiting, a JSON line
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

from gllm.core.policy import FixedBudget
from gllm.core.request import Item, Request
from gllm.core.scheduler import SchedulerConfig
from rserve.config import RServeConfig
from rserve.core.orchestrator import Orchestrator

TEXT, ITEM = 20, 1024  # tokens


def waiting_request(request_id: int, num_items: int) -> Request:
    items = tuple(Item(TEXT + i * (ITEM + 2), ITEM, (1, 64, 64)) for i in range(num_items))
    return Request(request_id, (0,) * (TEXT + num_items * (ITEM + 2)), items, 10)


def iterations(waiting: int, args: argparse.Namespace) -> list[float]:
    """Microseconds of each iteration. The pixels of all items are there; encoders answer at once."""
    scheduler = SchedulerConfig(num_blocks=200_000, max_num_seqs=128, max_in_flight=4)
    config = RServeConfig(embedding_capacity=10**6, min_chunk_tokens=64)
    core = Orchestrator(scheduler, FixedBudget(2048), config)
    for i in range(args.running):
        core.on_request(Request(i, tuple(range(8)), (), 10_000), 0.0)
    start_running(core)
    for i in range(waiting):
        core.on_request(waiting_request(args.running + i, args.items), 0.0)
        for index in range(args.items):
            core.on_item_ready(args.running + i, index, 0.0)
    times = []
    for _ in range(args.iterations):
        start = time.perf_counter()
        batch = core.next_batch(0.0)
        encode = core.next_encode(0, 0.0)
        if encode is not None:
            core.on_encoded(encode.batch_id, 0.0)
        core.on_batch_fed(batch.batch_id, 0.0)
        core.take_released()
        core.on_batch_done(batch.batch_id, {c.request_id: 5 for c in batch.chunks if c.sample}, 0.0)
        times.append((time.perf_counter() - start) * 1e6)
    return times


def start_running(core: Orchestrator) -> None:
    batch = core.next_batch(0.0)
    core.on_batch_done(batch.batch_id, {c.request_id: 5 for c in batch.chunks if c.sample}, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=64, help="requests that decode")
    parser.add_argument("--waiting", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--items", type=int, default=20, help="of each waiting request")
    parser.add_argument("--iterations", type=int, default=500)
    args = parser.parse_args()
    medians = {waiting: statistics.median(iterations(waiting, args)) for waiting in args.waiting}
    first = medians[args.waiting[0]]
    figures = {
        "iteration_us": {str(waiting): round(value, 1) for waiting, value in medians.items()},
        "ratio_to_first": {str(waiting): round(value / first, 3) for waiting, value in medians.items()},
    }
    machine = {"python": platform.python_version(), "arch": platform.machine()}
    print(json.dumps({"benchmark": "driver_cost", "kind": "measured", **vars(args), **figures, **machine}))


if __name__ == "__main__":
    main()
