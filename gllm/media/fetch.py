"""Fetching http(s) images: a size limit while streaming, redirects checked hop by hop, and no way to private hosts.

The address that was checked is the address that is connected to: the URL's host is replaced by it, while the Host
header and TLS (server name and certificate) keep the name. The caller sets the deadline.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from gllm.config import EngineConfig
from gllm.errors import BadRequest
from gllm.media.address import host_key, is_public
from gllm.media.pool import Pool

if TYPE_CHECKING:
    import httpx

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

MAX_REDIRECTS = 5
_CONNECT_SECONDS = 5.0  # for each address of a host, so that one dead address leaves time for the next
_MAX_CONNECTIONS = 256
_HEADERS = {"accept": "image/*,*/*;q=0.5", "accept-encoding": "identity", "user-agent": "rserve"}


class Fetcher:
    """Streams http(s) bodies for one event loop. `resolve` (host, port) -> addresses replaces the system's resolver."""

    def __init__(self, config: EngineConfig, resolve: Resolve | None = None) -> None:
        self._max_bytes = config.max_media_bytes
        self._allowed_hosts = frozenset(map(host_key, config.allowed_media_domains))
        self._resolve = resolve or self._system_resolve
        # Threads of our own: a resolver that hangs must neither fill the loop's default pool nor delay the exit.
        self._resolvers: Pool | None = None
        self._transport: httpx.AsyncHTTPTransport | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> httpx.AsyncHTTPTransport:
        """Load the HTTP client and the CA certificates: tenths of a second, off the loop and outside any deadline."""
        async with self._starting:
            if self._transport is None:
                self._transport = await asyncio.to_thread(_make_transport)
        return self._transport

    async def stream(self, url: str) -> AsyncGenerator[bytes, None]:
        """The body of `url`, piece by piece. Raises BadRequest with the reason; nothing of the body is in it."""
        import httpx

        transport = await self.start()
        try:
            target = httpx.URL(url)
            for _ in range(MAX_REDIRECTS + 1):
                response = await self._get(transport, target)
                try:
                    if not response.has_redirect_location:
                        async for piece in self._body(response):
                            yield piece
                        return
                    target = target.join(response.headers["location"])
                finally:
                    await response.aclose()
        except (httpx.InvalidURL, UnicodeError):
            raise BadRequest("not a valid URL", code="invalid_url") from None
        except httpx.HTTPError as error:
            raise BadRequest(f"could not be fetched ({type(error).__name__})", code="fetch_failed") from None
        raise BadRequest(f"more than {MAX_REDIRECTS} redirects", code="fetch_failed")

    async def aclose(self) -> None:
        if self._transport is not None:
            await self._transport.aclose()
        if self._resolvers is not None:
            self._resolvers.close()

    async def _get(self, transport: httpx.AsyncHTTPTransport, target: httpx.URL) -> httpx.Response:
        """One request, not following redirects, to an address of `target` that was checked just now."""
        import httpx

        if target.scheme not in ("http", "https") or not target.host:
            raise BadRequest("only http and https URLs with a host can be fetched", code="invalid_url")
        if target.port is not None and target.port > 65535:
            raise BadRequest("a port is at most 65535", code="invalid_url")
        if target.userinfo:
            raise BadRequest("a URL with a user name or password is not fetched", code="invalid_url")
        failure: httpx.ConnectError | httpx.ConnectTimeout | None = None
        for address in await self._addresses(target):
            request = httpx.Request(
                "GET",
                target.copy_with(host=address, fragment=None),
                headers={"host": target.netloc.decode("ascii"), **_HEADERS},
                extensions={
                    "sni_hostname": target.raw_host.decode("ascii").rstrip("."),
                    "timeout": {"connect": _CONNECT_SECONDS},
                },
            )
            try:
                return await transport.handle_async_request(request)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = error
        assert failure is not None
        raise failure

    async def _addresses(self, target: httpx.URL) -> Sequence[str]:
        host = host_key(target.raw_host.decode("ascii"))
        listed = host in self._allowed_hosts or host_key(target.host) in self._allowed_hosts
        if self._allowed_hosts and not listed:
            raise BadRequest("its host is not among --allowed-media-domains", code="not_allowed")
        port = target.port or (443 if target.scheme == "https" else 80)
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError):
            addresses = ()
        if not addresses:
            raise BadRequest("its host name cannot be resolved", code="fetch_failed")
        # All of them, not any: a name with a public and a private address is how one gets past such a check.
        if not listed and not all(map(is_public, addresses)):
            raise BadRequest("its host is not a public one (see --allowed-media-domains)", code="not_allowed")
        return addresses

    async def _body(self, response: httpx.Response) -> AsyncGenerator[bytes, None]:
        if not response.is_success:
            raise BadRequest(f"its server answered {response.status_code}", code="fetch_failed")
        if response.headers.get("content-type", "").lower().startswith("text/html"):
            raise BadRequest("its server answered with text/html, not an image", code="fetch_failed")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise BadRequest("its server answered with a content encoding that was not asked for", code="fetch_failed")
        too_large = BadRequest(f"larger than the {self._max_bytes:,} bytes that an item may have", code="too_large")
        length = response.headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > self._max_bytes):
            raise too_large
        received = 0
        async for piece in response.aiter_raw():
            received += len(piece)
            if received > self._max_bytes:
                raise too_large
            yield piece

    async def _system_resolve(self, host: str, port: int) -> Sequence[str]:
        if self._resolvers is None:
            self._resolvers = Pool("media-dns", 8)
        found = await self._resolvers.submit(0, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _make_transport() -> httpx.AsyncHTTPTransport:
    """No proxy from the environment (it would resolve names itself), no connection kept for another host's use."""
    import httpx

    return httpx.AsyncHTTPTransport(
        verify=httpx.create_ssl_context(),
        trust_env=False,
        limits=httpx.Limits(max_connections=_MAX_CONNECTIONS, max_keepalive_connections=0),
    )
