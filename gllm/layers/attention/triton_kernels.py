"""The kernels of the `triton` backend: KV write, attention of a tile of queries, and the sum over split contexts.

No launch and no planning here: see `triton.py`. Scores, sums and outputs are accumulated in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Pointers into the middle of a shared buffer and strides that change with every micro-batch: specialising on their
# alignment would compile the kernels anew while requests wait.
VOLATILE = ["items", "query_starts", "contexts", "tables", "table_stride", "split_keys", "tiles"]


@triton.jit
def write_kv(
    key, value, key_cache, value_cache, slots, key_stride, value_stride, ROW: tl.constexpr, ROW_PAD: tl.constexpr
):  # fmt: skip
    """One program a token. ROW: values of a token, kv_heads * head_dim."""
    token = tl.program_id(0).to(tl.int64)
    to = tl.load(slots + token) * ROW
    at = tl.arange(0, ROW_PAD)
    real = at < ROW
    tl.store(key_cache + to + at, tl.load(key + token * key_stride + at, mask=real), mask=real)
    tl.store(value_cache + to + at, tl.load(value + token * value_stride + at, mask=real), mask=real)


@triton.jit
def _read(cache, at, dims, real, MASKED: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Rows of the cache [KEYS, HEAD_PAD]; zeros beyond the head size, and (MASKED) where `real` is false."""
    where = cache + at[:, None] + dims[None, :]
    if HEAD == HEAD_PAD:
        rows = tl.load(where, mask=real[:, None], other=0.0) if MASKED else tl.load(where)
    elif MASKED:
        rows = tl.load(where, mask=real[:, None] & (dims < HEAD)[None, :], other=0.0)
    else:
        rows = tl.load(where, mask=(dims < HEAD)[None, :], other=0.0)
    return rows


