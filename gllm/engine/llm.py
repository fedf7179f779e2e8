"""Offline use: prompts in, outputs out, in order. The engine runs on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from gllm.config import EngineConfig
from gllm.engine.async_engine import AsyncEngine
from gllm.engine.processor import Prompt
from gllm.engine.sampling_defaults import sampling_defaults
from gllm.errors import RequestError
from gllm.outputs import CompletionOutput, RequestOutput
from gllm.sampling_params import SamplingParams

PromptInput = str | Mapping[str, Any] | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """Takes the fields of `EngineConfig` by name: `LLM(model_path, rserve=True)`; with none, the bundled demo.

    A context manager; `close` ends all processes and frees all shared memory (the end of the program does, too).
    Raises ValueError or gllm.errors.StartupError, in one line, when it cannot start.
    """

    def __init__(self, model_path: str | None = None, **options: Any) -> None:
        config = EngineConfig(model_path=model_path, **options)
        self._sampling_defaults = sampling_defaults(config.checkpoint)
        self._engine = AsyncEngine(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()
        self._closed = False
        # Inside the server a request beyond the limit is refused; here the caller waits for it anyway.
        self._places = min(4 * config.max_num_seqs, config.max_queued_requests)
        try:
            self._call(self._engine.start())
        except BaseException:
            self.close()
            raise
        atexit.register(self.close)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything. May be called again."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._call(self._engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One output per prompt, in order. A prompt is a string, token ids, or {"prompt": str (or "prompt_token_ids"),
        "multi_modal_data": {"image": image or [image, ...]}} with one `<|vision_start|><|image_pad|><|vision_end|>` for
        each image (a Pillow image, a path, or a URL).

        A prompt that cannot be served has its reason in `.error`; the others are not affected. sampling_params: one
        for all, or one each (ValueError when their number differs); default: what the checkpoint recommends.
        """
        batch: list[PromptInput] = [prompts] if _is_single(prompts) else list(prompts)  # type: ignore[arg-type, list-item]
        return self._run([lambda prompt=prompt: self._read(prompt) for prompt in batch], sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """One output per conversation, in order; `messages` is one conversation or a list of them, in OpenAI's form.
        Image parts may also be {"type": "image", "image": Pillow image or path}. Errors as in `generate`."""
        single = not messages or isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        chat = self._engine.processor.chat
        read = [
            lambda turns=turns: chat(list(turns), chat_template_kwargs=chat_template_kwargs, trusted=True)
            for turns in conversations
        ]
        return self._run(read, sampling_params, use_tqdm)

    def stats(self) -> dict[str, float]:
        """Counts at this moment, by name: KV blocks, embedding tokens, shared memory, requests."""
        return self._call(self._engine.stats())

    # ---- inside -------------------------------------------------------------------------------------------------

    def _read(self, prompt: PromptInput) -> Prompt:
        completion = self._engine.processor.completion
        if not isinstance(prompt, Mapping):
            return completion(prompt, trusted=True)
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "multi_modal_data"}
        data = prompt.get("multi_modal_data") or {}
        if not isinstance(data, Mapping):
            raise TypeError(f'"multi_modal_data" must be a mapping, not {type(data).__name__}')
        text = prompt.get("prompt", prompt.get("prompt_token_ids"))
        if unknown or set(data) - {"image"} or text is None:
            what = ", ".join(sorted(map(str, [*unknown, *(set(data) - {"image"})]))) or "no prompt"
            raise ValueError(f'a prompt has "prompt" and "multi_modal_data": {{"image": [...]}}, not {what}')
        images = data.get("image", [])
        return completion(text, images if isinstance(images, list | tuple) else [images], trusted=True)

    def _run(
        self,
        read: Sequence[Callable[[], Prompt]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if self._closed:
            raise RuntimeError("this LLM is closed")
        params = sampling_params or SamplingParams(**self._sampling_defaults)
        each = [params] * len(read) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(read):
            raise ValueError(f"{len(read)} prompts but {len(each)} sampling params")
        with tqdm(total=len(read), desc="Processed prompts", disable=not use_tqdm) as bar:
            return self._call(self._run_all(read, each, bar))

    async def _run_all(
        self, read: Sequence[Callable[[], Prompt]], params: Sequence[SamplingParams], bar: tqdm[Any]
    ) -> list[RequestOutput]:
        places = asyncio.Semaphore(self._places)

        async def one(index: int) -> RequestOutput:
            async with places:
                output = await self._complete(index, read[index], params[index])
            bar.update()
            return output

        return list(await asyncio.gather(*(one(index) for index in range(len(read)))))

    async def _complete(self, index: int, read: Callable[[], Prompt], params: SamplingParams) -> RequestOutput:
        completion = CompletionOutput(logprobs=None if params.logprobs is None else [])
        result = RequestOutput(str(index), None, [], [completion], False)
        try:
            prompt = await asyncio.to_thread(read)
            result.prompt = prompt.text
            stream = await self._engine.submit(prompt, params)
            result.prompt_token_ids = list(stream.prompt_token_ids)
            try:
                async for delta in stream:
                    completion.text += delta.text
                    completion.token_ids += delta.token_ids
                    if completion.logprobs is not None:
                        completion.logprobs += delta.logprobs or ()
                    completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
            finally:
                await stream.aclose()
        except RequestError as error:
            result.error = error.message
        except Exception as error:  # whatever one prompt is wrong with must not lose the outputs of the others
            result.error = str(error) or type(error).__name__
        result.finished = True
        return result

    def _call(self, awaitable: Awaitable[Any]) -> Any:
        """Run on the engine's loop; Ctrl-C cancels it there."""
        future = asyncio.run_coroutine_threadsafe(_as_coroutine(awaitable), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


async def _as_coroutine(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _is_single(prompts: Any) -> bool:
    """One prompt, not a list of them; a list of integers is one prompt's token ids."""
    return isinstance(prompts, str | Mapping) or (bool(prompts) and all(isinstance(token, int) for token in prompts))
