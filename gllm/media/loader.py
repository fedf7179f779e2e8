"""Items of requests on their way to pixels: fetched on the event loop, probed, decoded and resized in threads.

An item's grid is known as soon as its header is, long before its pixels; each can be awaited on its own.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial

import numpy as np
from PIL import Image

from gllm.config import EngineConfig, usable_cores
from gllm.errors import BadRequest
from gllm.media import image as images
from gllm.media.data_url import is_data_url, read_data_url
from gllm.media.fetch import Fetcher, Resolve
from gllm.media.image import Size
from gllm.media.local_file import read_file_url, read_path
from gllm.media.pool import Pool
from gllm.media.processor import Grid, ImageProcessor
from gllm.media.source import Source

_FIRST_PROBE_BYTES = 1 << 15  # holds nearly every header; each further probe waits for twice as many bytes
_PIXELS_IN_FLIGHT = images.MAX_PIXELS  # so that decoding takes bounded memory, whatever arrives at once


class LoadingItem:
    """One item that is being loaded. `index` counts from 1 within its request and names the item in errors."""

    def __init__(self, index: int, processor: ImageProcessor) -> None:
        loop = asyncio.get_running_loop()
        self.index = index
        self._processor = processor
        self._size: asyncio.Future[Size] = loop.create_future()
        self._decoded: asyncio.Future[None] = loop.create_future()
        self._pixels: np.ndarray | None = None
        self._cancelled = False
        self._task: asyncio.Task[None] | None = None

    async def size(self) -> Size:
        """Pixels of the upright original, as soon as the header is known. Raises BadRequest naming the item."""
        return await asyncio.shield(self._size)

    async def grid(self) -> Grid:
        """(t, h, w) in patches, as soon as the header is known. Raises BadRequest naming the item."""
        return self._processor.grid(*await self.size())

    async def pixels(self) -> np.ndarray:
        """uint8 [H, W, 3], resized for the model: handed over once, so that the item keeps nothing of it alive.
        Raises BadRequest naming the item."""
        await asyncio.shield(self._decoded)
        if self._cancelled:  # in the same turn of the loop as the pixels came
            raise asyncio.CancelledError
        if self._pixels is None:
            raise RuntimeError(f"the pixels of image {self.index} have been handed over already")
        pixels, self._pixels = self._pixels, None
        return pixels

    def cancel(self) -> None:
        """Stop fetching, drop what waits for a thread and what is here; who still waits gets CancelledError."""
        self._pixels = None
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()
        self._settle(asyncio.CancelledError())

    def start(self, load: Callable[[], Awaitable[np.ndarray]]) -> asyncio.Task[None]:
        self._task = asyncio.get_running_loop().create_task(self._run(load))
        return self._task

    def header_known(self, size: Size) -> None:
        """Raises BadRequest when the model cannot take an image of this size."""
        self._processor.grid(*size)
        if not self._size.done():
            self._size.set_result(size)

    @property
    def has_header(self) -> bool:
        return self._size.done()

    async def _run(self, load: Callable[[], Awaitable[np.ndarray]]) -> None:
        try:
            pixels = await load()
        except BadRequest as error:
            self._settle(self.named(error))
        except BaseException as error:
            self._settle(error)
            if not isinstance(error, Exception):
                raise
        else:
            if not (self._cancelled or self._decoded.done()):
                self._pixels = pixels
                self._decoded.set_result(None)

    def named(self, error: BadRequest) -> BadRequest:
        return BadRequest(f"image {self.index}: {error.message}", param=error.param or "image", code=error.code)

    def _settle(self, error: BaseException) -> None:
        for future in (self._size, self._decoded):
            if future.done():
                continue
            if isinstance(error, asyncio.CancelledError):
                future.cancel()
            else:
                future.set_exception(error)
                future.exception()  # seen: an item that nobody awaits any more is no news for the log


class MediaLoader:
    """Loads items for one event loop; made and used on it, closed with `aclose`."""

    def __init__(self, config: EngineConfig, processor: ImageProcessor, *, resolve: Resolve | None = None) -> None:
        threads = config.media_workers or min(8, max(2, len(usable_cores())))
        self._config = config
        self._processor = processor
        self._fetcher = Fetcher(config, resolve)
        # Headers have threads of their own: a prompt's layout must not wait for other requests' pixels.
        self._probes = Pool("media-probe", 2)
        self._decoders = Pool("media-decode", threads, _PIXELS_IN_FLIGHT)
        self._tickets = itertools.count()
        self._tasks: dict[LoadingItem, asyncio.Task[None]] = {}

    def load(self, source: Source, index: int) -> LoadingItem:
        """Start to load `source`, the request's `index`-th item, counted from 1. Never blocks; errors come from the
        item. Items are decoded in the order of these calls, whichever is fetched first where both wait."""
        item = LoadingItem(index, self._processor)
        self._tasks[item] = item.start(partial(self._load, item, source, next(self._tickets)))
        self._tasks[item].add_done_callback(lambda _: self._tasks.pop(item, None))
        return item

    async def aclose(self) -> None:
        """Cancel what is still loading and end the threads."""
        tasks = dict(self._tasks)
        for item in tasks:
            item.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        await self._fetcher.aclose()
        self._probes.close()
        self._decoders.close()

    async def _load(self, item: LoadingItem, source: Source, ticket: int) -> np.ndarray:
        value = source.value
        if isinstance(value, Image.Image):
            return await self._pixels(item, ticket, partial(images.picture_size, value), partial(images.picture, value))
        if isinstance(value, str) and is_data_url(value):
            return await self._load_data_url(item, value, ticket)
        pieces = await self._read(item, source, ticket)
        return await self._pixels(
            item, ticket, lambda: _probe_whole(b"".join(pieces)), lambda: images.decode(b"".join(pieces))
        )

    async def _load_data_url(self, item: LoadingItem, url: str, ticket: int) -> np.ndarray:
        """The payload is decoded twice, its beginning for the header and the whole with the pixels: so no more of the
        decoded items than are at work are in memory."""
        limit = self._config.max_media_bytes

        def probe() -> Size:
            prefix = _FIRST_PROBE_BYTES
            while True:
                data = read_data_url(url, limit, prefix=prefix)
                if size := images.probe(data, complete=len(data) < prefix):
                    return size
                prefix *= 4

        return await self._pixels(item, ticket, probe, lambda: images.decode(read_data_url(url, limit)))

    async def _pixels(
        self, item: LoadingItem, ticket: int, probe: Callable[[], Size], decode: Callable[[], Image.Image]
    ) -> np.ndarray:
        if not item.has_header:
            item.header_known(await self._probes.submit(ticket, probe))
        size = await item.size()

        def work() -> np.ndarray:
            picture = decode()
            if picture.size != size:
                raise BadRequest("its header tells another size than its pixels have", code="invalid_image")
            try:
                return self._processor.pixels(picture)
            except (MemoryError, OSError, ValueError) as error:  # what Pillow raises while it converts and resizes
                reason = f"its pixels cannot be resized ({type(error).__name__})"
                raise BadRequest(reason, code="invalid_image") from None

        return await self._decoders.submit(ticket, work, cost=size.pixels)

    async def _read(self, item: LoadingItem, source: Source, ticket: int) -> list[bytes]:
        """The encoded bytes, in pieces that a thread joins. For URLs the header is announced while they arrive."""
        value, limit = source.value, self._config.max_media_bytes
        if isinstance(value, bytes):
            if len(value) > limit:
                raise BadRequest(f"larger than the {limit:,} bytes that an item may have", code="too_large")
            return [value]
        if isinstance(value, str):
            value = value.strip()
            scheme = value[:8].lower()
            if scheme.startswith(("http://", "https://")):
                return await self._fetch(item, value, ticket)
            if scheme.startswith("file:"):
                root = self._config.allowed_local_media_path
                return [await self._probes.submit(ticket, partial(read_file_url, value, root, limit))]
        if source.trusted and isinstance(value, str | os.PathLike):
            return [await self._probes.submit(ticket, partial(read_path, value, limit))]
        raise BadRequest("not a data:, http:, https: or file: URL", code="invalid_url")

    async def _fetch(self, item: LoadingItem, url: str, ticket: int) -> list[bytes]:
        seconds = self._config.media_timeout
        pieces: list[bytes] = []
        received, next_probe = 0, 1
        await self._fetcher.start()
        try:
            async with asyncio.timeout(seconds), aclosing(self._fetcher.stream(url)) as stream:
                async for piece in stream:
                    pieces.append(piece)
                    received += len(piece)
                    if not item.has_header and received >= next_probe:
                        size = await self._probes.submit(ticket, lambda: images.probe(b"".join(pieces)))
                        if size is not None:
                            item.header_known(size)
                        next_probe = max(2 * received, 64)
        except TimeoutError:
            raise BadRequest(f"not fetched within {seconds:g} seconds", code="fetch_timeout") from None
        return pieces


def _probe_whole(data: bytes) -> Size:
    size = images.probe(data, complete=True)
    assert size is not None
    return size