@triton.jit
def _scan(
    total, mass, peak, q, limit, begin, end, key_cache, value_cache, table, dims, scale,
    MASKED: tl.constexpr, TOKEN: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys begin .. end - 1 of one sequence and KV head, KEYS at a time, added to the running softmax.

    total [ROWS, HEAD_PAD], mass [ROWS], peak [ROWS]: sum of weighted values, sum of weights, largest score so far (in
    powers of two). MASKED: a row sees keys up to its `limit` only; else all rows see all, and KEYS divides end - begin.
    TOKEN: values between two cached tokens.
    """
    for first in range(begin, end, KEYS):
        keys = first + tl.arange(0, KEYS)
        real = keys < end
        page = tl.load(table + keys // PAGE, mask=real, other=0) if MASKED else tl.load(table + keys // PAGE)
        at = (page.to(tl.int64) * PAGE + keys % PAGE) * TOKEN
        k = _read(key_cache, at, dims, real, MASKED, HEAD, HEAD_PAD)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if MASKED:
            seen = real[None, :] & (keys[None, :] <= limit[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen no key yet has no peak: take any, so that the difference is not a NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(peak - base)
        v = _read(value_cache, at, dims, real, MASKED, HEAD, HEAD_PAD)
        total = tl.dot(weights.to(v.dtype), v, total * fade[:, None], input_precision=PRECISION)
        mass = mass * fade + tl.sum(weights, 1)
        peak = higher
    return total, mass, peak


@triton.jit(do_not_specialize=VOLATILE, do_not_specialize_on_alignment=VOLATILE)
def attend(
    query, key_cache, value_cache, out, partial, partial_mass, partial_peak, items, query_starts, contexts, tables,
    query_stride, table_stride, split_keys, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a work item and KV head. An item [3] is (sequence, first query token, first key); its rows are
    ROWS // GROUP tokens times the GROUP query heads that share the KV head, so that keys are read once for all of them.

    SPLIT: the item covers `split_keys` keys only, and leaves its sums to `combine`; else it writes the output.
    scale: of the scores, times log2(e).
    """
    item = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    sequence = tl.load(items + 3 * item)
    first = tl.load(items + 3 * item + 1)
    begin = tl.load(items + 3 * item + 2)
    start = tl.load(query_starts + sequence)
    num_new = tl.load(query_starts + sequence + 1) - start
    prefix = tl.load(contexts + sequence) - num_new

    TOKENS: tl.constexpr = ROWS // GROUP
    TOKEN: tl.constexpr = KV_HEADS * HEAD
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_PAD)
    token = first + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    real = (token < num_new) & (rows < TOKENS * GROUP)
    inside = real[:, None] & (dims < HEAD)[None, :]
    row = (start + token).to(tl.int64)
    q = tl.load(query + (row * query_stride + head * HEAD)[:, None] + dims[None, :], mask=inside, other=0.0)

    end = prefix + tl.minimum(first + TOKENS, num_new)  # what the last row sees
    if SPLIT:
        end = tl.minimum(end, begin + split_keys)
    seen_by_all = tl.maximum(tl.minimum(prefix + first + 1, end) - begin, 0)
    middle = begin + seen_by_all // KEYS * KEYS
    total = tl.zeros([ROWS, HEAD_PAD], dtype=tl.float32)
    mass = tl.zeros([ROWS], dtype=tl.float32)
    peak = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    table = tables + sequence.to(tl.int64) * table_stride
    key_cache += kv_head * HEAD
    value_cache += kv_head * HEAD
    total, mass, peak = _scan(
        total, mass, peak, q, prefix + token, begin, middle, key_cache, value_cache, table, dims, scale,
        False, TOKEN, PAGE, KEYS, HEAD, HEAD_PAD, PRECISION,
    )  # fmt: skip
    total, mass, peak = _scan(
        total, mass, peak, q, prefix + token, middle, end, key_cache, value_cache, table, dims, scale,
        True, TOKEN, PAGE, KEYS, HEAD, HEAD_PAD, PRECISION,
    )  # fmt: skip
    if SPLIT:
        at = tl.program_id(0).to(tl.int64) * ROWS + rows
        tl.store(partial + at[:, None] * HEAD_PAD + dims[None, :], total)
        tl.store(partial_mass + at, mass)
        tl.store(partial_peak + at, peak)
    else:
        where = out + (row * (KV_HEADS * GROUP * HEAD) + head * HEAD)[:, None] + dims[None, :]
        tl.store(where, (total / mass[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=VOLATILE, do_not_specialize_on_alignment=VOLATILE)
def combine(
    partial, partial_mass, partial_peak, out, tiles, query_starts,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr, ROWS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """One program a query token and head of the tiles that were split; a tile [3] is (sequence, its first item, how
    many items). Sums what `attend` left, and writes the output."""
    TOKENS: tl.constexpr = ROWS // GROUP
    HEADS: tl.constexpr = KV_HEADS * GROUP
    tile = tl.program_id(0) // (TOKENS * HEADS)
    token = tl.program_id(0) // HEADS % TOKENS
    head = tl.program_id(0) % HEADS
    sequence = tl.load(tiles + 3 * tile)
    start = tl.load(query_starts + sequence)
    if token < tl.load(query_starts + sequence + 1) - start:
        splits = tl.arange(0, MAX_SPLITS)
        dims = tl.arange(0, HEAD_PAD)
        real = splits < tl.load(tiles + 3 * tile + 2)
        item = (tl.load(tiles + 3 * tile + 1) + splits).to(tl.int64)
        at = (item * KV_HEADS + head // GROUP) * ROWS + token * GROUP + head % GROUP
        peak = tl.load(partial_peak + at, mask=real, other=float("-inf"))
        mass = tl.load(partial_mass + at, mask=real, other=0.0)
        sums = tl.load(partial + at[:, None] * HEAD_PAD + dims[None, :], mask=real[:, None], other=0.0)
        fade = tl.exp2(peak - tl.max(peak, 0))
        mixed = tl.sum(sums * fade[:, None], 0) / tl.sum(mass * fade, 0)
        where = out + ((start + token).to(tl.int64) * HEADS + head) * HEAD + dims
        tl.store(where, mixed.to(out.dtype.element_ty), mask=dims < HEAD)
