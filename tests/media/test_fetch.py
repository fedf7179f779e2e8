"""http(s) fetching: where it may go, what it accepts, and when it gives up. Nothing outside 127.0.0.1 is contacted."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from gllm.config import EngineConfig
from gllm.errors import BadRequest
from gllm.media import fetch
from gllm.media.fetch import Fetcher, Resolve
from tests.media.server import Server, redirect, response, running


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


def names(table: dict[str, Sequence[str]]) -> Resolve:
    async def resolve(host: str, port: int) -> Sequence[str]:
        if host not in table:
            raise OSError("no such name")
        return table[host]

    return resolve


async def get(url: str, *, resolve: Resolve | None = None, **settings: Any) -> bytes:
    fetcher = Fetcher(EngineConfig(**settings), resolve)
    try:
        return b"".join([piece async for piece in fetcher.stream(url)])
    finally:
        await fetcher.aclose()


async def refusal(url: str, **arguments: Any) -> str:
    with pytest.raises(BadRequest) as refused:
        await get(url, **arguments)
    return refused.value.message


LOCAL = ("127.0.0.1",)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "[::1]", "0.0.0.0", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0",
     "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[64:ff9b::7f00:1]", "127.0.0.1.", "LOCALHOST.",
     "\u2460\u2461\u2466.0.0.1"],
)  # fmt: skip
def test_private_hosts_are_refused_before_a_connection(host: str) -> None:
    async def test() -> None:
        async with running() as server:
            server.answers["/x"] = response(b"secret")
            message = await refusal(server.url("/x", host))
            assert "not a public one" in message or "valid URL" in message or "resolved" in message
            assert server.heads == []

    run(test())


def test_one_private_address_among_public_ones_is_enough() -> None:
    async def test() -> None:
        resolve = names({"mixed.test": ["93.184.215.14", "10.0.0.1"], "empty.test": []})
        assert "not a public one" in await refusal("http://mixed.test/", resolve=resolve)
        assert "resolved" in await refusal("http://empty.test/", resolve=resolve)
        assert "resolved" in await refusal("http://unknown.test/", resolve=resolve)

    run(test())


def test_listed_hosts_may_be_private_and_others_are_refused() -> None:
    async def test() -> None:
        resolve = names({"images.test": LOCAL, "other.test": LOCAL})
        async with running() as server:
            server.answers["/x"] = response(b"body")
            domains = ("Images.Test.", "127.0.0.1")
            for host in ("images.test", "IMAGES.test", "images.test."):
                url = server.url("/x", host)
                lower = names({host: LOCAL, "images.test": LOCAL})
                assert await get(url, resolve=lower, allowed_media_domains=domains) == b"body"
            for host in ("other.test", "sub.images.test", "images.test.evil.test", "localhost"):
                message = await refusal(server.url("/x", host), resolve=resolve, allowed_media_domains=domains)
                assert "--allowed-media-domains" in message

    run(test())


def test_the_name_stays_in_the_host_header() -> None:
    async def test() -> None:
        async with running() as server:
            server.answers["/x?a=1"] = response(b"body")
            resolve = names({"images.test": LOCAL})
            url = server.url("/x?a=1#fragment", "images.test")
            assert await get(url, resolve=resolve, allowed_media_domains=("images.test",)) == b"body"
            assert f"host: images.test:{server.port}\r\n" in server.heads[0].lower()
            assert "gzip" not in server.heads[0]

    run(test())


def test_the_name_stays_in_tls() -> None:
    async def test() -> None:
        asked: list[str | None] = []
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # without a certificate: the handshake fails after the name
        context.sni_callback = lambda _, name, __: asked.append(name)  # type: ignore[assignment]
        async with running(context) as server:
            url = f"https://images.test:{server.port}/x"
            message = await refusal(url, resolve=names({"images.test": LOCAL}), allowed_media_domains=("images.test",))
        assert "could not be fetched" in message
        assert asked == ["images.test"]

    run(test())


@pytest.mark.parametrize("port", [65536, 99999, 10**30])
def test_ports_that_there_are_not(port: int) -> None:
    async def test() -> None:
        async with running() as server:
            server.answers["/x"] = redirect(f"http://127.0.0.1:{port}/")
            for url in (f"http://127.0.0.1:{port}/", f"https://127.0.0.1:{port}/", server.url("/x")):
                with pytest.raises(BadRequest) as refused:
                    await get(url, allowed_media_domains=LOCAL)
                assert refused.value.code == "invalid_url"

    run(test())


def test_every_hop_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "is_public", lambda address: address == "127.0.0.1")

    async def test() -> None:
        resolve = names(
            {"public.test": LOCAL, "inside.test": ["127.0.0.2"], "127.0.0.2": ["127.0.0.2"], "127.0.0.1": LOCAL}
        )
        async with running() as server:
            server.answers = {
                "/ok": redirect("/relative"), "/relative": redirect(server.url("/end", "127.0.0.1")),
                "/end": response(b"body"), "/name": redirect(server.url("/end", "inside.test")),
                "/ip": redirect(server.url("/end", "127.0.0.2")), "/file": redirect("file:///etc/passwd"),
                "/loop": redirect("/loop"), "/user": redirect(f"http://a:b@127.0.0.1:{server.port}/end"),
                "/bad": redirect("http://[::1"), "/gopher": redirect("gopher://127.0.0.1/"),
                "/none": response(b"", "304 Not Modified"),
            }  # fmt: skip
            assert await get(server.url("/ok", "public.test"), resolve=resolve) == b"body"
            reasons = {
                "/name": "not a public one", "/ip": "not a public one", "/file": "only http and https",
                "/loop": "redirects", "/user": "user name", "/bad": "valid URL", "/gopher": "only http", "/none": "304",
            }  # fmt: skip
            for path, reason in reasons.items():
                assert reason in await refusal(server.url(path, "public.test"), resolve=resolve)

    run(test())


def test_a_listed_host_cannot_redirect_to_an_unlisted_one() -> None:
    async def test() -> None:
        async with running() as server:
            server.answers = {"/x": redirect(server.url("/y", "localhost")), "/y": response(b"secret")}
            message = await refusal(server.url("/x"), allowed_media_domains=LOCAL)
            assert "--allowed-media-domains" in message
            assert len(server.heads) == 1

    run(test())


def test_the_checked_address_is_the_one_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that resolves to a public address once and to a private one afterwards gains nothing."""
    monkeypatch.setattr(fetch, "is_public", lambda address: address == "127.0.0.1")

    async def test() -> None:
        answers = [LOCAL, ["127.0.0.2"]]
        asked = []

        async def resolve(host: str, port: int) -> Sequence[str]:
            asked.append(host)
            return answers.pop(0)

        async with running() as server:
            server.answers["/x"] = response(b"body")
            assert await get(server.url("/x", "rebind.test"), resolve=resolve) == b"body"
        assert asked == ["rebind.test"]

    run(test())


