"""Every attention backend against `sdpa`, over ragged batches in a paged cache; which backend is taken where.

Triton's interpreter is chosen when triton is imported, for the whole process: those runs have a process of their own.
flash-attn is not there without a GPU: a stand-in checks what it is asked, by the rules of its own interface.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.real.conformance import GROUPS, HEAD_DIMS, PAGE_SIZES, Case, difference, every_pair
from gllm.config import EngineConfig
from gllm.layers.attention.base import BACKENDS, AttentionSetting, load_backend

ROOT = Path(__file__).parent.parent.parent
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

# The 7B model's sizes, its group being no power of two. In float16: the interpreter would multiply bfloat16 values as
# if their bits were integers.
HALF = Case(head_dim=128, group=7, page_size=16)

# Every other case has tiles so small that contexts are split, and that a tile's rows are several tokens of some heads.
INTERPRETED = """
import json, sys, torch
from benchmarks.real.conformance import SHORT, Case, difference
from gllm.layers.attention.triton import Tiles, TritonAttention
torch.set_num_threads(1)
split = Tiles(rows=32, few_rows=16, keys=16, min_split=16, programs=12, num_warps=4, few_warps=4, num_stages=1)
for number, (case, dtype) in enumerate(json.loads(sys.argv[1])):
    backend = TritonAttention(split if number % 2 else None)
    print(difference(backend, Case(*case), SHORT, getattr(torch, dtype), torch.device("cpu")))
