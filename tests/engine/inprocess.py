"""A whole engine in one process, without sockets: the real core, stage runner, encoder and arena, one step at a time.

Encodings and micro-batches are taken in random order, so that what is equal here is equal for any timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from gllm.core.batch import Batch, EncodeBatch
from gllm.core.policy import FixedBudget
from gllm.core.request import Request
from gllm.core.scheduler import SchedulerConfig
from gllm.worker.embeddings import LocalEmbeddings
from gllm.worker.runner import StageRunner
from gllm.worker.step import RequestSpec, StepInput, StepOutput
from rserve.config import RServeConfig
from rserve.core.orchestrator import build
from rserve.embeddings import ReceivedEmbeddings
from rserve.transport.shm import ShmReceiver, ShmSender
from tests.worker.harness import Pixels, Prompt

SCHEMES = ("gllm", "gllm-epd", "rserve-intra", "rserve")


def scheme_config(scheme: str, capacity: int, batch_tokens: int = 16) -> RServeConfig:
    return RServeConfig(
        num_encoders=0 if scheme == "gllm" else 2,
        encoder_batch_tokens=None if scheme == "gllm-epd" else batch_tokens,
        intra_request_overlap=scheme != "gllm-epd",
        inter_request_batching=scheme != "rserve-intra",
        embedding_capacity=capacity,
    )


class InProcessEngine:
    """runner: one stage with a vision encoder; the engine sets its embeddings and pixels."""

    def __init__(
        self, runner: StageRunner, scheme: str, tmp_path: Path, *, budget: int, num_blocks: int, capacity: int = 4096,
        max_in_flight: int = 1, seed: int = 0,
    ) -> None:  # fmt: skip
        self.runner = runner
        self.rng = Random(seed)
        self.config = scheme_config(scheme, capacity)
        scheduler = SchedulerConfig(
            num_blocks=num_blocks, block_size=runner.cache.shape.page_size, max_num_seqs=32, max_in_flight=max_in_flight
        )
        self.core: Any = build(scheduler, FixedBudget(budget), self.config)
        self.pixels = runner.pixels = Pixels()
        model = runner.model.config.hidden_size
        self.receiver = ShmReceiver(tmp_path / "arena", capacity, model, torch.float32)
        self.sender = ShmSender(tmp_path / "arena", capacity, model, torch.float32)
        self.received = ReceivedEmbeddings(self.receiver)
        runner.embeddings = LocalEmbeddings() if scheme == "gllm" else self.received
        self.known: set[int] = set()
        self.running: list[Batch] = []
        self.encoding: list[tuple[EncodeBatch, list[Any]]] = []
        self.pixels_to_come: list[tuple[int, int]] = []
        self.outputs: dict[int, list[int]] = {}

    def run(self, prompts: Sequence[Prompt], num_outputs: int) -> list[list[int]]:
        """Output tokens of every prompt."""
        self.start(prompts, num_outputs)
        while any(self.core.is_live(i) for i in self.outputs):
            self.step(prompts)
        self.settle()
        self.runner.forget(self.core.take_dropped(0.0))
        assert self.runner.take_failures() == {}
        assert self.core.stats().blocks_used == self.receiver.num_rows_used == len(self.received) == 0
        assert not self.runner.states
        return [self.outputs[i] for i in range(len(prompts))]

    def start(self, prompts: Sequence[Prompt], num_outputs: int) -> None:
        for i, prompt in enumerate(prompts):
            self.core.on_request(Request(i, tuple(prompt.token_ids), prompt.items, num_outputs), 0.0)
            self.outputs[i] = []
            for index, image in enumerate(prompt.images):
                self.pixels.images[i, index] = image
                self.pixels_to_come.append((i, index))

    def step(self, prompts: Sequence[Prompt]) -> None:
        choice = self.rng.random()
        if self.pixels_to_come and choice < 0.5:
            place = self.rng.randrange(min(4, len(self.pixels_to_come)))
            self.core.on_item_ready(*self.pixels_to_come.pop(place), 0.0)
        self.give_encodes()
        if self.encoding and choice < 0.7:
            self.encode(self.rng.randrange(len(self.encoding)))
        while (batch := self.core.next_batch(0.0)) is not None:
            self.settle()
            self.running.append(batch)
        if self.running:
            self.execute(self.running.pop(0), prompts)

    def settle(self) -> None:
        if self.config.num_encoders:
            for ref in self.core.take_released():
                self.received.release(ref.request_id, ref.index)

    def give_encodes(self) -> None:
        for encoder in range(self.config.num_encoders):
            while (batch := self.core.next_encode(encoder, 0.0)) is not None:
                self.settle()
                self.encoding.append((batch, [self.receiver.allocate(ref.num_tokens) for ref in batch.items]))

    def encode(self, which: int) -> None:
        batch, places = self.encoding.pop(which)
        images = [self.pixels.pixels(ref.request_id, ref.index) for ref in batch.items]
        rows = self.runner.vision.encode(images, [self.runner.vision.grid_of(image) for image in images])
        wanted = set(self.core.on_encoded(batch.batch_id, 0.0))
        for ref, place, item_rows in zip(batch.items, places, rows, strict=True):
            self.sender.write(place, item_rows)
            if ref in wanted:
                self.received.bind(ref.request_id, ref.index, place)
            else:
                self.receiver.free(place)

    def execute(self, batch: Batch, prompts: Sequence[Prompt]) -> None:
        self.known -= set(batch.dropped)
        new = [chunk.request_id for chunk in batch.chunks if chunk.request_id not in self.known]
        self.known.update(new)
        tokens = [t for c in batch.chunks for t in self.core.tokens(c.request_id, c.start, c.num_tokens)]
        specs = [
            RequestSpec(
                i, len(prompts[i].token_ids), (*prompts[i].token_ids, *self.core.outputs(i)), prompts[i].items,
                prompts[i].sampling,
            )
            for i in new
        ]  # fmt: skip
        output = self.runner.execute(StepInput(batch, tuple(tokens), tuple(specs)))
        assert isinstance(output, StepOutput)
        for sampled in self.core.on_batch_done(batch.batch_id, dict(output.tokens), 0.0):
            self.outputs[sampled.request_id].append(sampled.token_id)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
