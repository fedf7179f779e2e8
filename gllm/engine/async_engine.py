"""The engine as the API process sees it: prompts in, streams of text out. Everything runs on one event loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zmq
import zmq.asyncio

from gllm.config import EngineConfig
from gllm.core.request import Item, Request
from gllm.engine.control import connect, disconnects
from gllm.engine.detokenizer import Detokenizer
from gllm.engine.executor import DRIVER, Executor, make_executor
from gllm.engine.messages import (
    Abort,
    AddRequest,
    Codec,
    DriverReady,
    GetStatus,
    Hello,
    Message,
    Outputs,
    Refused,
    Shutdown,
    Status,
    ToApi,
    WorkerHung,
    WorkerLost,
)
from gllm.engine.processor import Processor, Prompt, check_items, check_length
from gllm.engine.stream import Stream
from gllm.errors import BadRequest, Overloaded, RequestError, StartupError
from gllm.media.loader import LoadingItem, MediaLoader
from gllm.models.registry import model_info
from gllm.sampling_params import SamplingParams
from gllm.worker.layout import stage_layers

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

STATUS_SECONDS = 4.0  # a driver that does not answer in this time is not well
MAX_RECOVERIES = 5  # within RECOVERY_SECONDS
RECOVERY_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Health:
    """ok: the driver, every stage and (where there are any) an encoder answered. workers: name -> "ok" or why not."""

    ok: bool
    workers: dict[str, str]


class AsyncEngine:
    """`start` it on an event loop, `submit` prompts, `close` it on the same loop. processor: there once it started."""

    processor: Processor

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.info = model_info(config.checkpoint)
        self._check()
        self.max_model_len = min(self.info.context_length, config.max_model_len or self.info.context_length)
        self._embedding_capacity = 0
        self._executor: Executor | None = None
        self._loader: MediaLoader | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._codec = Codec(ToApi)
        self._ids = itertools.count()
        self._queries = itertools.count()
        self._streams: dict[int, Stream] = {}
        self._admitting = 0
        self._statuses: dict[int, asyncio.Future[Status]] = {}
        self._ready: asyncio.Future[DriverReady] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._trouble: str | None = "the engine has not started"
        self._lost: dict[str, str] = {}
        self._recoveries: list[float] = []  # when
        self._heard = time.monotonic()  # the last message from the driver
        self._busy = asyncio.Event()  # there are, or were a moment ago, requests
        self._closed = False

    def _check(self) -> None:
        config, context = self.config, self.info.context_length
        if config.max_model_len is not None and config.max_model_len > context:
            raise StartupError(
                f"--max-model-len {config.max_model_len} is above the model's context of {context} tokens"
            )
        if config.num_encoders and self.info.image_token_id is None:
            raise StartupError(f"{self.info.architecture} takes no images: leave out --rserve and --encoders")

        stage_layers(config, self.info)

    # ---- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Until all workers are up. Raises StartupError in one line; then nothing is left running."""
        try:
            # The tokenizer takes seconds to load, most of them imports: meanwhile the workers start.
            loading = self._spawn(asyncio.to_thread(Processor, self.config.checkpoint, self.info, self.config))
            await self._start_workers()
            self.processor = await loading
            self._loader = MediaLoader(self.config, self.processor.images)
            await self._until_ready()
            self._spawn(self._watch_driver())
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End every stream, every worker, and remove all shared memory. May be called again."""
        self._closed = True
        self._trouble = "the server is shutting down"
        self._fail_all(self._trouble)
        for stream in list(self._streams.values()):
            await stream.aclose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._loader is not None:
            await self._loader.aclose()
        await self._stop_workers()

    async def _start_workers(self) -> None:
        self._ready = asyncio.get_running_loop().create_future()
        self._executor = make_executor(self.config, self.info, self._on_lost)
        endpoint = await self._executor.start()
        self._socket = connect(zmq.asyncio.Context.instance(), endpoint, "api")
        self._send(Hello("api", 0))
        self._spawn(self._receive(self._socket))
        if (gone := disconnects(self._socket, endpoint)) is not None:
            self._spawn(self._watch(gone, self._executor))

    async def _until_ready(self) -> None:
        assert self._ready is not None
        try:
            async with asyncio.timeout(self.config.startup_timeout):
                ready = await self._ready
        except TimeoutError:
            raise StartupError(
                f"the workers were not ready after {self.config.startup_timeout:g} seconds: raise --startup-timeout"
            ) from None
        self._take_limits(ready)
        self._trouble = None

    def _take_limits(self, ready: DriverReady) -> None:
        self._embedding_capacity = ready.embedding_capacity
        asked = self.config.max_model_len
        # The last output token is sampled, never fed back: it needs no KV.
        holds = ready.num_kv_tokens + 1
        if asked is not None and asked > holds:
            raise StartupError(
                f"--max-model-len {asked} does not fit into KV for {ready.num_kv_tokens} tokens: raise "
                "--kv-cache-memory-bytes or --num-kv-blocks, or lower --max-model-len"
            )
        self.max_model_len = min(self.info.context_length, asked or self.info.context_length, holds)

    async def _stop_workers(self) -> None:
        if self._socket is not None:
            self._send(Shutdown())
            self._socket.close(200)
            self._socket = None
        if self._executor is not None:
            await self._executor.close()
            self._executor = None

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- requests -------------------------------------------------------------------------------------------------

    async def submit(self, prompt: Prompt, params: SamplingParams) -> Stream:
        """Lay the prompt out as soon as the headers of its items are known, and hand it to the driver; pixels follow
        one by one. Raises RequestError when it is not admissible; then nothing is held for it."""
        if self._trouble is not None:
            raise Overloaded(self._trouble, code="engine_unavailable")
        if len(self._streams) + self._admitting >= self.config.max_queued_requests:
            raise Overloaded(f"{self.config.max_queued_requests} requests are in the server already", code="queue_full")
        assert self._loader is not None
        self._admitting += 1
        items = [self._loader.load(source, index) for index, source in enumerate(prompt.sources, start=1)]
        try:
            grids = await asyncio.gather(*(item.grid() for item in items))
            return self._admit(prompt, params, items, *self.processor.layout(prompt, grids))
        except BaseException:
            for item in items:
                item.cancel()
            raise
        finally:
            self._admitting -= 1

    def _admit(
        self, prompt: Prompt, params: SamplingParams, loading: Sequence[LoadingItem], token_ids: tuple[int, ...],
        items: tuple[Item, ...],
    ) -> Stream:  # fmt: skip
        if self._trouble is not None:
            raise Overloaded(self._trouble, code="engine_unavailable")
        num_item_tokens = sum(item.num_tokens for item in items)
        check_items(items, self._embedding_capacity)
        max_tokens = check_length(len(token_ids) - num_item_tokens, num_item_tokens, self.max_model_len, params)
        eos = () if params.ignore_eos else self.info.eos_token_ids
        request = Request(
            next(self._ids), token_ids, items, max_tokens, min(params.min_tokens, max_tokens),
            frozenset((*params.stop_token_ids, *eos)),
        )  # fmt: skip
        detokenizer = Detokenizer(self.processor.vocabulary, params, self.info.eos_token_ids)
        stream = Stream(request.request_id, prompt.text, token_ids, num_item_tokens, detokenizer, self._on_close)
        self._send(AddRequest(request, params))  # first: what cannot be sent must not be remembered
        self._streams[request.request_id] = stream
        self._busy.set()
        stream.items = loading
        for index, item in enumerate(loading):
            self._spawn(self._send_pixels(stream, index, item))
        return stream

    async def _send_pixels(self, stream: Stream, index: int, item: LoadingItem) -> None:
        """Not cancelled with its stream: a file that a thread is writing then could not be removed."""
        try:
            pixels = await item.pixels()
            if stream.closed or self._executor is None:
                return
            outlet = self._executor.outlet
            message, frames = await outlet.put(stream.request_id, index, pixels)
        except BadRequest as error:
            self._end(stream, error)
        except OSError as error:
            logger.error("the pixels of an item could not be stored: %s", error)
            self._end(stream, Overloaded("no memory for the pixels of an image", code="out_of_memory"))
        except Exception:
            if not stream.closed:
                logger.exception("an item could not be prepared")
                self._end(stream, Overloaded("an image could not be prepared", code="internal_error"))
        else:
            if stream.closed:
                outlet.drop(stream.request_id)
                return
            self._send(message, frames)

    def _end(self, stream: Stream, error: RequestError) -> None:
        stream.fail(error)
        self._send(Abort(stream.request_id))

    def _on_close(self, stream: Stream, abort: bool) -> None:
        """Called once, when a stream is over or given up."""
        self._streams.pop(stream.request_id, None)
        for item in stream.items:
            item.cancel()
        if self._executor is not None:
            self._executor.outlet.drop(stream.request_id)
        if abort:
            self._send(Abort(stream.request_id))

    # ---- the driver -----------------------------------------------------------------------------------------------

    def _send(self, message: Message, frames: Sequence[np.ndarray] = ()) -> None:
        if self._socket is not None and not self._socket.closed:
            # Never waits: there is no high-water mark.
            self._socket.send_multipart([self._codec.encode(message), *frames], zmq.NOBLOCK, copy=not frames)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            data = await socket.recv()
            self._heard = time.monotonic()
            match self._codec.decode(data):
                case Outputs(outputs):
                    for output in outputs:
                        if stream := self._streams.get(output.request_id):
                            stream.put(output)
                case Refused(request_id, reason, retry):
                    if stream := self._streams.get(request_id):
                        stream.fail(Overloaded(reason) if retry else BadRequest(reason))
                case Status() as status:
                    if (future := self._statuses.get(status.query)) and not future.done():
                        future.set_result(status)
                case DriverReady() as ready:
                    if self._ready is not None and not self._ready.done():
                        self._ready.set_result(ready)
                case Hello(name, _, error):
                    self._fail_start(f"{name} cannot start" if error is None else error)
                case WorkerHung(name):
                    logger.error("%s gives no sign of life: it is ended", name)
                    if self._executor is not None:
                        self._executor.kill(name)

    async def _watch(self, gone: zmq.Socket[Any], executor: Executor) -> None:
        """A driver that cannot be reached is of no use, whatever its executor thinks of it."""
        with gone:
            await gone.recv_multipart()
        executor.kill(DRIVER)

    def _fail_start(self, error: str) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(StartupError(error))

    def _on_lost(self, name: str, is_final: bool) -> None:
        """A worker has ended."""
        if self._ready is not None and not self._ready.done():
            self._spawn(self._fail_start_soon(self._ready, f"{name} ended while it started"))
            return
        if name.startswith("encoder "):
            self._send(WorkerLost(name))
            if is_final:
                self._lost[name] = "ended too often"
                logger.error("%s ended too often: it is not started again", name)
            if len(self._lost) < self.config.num_encoders:
                return
        if self._trouble is None:
            # Stages hold the KV of each other's requests, and without an encoder no image is served: all start again.
            self._trouble = f"the engine lost a worker ({name}) and starts again"
            self._fail_all(self._trouble)
            self._spawn(self._recover())

    async def _fail_start_soon(self, ready: asyncio.Future[DriverReady], error: str) -> None:
        """Its own words, if it had any, are on the way and go first."""
        await asyncio.sleep(1.0)
        if not ready.done():
            ready.set_exception(StartupError(error))

    async def _watch_driver(self) -> None:
        """While there are requests, a driver that says nothing for too long is ended; then all start again."""
        while True:
            await self._busy.wait()
            await asyncio.sleep(self.config.heartbeat_timeout / 2)
            if not self._streams:
                self._busy.clear()
            elif self._trouble is None and time.monotonic() - self._heard > self.config.heartbeat_timeout / 2:
                asked = time.monotonic()
                if await self._status() is None and self._heard < asked - self.config.heartbeat_timeout / 2:
                    logger.error("the driver gives no sign of life: it is ended")
                    if self._executor is not None:
                        self._executor.kill(DRIVER)

    def _fail_all(self, reason: str) -> None:
        for stream in self._streams.values():
            stream.fail(Overloaded(reason, code="engine_unavailable"))

    async def _recover(self) -> None:
        """Start all workers anew. Requests that were inside have got a 503 that can be retried."""
        now = time.monotonic()
        self._recoveries = [at for at in self._recoveries if now - at < RECOVERY_SECONDS]
        while not self._closed and len(self._recoveries) < MAX_RECOVERIES:
            self._recoveries.append(time.monotonic())
            try:
                await self._stop_workers()
                self._lost.clear()
                await self._start_workers()
                await self._until_ready()
            except Exception as error:
                logger.error("the workers could not be started again: %s", error)
                self._trouble = f"the engine could not start again: {error}"
                await asyncio.sleep(len(self._recoveries))
            else:
                logger.warning("the workers were started again")
                return
        if not self._closed:
            self._trouble = f"the engine is down: {self._trouble}"

    # ---- questions ------------------------------------------------------------------------------------------------

    async def health(self) -> Health:
        """Asks every worker for a sign of life; within a few seconds."""
        if self._trouble is not None:
            return Health(False, {DRIVER: self._trouble})
        status = await self._status(probe=True)
        if status is None:
            return Health(False, {DRIVER: f"no answer within {STATUS_SECONDS:g} seconds"})
        workers = status.workers | self._lost
        encoders = [state for name, state in workers.items() if name.startswith("encoder ")]
        others = [state for name, state in workers.items() if not name.startswith("encoder ")]
        return Health(all(state == "ok" for state in others) and (not encoders or "ok" in encoders), workers)

    async def stats(self) -> dict[str, float]:
        """Counts at this moment, by name."""
        status = await self._status() if self._trouble is None else None
        gauges = dict(status.gauges) if status is not None else {}
        return gauges | {
            "requests_in_server": float(len(self._streams) + self._admitting),
            "pixel_bytes_shared": float(self._executor.outlet.num_bytes if self._executor is not None else 0),
        }

    def worker_pid(self, name: str) -> int | None:
        """The process id of a worker ("driver", "encoder 0"), if it runs."""
        return self._executor.pid(name) if self._executor is not None else None

    async def _status(self, probe: bool = False) -> Status | None:
        query = next(self._queries)
        future: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self._statuses[query] = future
        self._send(GetStatus(query, probe))
        try:
            async with asyncio.timeout(STATUS_SECONDS):
                return await future
        except TimeoutError:
            return None
        finally:
            del self._statuses[query]