"""


@pytest.fixture(scope="module")
def interpreted() -> dict[Case, float]:
    """The largest difference of each case, from a process with Triton's interpreter."""
    cases = dict.fromkeys(every_pair(), "float32") | {HALF: "float16"}
    values = json.dumps([((case.head_dim, case.group, case.page_size), dtype) for case, dtype in cases.items()])
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    out = subprocess.run(
        [sys.executable, "-c", INTERPRETED, values], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr
    return dict(zip(cases, map(float, out.stdout.split()), strict=True))


def test_the_cases_have_every_pair_of_values():
    cases = every_pair()
    assert {(c.head_dim, c.group) for c in cases} == {(d, g) for d in HEAD_DIMS for g in GROUPS}
    assert {(c.head_dim, c.page_size) for c in cases} == {(d, p) for d in HEAD_DIMS for p in PAGE_SIZES}
    assert {(c.group, c.page_size) for c in cases} == {(g, p) for g in GROUPS for p in PAGE_SIZES}


@needs_triton
@pytest.mark.parametrize("case", every_pair(), ids=lambda case: f"{case.head_dim}-{case.group}-{case.page_size}")
def test_triton_is_sdpa_in_float32(interpreted, case):
    assert interpreted[case] < 2e-3


@needs_triton
def test_triton_takes_16_bit_values_and_groups_that_are_no_power_of_two(interpreted):
    assert interpreted[HALF] < 5e-3


@needs_triton
@pytest.mark.parametrize("part", ["attend", "split", "combine"])
def test_the_kernels_compile_for_hopper(part):
    """Up to machine code, without a GPU: the 7B model's sizes, on tensor cores."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from gllm.layers.attention import triton_kernels
    from gllm.layers.attention.triton import MAX_SPLITS, tile_sizes

    sizes = tile_sizes(torch.bfloat16, CPU)
    numbers = {"KV_HEADS": 4, "GROUP": 7, "HEAD": 128, "HEAD_PAD": 128, "PAGE": 16, "KEYS": sizes.keys}
    numbers |= {"SPLIT": part != "attend", "PRECISION": "tf32", "MAX_SPLITS": MAX_SPLITS}
    numbers |= {"ROWS": sizes.rows if part == "attend" else sizes.few_rows}
    pointers = dict.fromkeys(("query", "key_cache", "value_cache", "out"), "*bf16")
    pointers |= dict.fromkeys(("partial", "partial_mass", "partial_peak"), "*fp32") | {"scale": "fp32"}
    pointers |= dict.fromkeys(("items", "tiles", "query_starts", "contexts", "tables"), "*i32")
    kernel = triton_kernels.combine if part == "combine" else triton_kernels.attend
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in numbers else pointers.get(n, "i32") for n in names},
        constexprs={(i,): numbers[n] for i, n in enumerate(names) if n in numbers},
        attrs={
            (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in ("query", "key_cache", "value_cache")
        },
    )
    warps = sizes.num_warps if part == "attend" else sizes.few_warps
    options = {"num_warps": warps, "num_stages": sizes.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    product = {"attend": "wgmma.mma_async", "split": "mma.sync", "combine": "add"}[part]
    assert product in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 227 << 10


# ---- flash ----------------------------------------------------------------------------------------------------------


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, block_table=None
):  # fmt: skip
    """What flash-attn 2 documents for a paged cache: k, v [num_blocks, page, kv_heads, d]; causal masks are aligned to
    the lower right corner."""
    page = k.shape[1]
    assert page % 256 == 0
    assert causal
    for index in (cu_seqlens_q, cu_seqlens_k, block_table):
        assert index.dtype == torch.int32
        assert index.stride(-1) == 1
    starts, ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert (starts[0], starts[-1], ends[0]) == (0, len(q), 0)
    assert len(starts) == len(ends) == len(block_table) + 1
    assert max_seqlen_q == max(b - a for a, b in itertools.pairwise(starts))
    assert max_seqlen_k == max(b - a for a, b in itertools.pairwise(ends))
    outs = []
    for i, table in enumerate(block_table):
        queries, length = q[starts[i] : starts[i + 1]], ends[i + 1] - ends[i]
        keys, values = (cache[table.long()].flatten(0, 1)[:length] for cache in (k, v))
        group = q.shape[1] // k.shape[2]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("nhd,mhd->hnm", queries, keys) / math.sqrt(q.shape[2])
        later = torch.ones(len(queries), length, dtype=torch.bool).triu(length - len(queries) + 1)
        outs.append(torch.einsum("hnm,mhd->nhd", scores.masked_fill(later, -torch.inf).softmax(-1), values))
    return torch.cat(outs)


@pytest.fixture
def flash_attn(monkeypatch):
    """A machine with flash-attn and an H200."""
    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.parametrize(
    "mix",
    [
        [(1, 40), (1, 600), (1, 1)],
        [(5, 5), (9, 300), (300, 520)],
        [(1, 40), (1, 300), (6, 6), (9, 530), (1, 65), (17, 48)],
    ],
    ids=["decodes", "prompts", "mixed"],
)
def test_flash_is_asked_for_the_same_as_sdpa(flash_attn, mix):
    case = Case(head_dim=32, group=4, page_size=256)
    assert difference(load_backend("flash"), case, mix, torch.float32, CPU) < 2e-5


# ---- which one ------------------------------------------------------------------------------------------------------


def setting(device=CUDA, dtype=torch.bfloat16, head_dim=128, page_size=256) -> AttentionSetting:
    return AttentionSetting(device=device, dtype=dtype, head_dim=head_dim, page_size=page_size)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"page_size": 16}, r"pages of a multiple of 256 tokens, not 16: use --page-size 256 or .*triton"),
        ({"dtype": torch.float32}, "16-bit values, not torch.float32: use --attention-backend triton"),
        ({"head_dim": 36}, "no head size of 36"),
        ({"head_dim": 512}, "no head size of 512"),
        ({"device": CPU}, "needs a CUDA device: use --attention-backend sdpa"),
    ],
)
def test_flash_refuses_what_flash_attn_cannot_do(flash_attn, changed, why):
    with pytest.raises(ValueError, match=f"'flash' cannot be used here: .*{why}"):
        load_backend("flash", setting(**changed))


def test_flash_says_so_when_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ValueError, match=r"'flash' cannot be used here: .*flash_attn"):
        load_backend("flash")


@needs_triton
@pytest.mark.parametrize(
    ("changed", "chosen"),
    [
        ({}, "FlashAttention"),
        ({"page_size": 16}, "TritonAttention"),
        ({"dtype": torch.float32}, "TritonAttention"),
        ({"head_dim": 512}, "SdpaAttention"),
        ({"device": CPU}, "SdpaAttention"),
    ],
)
def test_auto_takes_the_first_that_serves_the_setting(flash_attn, changed, chosen):
    assert type(load_backend("auto", setting(**changed))).__name__ == chosen


@needs_triton
def test_auto_is_triton_on_cuda_without_flash_attn(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert type(load_backend("auto", setting())).__name__ == "TritonAttention"


@needs_triton
def test_triton_refuses_a_cpu_and_large_heads():
    with pytest.raises(ValueError, match=r"needs a CUDA device .*: use --attention-backend sdpa"):
        load_backend("triton", setting(device=CPU))
    with pytest.raises(ValueError, match="head size 512 is above 256"):
        load_backend("triton", setting(head_dim=512))


def test_the_option_knows_the_backends():
    with pytest.raises(ValueError, match="--attention-backend must be one of auto, sdpa, triton, flash, got 'nope'"):
        EngineConfig(attention_backend="nope")
    for name in BACKENDS:
        assert EngineConfig(attention_backend=name).attention_backend == name
