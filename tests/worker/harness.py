"""Drives stage runners through whole requests with hand-made micro-batches: a tiny synchronous engine for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gllm.core.batch import Batch, Chunk, ItemRef, ItemSlice
from gllm.core.request import Item
from gllm.sampling_params import SamplingParams
from gllm.worker.runner import StageRunner
from gllm.worker.step import RequestSpec, StepInput, StepOutput, TokenLogprobs

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Prompt:
    """token_ids with placeholders where items stand; images: uint8 [H, W, 3] for each item."""

    token_ids: list[int]
    items: tuple[Item, ...] = ()
    images: tuple[torch.Tensor, ...] = ()
    sampling: SamplingParams = GREEDY


class Pixels:
    """A `PixelSource` over a dict."""

    def __init__(self) -> None:
        self.images: dict[tuple[int, int], torch.Tensor] = {}

    def pixels(self, request_id: int, index: int) -> torch.Tensor:
        return self.images[request_id, index]


@dataclass
class Running:
    """One request on its way through the harness."""

    request_id: int
    prompt: Prompt
    known: list[int]
    done: int = 0  # tokens computed
    blocks: list[int] = field(default_factory=list)
    is_new: bool = True
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.known[len(self.prompt.token_ids) :]


class Harness:
    """stages: the runners, first to last; the first one has the vision encoder and reads pixels from `self.pixels`."""

    def __init__(self, stages: Sequence[StageRunner], num_blocks: int) -> None:
        self.stages = stages
        self.pixels = Pixels()
        stages[0].pixels = self.pixels
        self.page_size = stages[0].cache.shape.page_size
        # Handed out from both ends in turn, so that block tables are not consecutive.
        self.free = [b for pair in zip(range(num_blocks), reversed(range(num_blocks)), strict=True) for b in pair]
        self.free = self.free[:num_blocks]
        self.next_id = 0
        self.dropped: list[int] = []

    def start(self, prompt: Prompt) -> Running:
        request = Running(self.next_id, prompt, list(prompt.token_ids))
        self.next_id += 1
        for index, image in enumerate(prompt.images):
            self.pixels.images[request.request_id, index] = image
        return request

    def step(self, work: Sequence[tuple[Running, int]], fed: list[str] | None = None) -> StepOutput:
        """One micro-batch: the next `n` tokens of each request. Appends what was sampled to the requests."""
        new, chunks, tokens, encode = [], [], [], []
        for request, num in work:
            if request.is_new:
                new.append(self._spec(request))
                encode += [ItemRef(request.request_id, i, it.num_tokens) for i, it in enumerate(request.prompt.items)]
                request.is_new = False
            chunks.append(self._chunk(request, num))
            tokens += request.known[request.done : request.done + num]
            request.done += num
        batch = Batch(0, tuple(chunks), tuple(self.dropped), tuple(encode))
        self.dropped = []
        step = StepInput(batch, tuple(tokens), tuple(new))
        out: StepOutput | torch.Tensor | None = None
        for stage in self.stages:
            out = stage.execute(step, hidden=out, on_fed=None if fed is None else lambda: fed.append("fed"))
        assert isinstance(out, StepOutput)
        by_id = {request.request_id: request for request, _ in work}
        for i, (request_id, token) in enumerate(out.tokens):
            by_id[request_id].known.append(token)
            by_id[request_id].logprobs.append(out.logprobs[i] if out.logprobs else None)
        return out

    def finish(self, request: Running) -> None:
        """Give the request's blocks back; the stages learn of it with the next step."""
        self.free += request.blocks
        request.blocks = []
        self.dropped.append(request.request_id)

    def preempt(self, request: Running) -> None:
        """As `finish`, but the request starts again from its first token, with its output as known tokens."""
        self.finish(request)
        request.done = 0
        request.is_new = True

    def run(self, prompts: Sequence[Prompt], num_outputs: int, chunk: int = 10**9) -> list[Running]:
        """All prompts together, each in chunks of `chunk` tokens, until each has `num_outputs` output tokens."""
        requests = [self.start(prompt) for prompt in prompts]
        while unfinished := [r for r in requests if len(r.output) < num_outputs]:
            self.step([(r, min(chunk, len(r.known) - r.done)) for r in unfinished])
        for request in requests:
            self.finish(request)
        return requests

    def _spec(self, request: Running) -> RequestSpec:
        prompt = request.prompt
        return RequestSpec(
            request.request_id, len(prompt.token_ids), tuple(request.known), prompt.items, prompt.sampling
        )

    def _chunk(self, request: Running, num: int) -> Chunk:
        start, end = request.done, request.done + num
        needed = -(-end // self.page_size) - len(request.blocks)
        new_blocks = tuple(self.free.pop(0) for _ in range(max(needed, 0)))
        request.blocks += new_blocks
        items = []
        for index, item in enumerate(request.prompt.items):
            first, last = max(start, item.offset), min(end, item.end)
            if first < last:
                items.append(ItemSlice(index, first - item.offset, last - first, first - start))
        return Chunk(request.request_id, start, num, new_blocks, end == len(request.known), tuple(items))
