"""The load client: against a live server, and its report on made-up timelines."""

from __future__ import annotations

import asyncio
import json

import pytest

from benchmarks.real import client, load
from benchmarks.real.requests import Mix, Prepared, prepare
from benchmarks.workloads import poisson
from tests.real.made_up import outcome

SMALL = Mix(images=(1, 2), side=(56, 112), text=(2, 6))


def prepared(server, count: int = 3, max_tokens: int = 1, rate: float = 20.0) -> list[Prepared]:
    shapes = SMALL.shapes(poisson(rate, count, seed=3), 3, max_tokens)
    return prepare(shapes, server.model, seed=3, logprobs=max_tokens > 1)


def test_every_request_is_served_and_timed_from_its_arrival(server):
    body = client.run(server.base_url, prepared(server, max_tokens=3), slo=60.0, max_seconds=60.0)
    assert (body["requests"], body["failed"]) == (3, 0), body["errors"]
    for o in body["outcomes"]:
        assert o["arrival"] <= o["sent"] < o["first_token"] <= o["finish"]
        assert o["output_tokens"] == 3
        assert o["prompt_tokens"] > 4 * o["num_images"]
    assert body["summary"]["tpot_mean"] >= 0
    assert body["summary"]["attainment"] == 1.0
    assert 0 <= body["client"]["lag_p50_s"] <= body["client"]["lag_max_s"]


def test_requests_that_are_refused_are_counted_with_the_servers_words(server):
    requests = prepared(server, 2)
    bad = Prepared(0.0, requests[0].body.replace(b'"temperature": 0.0', b'"temperature": -1.0'))
    body = client.run(server.base_url, [bad, requests[1]], slo=60.0, max_seconds=60.0)
    assert body["failed"] == 1
    assert body["errors"][0].startswith("HTTP 400: ")
    assert body["summary"]["attainment"] == 0.5


def test_what_is_not_finished_in_time_is_given_up():
    async def silent(reader, writer):
        await reader.read()
        writer.close()

    async def scenario():
        listener = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        try:
            return await client.send_all(f"http://127.0.0.1:{port}", [Prepared(0.0, b"{}")], max_seconds=0.3)
        finally:
            listener.close()

    _, (given_up,) = asyncio.run(scenario())
    assert not given_up.served
    assert given_up.error


def test_a_server_that_is_not_there_is_an_error_of_each_request():
    body = client.run("http://127.0.0.1:9", [Prepared(0.0, b"{}")], slo=1.0, max_seconds=5.0)
    assert body["failed"] == 1
    assert "summary" not in body


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000", "http://[::1]:8000/", "http://localhost", "https://127.9.9.9"]
)
def test_this_machine_may_always_get_load(url):
    assert client.check_url(url) == url.rstrip("/")


@pytest.mark.parametrize("url", ["http://example.com", "http://10.0.0.1:80", "ftp://localhost", "localhost:8000", ""])
def test_other_hosts_get_load_only_when_they_are_named(url):
    with pytest.raises(ValueError, match=r"not this machine|not an http"):
        client.check_url(url)
    assert client.check_url("http://example.com", ["example.com"])


def test_the_role_alone_is_no_token_and_a_finish_reason_is_one():
    seen = outcome(0.0, 0.0, first_token=0.0, finish=0.0)
    client._read_event(json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]}), 1.0, seen)
    assert not seen.first_token
    client._read_event(json.dumps({"choices": [{"delta": {"content": ""}, "finish_reason": "length"}]}), 2.0, seen)
    assert (seen.first_token, seen.finish) == (2.0, 2.0)
    client._read_event(json.dumps({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 1}}), 3.0, seen)
    client._read_event("[DONE]", 4.0, seen)
    assert (seen.prompt_tokens, seen.output_tokens, seen.finish) == (7, 1, 2.0)


def test_the_report_counts_failures_as_missed():
    outcomes = [
        outcome(0.0, 1.0),
        outcome(1.0, 3.0, decode=2.0, tokens=5),
        outcome(2.0, 0.5),
        outcome(3.0, 0.0, error="HTTP 503"),
    ]
    body = client.report(outcomes, slo=2.0, client_cpu_s=0.6)
    summary = body["summary"]
    assert summary["ttft_mean"] == 1.5
    assert summary["ttft_p50"] == 1.0
    assert summary["tpot_mean"] == 0.5
    assert summary["attainment"] == 0.5  # two of four
    assert summary["goodput"] == pytest.approx(2 / 6)
    assert summary["input_tokens_per_s"] == pytest.approx(300 / 6)
    assert body["client"]["cpu_share"] == pytest.approx(0.1)
    assert body["errors"] == ["HTTP 503"]


def test_the_command_line_prints_one_json_object(server, capsys, tmp_path):
    flags = ["--url", server.base_url, "--rate", "20", "--requests", "2", "--max-tokens", "1", "--seed", "5"]
    flags += ["--images", "1", "1", "--sides", "56", "84", "--text", "2", "4", "--out", str(tmp_path / "load.json")]
    assert load.main(flags) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == json.loads((tmp_path / "load.json").read_text())
    assert answer["kind"] == "measured"
    assert answer["summary"]["requests"] == 2
    assert "outcomes" not in answer


def test_a_trace_gives_the_arrivals(tmp_path):
    trace = tmp_path / "trace"
    trace.write_text("10.5\n12\n11\n99\n")
    args = load.parse(["--trace", str(trace), "--requests", "3"])
    assert load.read_arrivals(args) == [0.0, 0.5, 1.5]


@pytest.mark.parametrize(
    "flags", [[], ["--rate", "1", "--trace", "x"], ["--rate", "0"], ["--rate", "1", "--requests", "0"]]
)
def test_wrong_flags_are_one_line(flags, capsys):
    assert load.main(flags) == 1
    assert capsys.readouterr().err.startswith("load: ")
