"""The output of one request as it comes, and everything that is held for it in the API process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gllm.engine.detokenizer import Detokenizer
from gllm.engine.messages import Output
from gllm.errors import RequestError
from gllm.outputs import Delta

if TYPE_CHECKING:
    from gllm.media.loader import LoadingItem


class Stream:
    """An async iterator of `Delta`; made by `AsyncEngine.submit`. Iteration raises RequestError when the request cannot
    go on: before the first Delta when an item is broken, at any time when a worker is lost.

    Whoever has a stream closes it (`aclose`), finished or not.
    """

    def __init__(
        self,
        request_id: int,
        text: str | None,
        prompt_token_ids: tuple[int, ...],
        num_item_tokens: int,
        detokenizer: Detokenizer,
        on_close: Callable[[Stream, bool], None],
    ) -> None:
        self.request_id = request_id
        self.text = text
        self.prompt_token_ids = prompt_token_ids
        self.num_item_tokens = num_item_tokens
        self.closed = False
        self.items: Sequence[LoadingItem] = ()
        self._detokenizer = detokenizer
        self._on_close = on_close
        self._outputs: deque[Output] = deque()
        self._error: RequestError | None = None
        self._over = False  # the engine is done with it
        self._news = asyncio.Event()

    def put(self, output: Output) -> None:
        """A token came."""
        self._outputs.append(output)
        self._over = self._over or output.finish_reason is not None
        self._news.set()

    def fail(self, error: RequestError) -> None:
        """Nothing more comes."""
        if not self._over:
            self._error, self._over = error, True
            self._news.set()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        if self._detokenizer.finished or self.closed:
            raise StopAsyncIteration
        while not self._outputs and self._error is None:
            self._news.clear()
            await self._news.wait()
        if not self._outputs:
            assert self._error is not None
            raise self._error
        # A reader that is behind gets all that has come in one delta.
        outputs = list(self._outputs)
        self._outputs.clear()
        delta = self._detokenizer.push(
            [output.token_id for output in outputs],
            [output.logprobs for output in outputs],
            outputs[-1].finish_reason,
        )
        if self._detokenizer.finished:
            self._finish()
        return delta

    async def aclose(self) -> None:
        """Abort the request unless it is finished, and free what is held for it. May be called again."""
        self._finish()

    def _finish(self) -> None:
        if not self.closed:
            self.closed = True
            self._on_close(self, not self._over)
