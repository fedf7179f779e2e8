"""A micro-batch as tensors: what a stage worker knows of its requests, and the model's inputs made from it at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gllm.core.batch import Chunk
from gllm.layers.attention.base import AttentionInputs
from gllm.models.qwen2_5_vl import PositionTable
from gllm.worker.step import RequestSpec


class RequestState:
    """What a worker keeps of one request between micro-batches."""

    def __init__(self, spec: RequestSpec, merge_size: int) -> None:
        self.spec = spec
        self.token_ids = list(spec.token_ids)  # known tokens: the prompt, then output as it comes in
        self.position_table = PositionTable(spec.items, merge_size)
        self._blocks = np.empty(16, dtype=np.int32)
        self.num_blocks = 0

    @property
    def block_table(self) -> np.ndarray:
        """int32 [num_blocks]"""
        return self._blocks[: self.num_blocks]

    @property
    def num_outputs(self) -> int:
        """Output tokens known so far: the position of the one that is sampled next."""
        return len(self.token_ids) - self.spec.num_prompt_tokens

    def append(self, chunk: Chunk, token_ids: Sequence[int]) -> None:
        """Take over the chunk's new blocks, and those of its tokens that were not known yet."""
        if chunk.new_blocks:
            needed = self.num_blocks + len(chunk.new_blocks)
            if needed > len(self._blocks):
                self._blocks = np.concatenate([self.block_table, np.empty(needed, dtype=np.int32)])
            self._blocks[self.num_blocks : needed] = chunk.new_blocks
            self.num_blocks = needed
        known = len(self.token_ids) - chunk.start
        self.token_ids.extend(token_ids[max(known, 0) :])


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """token_ids int64 [n]; positions int64 [3, n]; sample_rows int64 [s]: the rows whose next token is sampled."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    sample_rows: torch.Tensor
    attention: AttentionInputs


def build_inputs(
    chunks: Sequence[Chunk],
    token_ids: Sequence[int],
    states: Mapping[int, RequestState],
    page_size: int,
    device: torch.device,
) -> ModelInputs:
    """The inputs of a micro-batch with at least one chunk; the states already include the chunks' blocks.

    Everything is laid out on the host in two arrays and copied to the device once each.
    """
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    lens = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
    ends = np.cumsum(lens)
    total = int(ends[-1])
    tables = _block_tables([states[chunk.request_id] for chunk in chunks])
    row = np.repeat(np.arange(len(chunks)), lens)
    place = np.arange(total) - np.repeat(ends - lens - starts, lens)
    sample_rows = ends[[i for i, chunk in enumerate(chunks) if chunk.sample]] - 1

    wide = np.empty(5 * total + len(sample_rows), dtype=np.int64)
    wide[:total] = token_ids
    _fill_positions(chunks, states, wide[total : 4 * total].reshape(3, total))
    wide[4 * total : 5 * total] = tables[row, place // page_size].astype(np.int64) * page_size + place % page_size
    wide[5 * total :] = sample_rows
    narrow = np.concatenate([[0], ends, starts + lens, tables.reshape(-1)]).astype(np.int32)

    ids, flat_positions, slots, samples = _to_device(wide, device).split([total, 3 * total, total, len(sample_rows)])
    query_starts, contexts, blocks = _to_device(narrow, device).split([len(chunks) + 1, len(chunks), tables.size])
    attention = AttentionInputs(
        query_lens=lens.tolist(),
        context_lens=(starts + lens).tolist(),
        host_block_tables=tables,
        block_tables=blocks.view(tables.shape),
        query_starts=query_starts,
        context_lens_device=contexts,
        slots=slots,
        page_size=page_size,
    )
    return ModelInputs(ids, flat_positions.view(3, total), samples, attention)


def _block_tables(states: Sequence[RequestState]) -> np.ndarray:
    tables = np.zeros((len(states), max(state.num_blocks for state in states)), dtype=np.int32)
    for table, state in zip(tables, states, strict=True):
        table[: state.num_blocks] = state.block_table
    return tables


def _fill_positions(chunks: Sequence[Chunk], states: Mapping[int, RequestState], out: np.ndarray) -> None:
    at = 0
    for chunk in chunks:
        table = states[chunk.request_id].position_table
        if chunk.num_tokens == 1 and chunk.start >= table.end:  # a decode: no need for arrays
            out[:, at] = chunk.start + table.delta
        else:
            out[:, at : at + chunk.num_tokens] = table.positions(chunk.start, chunk.num_tokens)
        at += chunk.num_tokens


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
