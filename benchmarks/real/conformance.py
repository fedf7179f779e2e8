"""Runs attention backends on ragged batches in a paged cache, and compares them with `sdpa` in float32 on the CPU.

python -m benchmarks.real.conformance --backend triton [--device cuda] [--dtype bfloat16] [--all]

Prints a JSON line for each case with the largest absolute difference. Without a GPU, `triton` needs TRITON_INTERPRET=1.
The default cases have every pair of head size, group and page size; --all has every combination.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch

from gllm.layers.attention.base import AttentionBackend, AttentionInputs, AttentionSetting, load_backend
from gllm.layers.attention.sdpa import SdpaAttention

HEAD_DIMS = (32, 64, 80, 128)
GROUPS = (1, 4, 8)  # query heads that share a KV head
PAGE_SIZES = (8, 16, 32)
KV_HEADS = 2  # more than one, else a mix-up of KV heads would go unseen
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 2e-2}  # of an output of about 1

Mix = Sequence[tuple[int, int]]
# (new tokens, tokens in all) of each sequence: decodes, whole prompts and chunks with a prefix, in no order; lengths
# around the ends of pages and tiles.
SHORT: Mix = ((1, 40), (5, 5), (1, 1), (3, 19), (1, 65), (17, 48))
LONG: Mix = ((1, 3000), (700, 2100), (1, 70), (1000, 1000), (2, 515), (1, 4096), (130, 4000))


@dataclass(frozen=True, slots=True)
class Case:
    head_dim: int
    group: int
    page_size: int


def every_pair(page_sizes: Sequence[int] = PAGE_SIZES) -> list[Case]:
    """Twelve cases in which every pair of values occurs."""
    return [
        Case(head_dim, group, page_sizes[(i + j) % len(page_sizes)])
        for i, head_dim in enumerate(HEAD_DIMS)
        for j, group in enumerate(GROUPS)
    ]


def every_case(page_sizes: Sequence[int] = PAGE_SIZES) -> list[Case]:
    return [Case(*values) for values in product(HEAD_DIMS, GROUPS, page_sizes)]


@dataclass(frozen=True, slots=True)
class Problem:
    """A micro-batch: queries, keys and values are views of one tensor, as in the model; block tables are shuffled; the
    cache is full of stale values wherever no prefix stands."""

    inputs: AttentionInputs
    qkv: torch.Tensor  # [num_tokens, heads + 2 * KV_HEADS, head_dim]
    caches: tuple[torch.Tensor, torch.Tensor]

    def run(self, backend: AttentionBackend) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The output [num_tokens, heads, head_dim], and both caches afterwards."""
        copy = replace(self, caches=(self.caches[0].clone(), self.caches[1].clone()))
        plan = backend.plan(self.inputs, self.qkv.dtype, self.qkv.device)
        return copy.bound(backend)(plan), *copy.caches

    def bound(self, backend: AttentionBackend) -> Callable[[Any], torch.Tensor]:
        """The backend's `forward` over this problem's own tensors and caches: plan -> output."""
        heads = self.qkv.shape[1] - 2 * KV_HEADS
        parts = self.qkv.split([heads, KV_HEADS, KV_HEADS], dim=1)
        return lambda plan: backend.forward(*parts, *self.caches, plan)

    def to(self, dtype: torch.dtype, device: torch.device) -> Problem:
        old = self.inputs
        inputs = AttentionInputs(
            query_lens=old.query_lens,
            context_lens=old.context_lens,
            host_block_tables=old.host_block_tables,
            block_tables=old.block_tables.to(device),
            query_starts=old.query_starts.to(device),
            context_lens_device=old.context_lens_device.to(device),
            slots=old.slots.to(device),
            page_size=old.page_size,
        )
        key_cache, value_cache = (cache.to(device, dtype) for cache in self.caches)
        return Problem(inputs, self.qkv.to(device, dtype), (key_cache, value_cache))


def make_problem(case: Case, mix: Mix, seed: int = 0) -> Problem:
    """On the CPU, in float32."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-context // case.page_size) for _, context in mix]
    numbers = np.random.default_rng(seed).permutation(sum(pages) + 3)
    tables = np.zeros((len(mix), max(pages)), dtype=np.int32)
    slots, at = [], 0
    for table, count, (new, context) in zip(tables, pages, mix, strict=True):
        table[:count] = numbers[at : at + count]
        at += count
        place = np.arange(context - new, context)
        slots.append(table[place // case.page_size].astype(np.int64) * case.page_size + place % case.page_size)
    query_lens, context_lens = [new for new, _ in mix], [context for _, context in mix]
    inputs = AttentionInputs(
        query_lens=query_lens,
        context_lens=context_lens,
        host_block_tables=tables,
        block_tables=torch.from_numpy(tables),
        query_starts=torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32),
        context_lens_device=torch.tensor(context_lens, dtype=torch.int32),
        slots=torch.from_numpy(np.concatenate(slots)),
        page_size=case.page_size,
    )
    heads = KV_HEADS * (case.group + 2)
    qkv = torch.randn(sum(query_lens), heads, case.head_dim, generator=generator)
    size = (len(numbers), case.page_size, KV_HEADS, case.head_dim)
    key_cache, value_cache = (torch.randn(size, generator=generator) for _ in range(2))
    return Problem(inputs, qkv, (key_cache, value_cache))


def difference(backend: AttentionBackend, case: Case, mix: Mix, dtype: torch.dtype, device: torch.device) -> float:
    """The largest absolute difference of the backend, in `dtype` on `device`, from `sdpa` in float32 on the CPU over
    the same values; infinite when the cache afterwards is not the same bit for bit."""
    problem = make_problem(case, mix).to(dtype, device)
    out, *caches = problem.run(backend)
    expected, *expected_caches = problem.to(torch.float32, torch.device("cpu")).run(SdpaAttention())
    if not all(torch.equal(a.float().cpu(), b) for a, b in zip(caches, expected_caches, strict=True)):
        return float("inf")
    error = (out.float().cpu() - expected).abs().max()
    return float(error.nan_to_num(nan=float("inf")))


def setting_of(case: Case, dtype: torch.dtype, device: torch.device) -> AttentionSetting:
    return AttentionSetting(device=device, dtype=dtype, head_dim=case.head_dim, page_size=case.page_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    torch.set_num_threads(1)
    for case in every_case() if args.all else every_pair():
        backend = load_backend(args.backend, setting_of(case, dtype, device))
        error = difference(backend, case, SHORT, dtype, device)
        print(json.dumps(asdict(case) | {"backend": args.backend, "dtype": args.dtype, "error": error}), flush=True)


if __name__ == "__main__":
    main()
