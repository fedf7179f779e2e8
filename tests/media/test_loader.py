"""Items on their way: grids before pixels, errors that name the item, and nothing left behind by those who leave."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gllm.config import EngineConfig
from gllm.errors import BadRequest
from gllm.media import image as images
from gllm.media.loader import LoadingItem, MediaLoader
from gllm.media.processor import ImageProcessor
from gllm.media.source import Source
from tests.media.files import bomb_png, encoded, gradient
from tests.media.server import Server, response, running

PROCESSOR = ImageProcessor(Path("/nonexistent"))
JPEG = encoded(gradient(300, 200), "JPEG", quality=95)


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def with_loader(test: Callable[[MediaLoader, Server], Awaitable[None]], **settings: Any) -> None:
    """Run `test` with a loader and a server; whatever the loop would log as a forgotten error fails the test."""
    forgotten: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: forgotten.append(context))
        loader = MediaLoader(EngineConfig(allowed_media_domains=("127.0.0.1",), **settings), PROCESSOR)
        async with running() as server:
            await test(loader, server)
            await loader.aclose()
        assert not loader._tasks

    asyncio.run(asyncio.wait_for(main(), 30))
    assert forgotten == []


async def refusal(awaitable: Awaitable[Any]) -> str:
    with pytest.raises(BadRequest) as refused:
        await awaitable
    return refused.value.message


def test_every_kind_of_source_gives_the_same_pixels(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(JPEG)
    wanted = PROCESSOR.pixels(images.decode(JPEG))

    async def test(loader: MediaLoader, server: Server) -> None:
        server.answers["/a.jpg"] = response(JPEG)
        sources = [
            Source(JPEG), Source(data_url(JPEG)), Source(f"  {data_url(JPEG)}\n"), Source(server.url("/a.jpg")),
            Source(f"file://{path}"), Source(path, trusted=True), Source(str(path), trusted=True),
            Source(images.decode(JPEG), trusted=True), Source(Image.open(path), trusted=True),
        ]  # fmt: skip
        for index, item in enumerate([loader.load(source, index + 1) for index, source in enumerate(sources)]):
            assert await item.size() == (300, 200)
            assert await item.grid() == PROCESSOR.grid(300, 200)
            assert np.array_equal(await item.pixels(), wanted), index

    with_loader(test, allowed_local_media_path=str(tmp_path))


def test_the_grid_is_known_while_the_item_is_still_being_fetched() -> None:
    async def test(loader: MediaLoader, server: Server) -> None:
        rest = asyncio.Event()

        async def slow(writer: asyncio.StreamWriter) -> None:
            writer.write(response(JPEG[:2000], length=len(JPEG)))
            await writer.drain()
            await rest.wait()
            writer.write(JPEG[2000:])
            await writer.drain()

        server.answers["/slow"] = slow
        item = loader.load(Source(server.url("/slow")), 1)
        pixels = asyncio.ensure_future(item.pixels())
        assert await item.grid() == PROCESSOR.grid(300, 200)
        assert not pixels.done()
        rest.set()
        assert (await pixels).dtype == np.uint8

    with_loader(test)


def test_a_header_that_comes_byte_by_byte() -> None:
    async def test(loader: MediaLoader, server: Server) -> None:
        async def drip(writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            for start in range(0, len(JPEG), 97):
                writer.write(JPEG[start : start + 97])
                await writer.drain()
                await asyncio.sleep(0)

        server.answers["/drip"] = drip
        item = loader.load(Source(server.url("/drip")), 1)
        assert (await item.pixels()).shape[2] == 3

    with_loader(test)


def test_errors_name_the_item_and_leave_the_others_alone() -> None:
    async def test(loader: MediaLoader, server: Server) -> None:
        async def silent(writer: asyncio.StreamWriter) -> None:
            await writer.drain()
            await forever.wait()

        async def drip(writer: asyncio.StreamWriter) -> None:
            writer.write(response(JPEG[:1], length=len(JPEG)))
            await writer.drain()
            await forever.wait()

        forever = asyncio.Event()
        server.answers = {"/silent": silent, "/drip": drip, "/good": response(JPEG), "/text": response(b"hello " * 99)}
        sources = {
            data_url(b""): "empty", data_url(b"%PDF-1.7" + bytes(99)): "not a supported image",
            data_url(JPEG[:-128]): "truncated or corrupt", "data:image/png;base64,!!!!": "not base64",
            server.url("/silent"): "not fetched within 1.5 seconds", server.url("/drip"): "not fetched within",
            server.url("/missing"): "answered 404", server.url("/text"): "not a supported image",
            "file:///etc/passwd": "not allowed", "/etc/passwd": "not a data:", "": "not a data:",
            data_url(bomb_png(14000, 14000)): "196,000,000 pixels",
            data_url(encoded(gradient(1093, 5), "PNG")): "aspect ratio of 218.6",
        }  # fmt: skip
        items = [loader.load(Source(source), index + 1) for index, source in enumerate(sources)]
        good = loader.load(Source(server.url("/good")), 99)
        assert (await good.pixels()).shape == PROCESSOR.pixels(images.decode(JPEG)).shape
        for item, (source, reason) in zip(items, sources.items(), strict=True):
            message = await refusal(item.pixels())
            assert message.startswith(f"image {item.index}: ")
            assert reason in message
            assert "passwd" not in message
            if "base64" not in source or "truncated" not in reason:
                assert message == await refusal(item.grid())
        forever.set()

    with_loader(test, media_timeout=1.5)


def test_an_item_may_fail_after_its_header() -> None:
    async def test(loader: MediaLoader, server: Server) -> None:
        item = loader.load(Source(data_url(JPEG[:-500])), 2)
        assert await item.grid() == PROCESSOR.grid(300, 200)
        assert await refusal(item.pixels()) == "image 2: a truncated or corrupt JPEG"

    with_loader(test)


def test_size_limit_of_every_source(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(JPEG)

    async def test(loader: MediaLoader, server: Server) -> None:
        server.answers["/a"] = response(JPEG)
        for source in (JPEG, data_url(JPEG), server.url("/a"), f"file://{path}", path):
            item = loader.load(Source(source, trusted=True), 1)
            assert "larger than the 1,000 bytes" in await refusal(item.pixels())

    with_loader(test, max_media_bytes=1000, allowed_local_media_path=str(tmp_path))


def test_failed_items_that_nobody_awaits_are_not_reported() -> None:
    async def test(loader: MediaLoader, server: Server) -> None:
        for index in range(5):
            loader.load(Source(b"junk" * 99), index)
        await asyncio.gather(*loader._tasks.values())

    with_loader(test)


def test_cancelling_stops_the_fetch() -> None:
    async def test(loader: MediaLoader, server: Server) -> None:
        begun, gone = asyncio.Event(), asyncio.Event()

        async def endless(writer: asyncio.StreamWriter) -> None:
            begun.set()
            try:
                while True:
                    writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + JPEG)
                    await writer.drain()
                    await asyncio.sleep(0)
            except ConnectionError:
                gone.set()

        server.answers["/x"] = endless
        item = loader.load(Source(server.url("/x")), 1)
        waiting = asyncio.ensure_future(item.pixels())
        await begun.wait()
        item.cancel()
        item.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.wait_for(gone.wait(), 5)
        with pytest.raises(asyncio.CancelledError):
            await item.grid()

    with_loader(test, media_timeout=30)


def test_cancelling_drops_what_waits_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, decoded = threading.Event(), []

    def decode(data: bytes) -> Image.Image:
        decoded.append(len(data))
        gate.wait(10)
        return gradient(300, 200)

    monkeypatch.setattr(images, "decode", decode)

    async def test(loader: MediaLoader, server: Server) -> None:
        items = [loader.load(Source(JPEG + bytes(index)), index + 1) for index in range(4)]
        for item in items:
            await item.grid()
        while not decoded:
            await asyncio.sleep(0.001)
        for item in (items[1], items[3]):
            item.cancel()
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(items[0].pixels(), items[2].pixels())
        assert decoded == [len(JPEG), len(JPEG) + 2]

    with_loader(test, media_workers=1)


def test_a_waiter_that_is_cancelled_leaves_the_item_alone() -> None:
    async def test(loader: MediaLoader, server: Server) -> None:
        item = loader.load(Source(JPEG), 1)
        for wait in (item.grid, item.pixels):
            task = asyncio.ensure_future(wait())
            await asyncio.sleep(0)
            task.cancel()
        assert (await item.pixels()).ndim == 3
        with pytest.raises(RuntimeError, match="image 1"):
            await item.pixels()

    with_loader(test)


def test_items_are_decoded_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    order, gate = [], threading.Event()
    real = images.decode

    def decode(data: bytes) -> Image.Image:
        gate.wait(10)
        order.append(data[-1])
        return real(data)

    monkeypatch.setattr(images, "decode", decode)

    async def test(loader: MediaLoader, server: Server) -> None:
        items = [loader.load(Source(JPEG + bytes([index])), index + 1) for index in range(12)]
        await asyncio.gather(*(item.grid() for item in items))
        gate.set()
        await asyncio.gather(*(item.pixels() for item in items))
        assert order == sorted(order)

    with_loader(test, media_workers=1)


def test_no_image_work_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    for module, name in ((images, "probe"), (images, "decode"), (ImageProcessor, "pixels")):
        real = getattr(module, name)

        def recorded(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            threads.add(threading.current_thread().name)
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, recorded)

    async def test(loader: MediaLoader, server: Server) -> None:
        server.answers["/a"] = response(JPEG)
        for source in (JPEG, data_url(JPEG), server.url("/a")):
            await loader.load(Source(source), 1).pixels()
        assert threads
        assert all(name.startswith(("media-probe", "media-decode")) for name in threads)

    with_loader(test)


def test_one_pillow_image_in_many_items(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    gradient(600, 500).save(path)

    async def test(loader: MediaLoader, server: Server) -> None:
        shared = Image.open(path)  # not loaded yet
        items = [loader.load(Source(shared, trusted=True), index + 1) for index in range(16)]
        pixels = [await item.pixels() for item in items]
        assert all(np.array_equal(pixels[0], other) for other in pixels)

    with_loader(test)


def test_closing_cancels_what_is_loading() -> None:
    async def test(loader: MediaLoader, server: Server) -> None:
        forever = asyncio.Event()

        async def silent(writer: asyncio.StreamWriter) -> None:
            await forever.wait()

        server.answers["/x"] = silent
        items = [loader.load(Source(server.url("/x")), index + 1) for index in range(4)]
        waiting = [asyncio.ensure_future(item.pixels()) for item in items]
        await asyncio.sleep(0)
        await loader.aclose()
        forever.set()
        assert all(
            isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*waiting, return_exceptions=True)
        )

    with_loader(test)


def test_cancelling_in_the_turn_in_which_the_pixels_came() -> None:
    async def main() -> None:
        item = LoadingItem(1, PROCESSOR)

        async def load() -> np.ndarray:
            return np.zeros((28, 28, 3), np.uint8)

        waiting = asyncio.create_task(item.pixels())
        await asyncio.sleep(0)
        await item.start(load)
        item.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(asyncio.wait_for(main(), 10))


@pytest.mark.parametrize("fault", [MemoryError(), OSError("unrecognised"), ValueError("bad size")])
def test_a_resize_that_fails_is_the_items_error(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    def fail(*_: object) -> None:
        raise fault

    monkeypatch.setattr(ImageProcessor, "pixels", fail)

    async def test(loader: MediaLoader, _: Server) -> None:
        item = loader.load(Source(JPEG), 3)
        assert await item.size() == (300, 200)
        assert await refusal(item.pixels()) == f"image 3: its pixels cannot be resized ({type(fault).__name__})"

    with_loader(test)


def test_a_fault_reaches_who_waits_for_the_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("fault")

    monkeypatch.setattr(ImageProcessor, "pixels", fail)

    async def test(loader: MediaLoader, _: Server) -> None:
        item = loader.load(Source(JPEG), 1)
        with pytest.raises(KeyError):
            await item.pixels()

    with_loader(test)
