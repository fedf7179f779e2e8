"""An open-loop client: sends each request at its time, whether or not earlier ones were answered, and notes when tokens
come. It knows OpenAI's chat completions over HTTP and no particular server."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks import metrics
from benchmarks.real.requests import Prepared

CHAT = "/v1/chat/completions"


@dataclass(slots=True)
class Outcome:
    """What became of one request; times in seconds after the start of the run. arrival: when it was due, from which all
    latencies count; sent: when it left. error: why it was not served."""

    arrival: float
    num_images: int
    sent: float = 0.0
    first_token: float = 0.0
    finish: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def served(self) -> bool:
        return self.error is None


def check_url(url: str, allowed_hosts: Sequence[str] = ()) -> str:
    """The URL without a slash at its end. Raises ValueError unless its host is this machine or named as allowed: no
    stranger gets load by a slip of the keyboard."""
    parts = urlsplit(url)
    host = parts.hostname
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"{url!r} is not an http(s) URL")
    if host not in allowed_hosts and not _is_loopback(host):
        raise ValueError(f"{host} is not this machine: name it with --allow-host {host} to send load there")
    return url.rstrip("/")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def send_all(
    url: str, requests: Sequence[Prepared], *, max_seconds: float, api_key: str | None = None
) -> tuple[float, list[Outcome]]:
    """Send every request at its arrival. Returns when the run started, on the monotonic clock, and the outcomes in the
    same order. What is not finished `max_seconds` after the start is given up as an error. url: the server's, without
    /v1."""
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    outcomes = [Outcome(request.arrival, len(request.sizes)) for request in requests]
    # trust_env: a proxy of the environment must not stand between the client and this machine's server.
    async with httpx.AsyncClient(limits=limits, timeout=max_seconds, headers=headers, trust_env=False) as http:
        start = time.monotonic()
        jobs = [
            asyncio.create_task(_send(http, url + CHAT, request.body, start, outcome))
            for request, outcome in zip(requests, outcomes, strict=True)
        ]
        _, late = await asyncio.wait(jobs, timeout=max_seconds) if jobs else ((), ())
        for job in late:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
    for job, outcome in zip(jobs, outcomes, strict=True):
        if job.cancelled():
            outcome.error = f"not finished {max_seconds:g} s after the start"
    return start, outcomes


async def _send(http: httpx.AsyncClient, url: str, body: bytes, start: float, outcome: Outcome) -> None:
    await asyncio.sleep(max(0.0, start + outcome.arrival - time.monotonic()))
    outcome.sent = time.monotonic() - start
    try:
        async with http.stream("POST", url, content=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                outcome.error = f"HTTP {response.status_code}: {text[:300]}"
                return
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    _read_event(line[5:].strip(), time.monotonic() - start, outcome)
    except httpx.HTTPError as error:
        outcome.error = f"{type(error).__name__}: {error}"
        return
    if outcome.error is None and not (outcome.finish and outcome.output_tokens):
        outcome.error = "the stream ended without a finish reason or usage"


def _read_event(data: str, now: float, outcome: Outcome) -> None:
    """One server-sent event. A chunk that only announces the role is no token."""
    if data == "[DONE]":
        return
    event: dict[str, Any] = json.loads(data)
    if "error" in event:
        outcome.error = f"error in the stream: {str(event['error'])[:300]}"
        return
    for choice in event.get("choices") or ():
        is_token = choice.get("delta", {}).get("content") or choice.get("logprobs") or choice.get("finish_reason")
        if is_token and not outcome.first_token:
            outcome.first_token = now
        if choice.get("finish_reason"):
            outcome.finish = now
    if usage := event.get("usage"):
        outcome.prompt_tokens, outcome.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]


def report(outcomes: Sequence[Outcome], slo: float, client_cpu_s: float) -> dict[str, Any]:
    """The body of a result. A request that failed missed its SLO; latencies are those of the served ones.

    client: how late requests left (seconds after they were due) and the share of one core that the client used.
    """
    served = [outcome for outcome in outcomes if outcome.served]
    errors = sorted({outcome.error for outcome in outcomes if outcome.error})
    lags = [outcome.sent - outcome.arrival for outcome in outcomes if outcome.sent]
    body: dict[str, Any] = {"requests": len(outcomes), "failed": len(outcomes) - len(served), "errors": errors[:10]}
    if served:
        summary = metrics.summarise(served, slo)
        summary["attainment"] *= len(served) / len(outcomes)
        wall = max(outcome.finish for outcome in served)
        body |= {
            "summary": summary,
            "prompt_tokens_mean": metrics.mean(outcome.prompt_tokens for outcome in served),
            "client": {
                "lag_p50_s": metrics.percentile(lags, 0.5),
                "lag_p99_s": metrics.percentile(lags, 0.99),
                "lag_max_s": max(lags),
                "cpu_share": client_cpu_s / wall,
            },
            "ttfts": [round(outcome.first_token - outcome.arrival, 6) for outcome in served],
        }
    return body | {"outcomes": [asdict(outcome) for outcome in outcomes]}


def run(
    url: str, requests: Sequence[Prepared], *, slo: float, max_seconds: float, api_key: str | None = None
) -> dict[str, Any]:
    """Send all and report. Raises ValueError when there is nothing to send."""
    return timed_run(url, requests, slo=slo, max_seconds=max_seconds, api_key=api_key)[1]


def timed_run(
    url: str, requests: Sequence[Prepared], *, slo: float, max_seconds: float, api_key: str | None = None
) -> tuple[float, dict[str, Any]]:
    """The same, and when the run started on the monotonic clock."""
    if not requests:
        raise ValueError("no requests to send")
    before = time.process_time()
    started, outcomes = asyncio.run(send_all(url, requests, max_seconds=max_seconds, api_key=api_key))
    return started, report(outcomes, slo, time.process_time() - before)
