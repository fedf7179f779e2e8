"""Load for any OpenAI-compatible server: random images at Poisson or recorded times; prints one JSON object.

    python -m benchmarks.real.load --url http://127.0.0.1:8000 --rate 2 --requests 50
    python -m benchmarks.real.load --url http://127.0.0.1:8000 --trace arrivals.txt --images 1 8 --max-tokens 16

Open loop: a request leaves at its time, however many are unanswered. Latencies count from the time it was due.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from benchmarks import results, workloads
from benchmarks.real.client import check_url, run
from benchmarks.real.requests import Mix, prepare

MAX_REQUESTS = 10_000


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        url = check_url(args.url, args.allow_host)
        mix = Mix(images=tuple(args.images), side=tuple(args.sides), text=tuple(args.text))
        arrivals = read_arrivals(args)
        shapes = mix.shapes(arrivals, args.seed, args.max_tokens)
        model = args.model or served_model(url, args.api_key)
        requests = prepare(shapes, model, args.seed, logprobs=args.logprobs)
        body = run(url, requests, slo=args.slo, max_seconds=args.max_seconds, api_key=args.api_key)
    except (ValueError, OSError, httpx.HTTPError) as error:
        print(f"load: {error}", file=sys.stderr)
        return 1
    config = {name: value for name, value in vars(args).items() if name not in ("api_key", "out")} | {"model": model}
    answer = {"benchmark": "load", "kind": "measured", "machine": results.this_machine(), "config": config, **body}
    text = json.dumps(answer if args.outcomes else {k: v for k, v in answer.items() if k != "outcomes"}, default=str)
    if args.out:
        args.out.write_text(text + "\n")
    print(text)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mix = Mix()
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server, without /v1")
    parser.add_argument("--allow-host", action="append", default=[], help="a host other than this machine; repeatable")
    parser.add_argument("--api-key")
    parser.add_argument("--model", help="default: the first that the server names")
    parser.add_argument("--rate", type=float, help="requests a second (Poisson)")
    parser.add_argument("--trace", type=Path, help="file of arrival times in seconds, one a line")
    parser.add_argument("--requests", type=int, default=50, help=f"how many at most, up to {MAX_REQUESTS}")
    parser.add_argument("--max-seconds", type=float, default=600.0, help="after which what is not finished is given up")
    parser.add_argument("--images", type=int, nargs=2, default=mix.images, help="fewest and most of a request")
    parser.add_argument("--sides", type=int, nargs=2, default=mix.side, help="least and greatest side, pixels")
    parser.add_argument("--text", type=int, nargs=2, default=mix.text, help="fewest and most words")
    parser.add_argument("--max-tokens", type=int, default=16, help="output tokens of every request")
    parser.add_argument("--logprobs", action="store_true", help="ask for logprobs: tokens without text are seen, too")
    parser.add_argument("--slo", type=float, default=10.0, help="seconds to the first token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--outcomes", action="store_true", help="with the times of every request")
    parser.add_argument("--out", type=Path, help="write the JSON there, too")
    return parser.parse_args(argv)


def read_arrivals(args: argparse.Namespace) -> list[float]:
    """Raises ValueError unless there is a rate or a trace, not both."""
    if (args.rate is None) == (args.trace is None):
        raise ValueError("give --rate or --trace")
    if not 1 <= args.requests <= MAX_REQUESTS or args.max_tokens < 1:
        raise ValueError(f"--requests must be 1 to {MAX_REQUESTS}, --max-tokens at least 1")
    if args.rate is not None:
        if not args.rate > 0:
            raise ValueError("--rate must be above 0")
        return list(workloads.poisson(args.rate, args.requests, args.seed))
    times = [float(line) for line in args.trace.read_text().split()]
    return list(islice(workloads.trace(times), args.requests)) if times else []


def served_model(url: str, api_key: str | None = None) -> str:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    answer: dict[str, Any] = httpx.get(f"{url}/v1/models", headers=headers, trust_env=False).raise_for_status().json()
    return str(answer["data"][0]["id"])


if __name__ == "__main__":
    sys.exit(main())