def test_a_dead_address_leaves_the_next_one() -> None:
    async def test() -> None:
        async with running() as server:
            server.answers["/x"] = response(b"body")
            resolve = names({"two.test": ["127.0.0.3", "127.0.0.1"], "dead.test": ["127.0.0.3"]})
            domains = ("two.test", "dead.test")
            assert await get(server.url("/x", "two.test"), resolve=resolve, allowed_media_domains=domains) == b"body"
            message = await refusal(server.url("/x", "dead.test"), resolve=resolve, allowed_media_domains=domains)
            assert "could not be fetched" in message

    run(test())


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def test() -> None:
        async with running() as server:
            server.answers["/x"] = response(b"body")
            assert await get(server.url("/x"), allowed_media_domains=LOCAL) == b"body"

    run(test())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (response(b"TOP SECRET", "404 Not Found"), "answered 404"),
        (response(b"TOP SECRET", "500 Oh No"), "answered 500"),
        (response(b"TOP SECRET", "403 Forbidden", content_type="image/png"), "answered 403"),
        (response(b"<p>TOP SECRET", content_type="Text/HTML; charset=utf-8"), "text/html"),
        (response(b"TOP SECRET", content_encoding="gzip"), "content encoding"),
        (response(b"TOP SECRET", length=1 << 40), "1,000 bytes"),
        (response(b"TOP SECRET", length=999), "could not be fetched"),
        (b"SMTP READY TOP SECRET\r\n\r\n", "could not be fetched"),
        (b"", "could not be fetched"),
    ],
)
def test_answers_that_are_no_item(answer: bytes, reason: str) -> None:
    async def test() -> None:
        async with running() as server:
            server.answers["/x"] = answer
            message = await refusal(server.url("/x"), allowed_media_domains=LOCAL, max_media_bytes=1000)
            assert reason in message
            assert "SECRET" not in message

    run(test())


def test_an_endless_body_is_cut_at_the_limit() -> None:
    async def test() -> None:
        cut = asyncio.Event()

        async def endless(writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            try:
                while True:
                    writer.write(bytes(1 << 16))
                    await writer.drain()
            except ConnectionError:
                cut.set()

        async with running() as server:
            server.answers["/x"] = endless
            message = await refusal(server.url("/x"), allowed_media_domains=LOCAL, max_media_bytes=300_000)
            assert "300,000 bytes" in message
            await asyncio.wait_for(cut.wait(), 5)

    run(test())


@pytest.mark.parametrize("url", ["http://", "http:///x", "ftp://8.8.8.8/x", "http://[::1", "http://a b/", "http://\0/"])
def test_senseless_urls(url: str) -> None:
    run(_refused(url))


async def _refused(url: str) -> None:
    assert await refusal(url, resolve=names({}))


def test_many_fetches_share_one_fetcher() -> None:
    async def test() -> None:
        async with running() as server:
            server.answers = {f"/{i}": response(str(i).encode()) for i in range(60)}
            fetcher = Fetcher(EngineConfig(allowed_media_domains=LOCAL))

            async def one(index: int, server: Server) -> bytes:
                return b"".join([piece async for piece in fetcher.stream(server.url(f"/{index}"))])

            bodies = await asyncio.gather(*(one(index, server) for index in range(60)))
            assert bodies == [str(index).encode() for index in range(60)]
            await fetcher.aclose()

    run(test())
