"""The parts around the grouped matmuls, one Triton kernel each. Bound by memory: every byte is moved once.

Widths are cut into blocks of a power of two; EVEN says that they divide the width, so no column is masked. Offsets of rows are
int64: a product of rows and widths passes 2**31. Numbers of rows are not specialised: each new one would compile anew.
"""
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import triton
import triton.language as tl

from moeyard.runtime.block.launch import kernel


@triton.jit
def _chosen(index, at, pairs, experts):
    """Experts of these pairs: `experts` for no choice, one more for no pair."""
    chosen = tl.load(index + at, mask=at < pairs, other=0)
    chosen = tl.where((chosen < 0) | (chosen >= experts), experts, chosen).to(tl.int32)
    return tl.where(at < pairs, chosen, experts + 1)


@kernel("pairs")
def sort_few(index, row, pair, ends, pairs, experts, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """A stable sort in one launch, each pair against all: for so few that launches cost more than comparisons. After the ends of all
    experts: whether every choice is one."""
    lane = tl.arange(0, BLOCK)
    at = tl.program_id(0) * BLOCK + lane
    chosen = _chosen(index, at, pairs, experts)
    found = tl.zeros((BLOCK,), tl.int32)
    tally = tl.zeros((BINS,), tl.int32)
    for first in range(0, pairs, BLOCK):
        other = _chosen(index, first + lane, pairs, experts)
        same = (other[None, :] == chosen[:, None]) & ((first + lane)[None, :] < at[:, None])
        found += tl.sum((same | (other[None, :] < chosen[:, None])).to(tl.int32), axis=1)
        tally += tl.histogram(other, BINS)
    tl.store(row + at, found, mask=at < pairs)
    tl.store(pair + found, at, mask=at < pairs)
    if tl.program_id(0) == 0:
        bins = tl.arange(0, BINS)
        tl.store(ends + bins, tl.cumsum(tally, axis=0), mask=bins < experts)
        outside = tl.sum(tl.where(bins == experts, tally, 0), axis=0)
        tl.store(ends + experts, (outside == 0).to(tl.int32))


@kernel("pairs", "blocks")
def count(index, counts, pairs, experts, blocks, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """counts[expert, block]: how many pairs of this block chose each expert; the row after the last is no choice."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    found = tl.histogram(_chosen(index, at, pairs, experts), BINS)
    bins = tl.arange(0, BINS)
    tl.store(counts + bins * blocks + block, found, mask=bins <= experts)


@kernel("pairs", "blocks")
def number(index, stops, row, pair, ends, pairs, experts, blocks, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """A stable counting sort's second half. stops[expert, block]: where the block's rows for the expert end. After the ends of all
    experts: whether every choice is one."""
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    at = block * BLOCK + lane
    chosen = _chosen(index, at, pairs, experts)
    same = (chosen[:, None] == chosen[None, :]) & (lane[None, :] < lane[:, None])
    before = tl.sum(same.to(tl.int32), axis=1)
    cell = chosen * blocks + block
    found = before + tl.load(stops + cell - 1, mask=(cell > 0) & (at < pairs), other=0)
    tl.store(row + at, found, mask=at < pairs)
    tl.store(pair + found, at, mask=at < pairs)
    if block == 0:
        bins = tl.arange(0, BINS)
        last = tl.load(stops + (bins + 1) * blocks - 1, mask=bins < experts)
        tl.store(ends + bins, last, mask=bins < experts)
        total = tl.load(stops + experts * blocks - 1)
        tl.store(ends + experts, (total == pairs).to(tl.int32))


@kernel("count")
def spread(x, row, rows, count, width, top_k, TOP: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """rows[row[token, k]] = x[token]: a token is read once and written for all its choices that have one of the `count` rows."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, TOP)
    to = tl.load(row + token * top_k + k, mask=k < top_k, other=0).to(tl.int64)
    there = tl.broadcast_to(((k < top_k) & (to < count))[:, None], (TOP, BLOCK))
    if EVEN:
        value = tl.load(x + token * width + column)
    else:
        value = tl.load(x + token * width + column, mask=column < width)
        there = there & (column < width)[None, :]
    tl.store(
        rows + to[:, None] * width + column[None, :],
        tl.broadcast_to(value[None, :], (TOP, BLOCK)),
        mask=there,
    )


@kernel()
def gather_sum(
    rows,
    row,
    weights,
    ends,
    sums,
    experts,
    width,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """sums[token] = sum over k of weights[token, k] * rows[row[token, k]], in float32; rows past the last count nothing."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(ends + experts - 1)
    result = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP):
        at = tl.load(row + token * TOP + k)
        there = at < total
        start = rows + at.to(tl.int64) * width
        if EVEN:
            value = tl.load(start + column, mask=there, other=0.0).to(tl.float32)
        else:
            value = tl.load(start + column, mask=there & (column < width), other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * TOP + k, mask=there, other=0.0).to(tl.float32)
        result += value
    to = sums + token * width + column
    if EVEN:
        tl.store(to, result.to(sums.dtype.element_ty))
    else:
        tl.store(to, result.to(sums.dtype.element_ty), mask=column < width)


@kernel("count")
def swiglu(product, inner, count, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """inner = silu(gate) * up, in float32; product rows are gate, then up, each `width` long."""
    at = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    there = (at < count) & (column < width)
    gate = tl.load(product + at * 2 * width + column, mask=there).to(tl.float32)
    up = tl.load(product + at * 2 * width + width + column, mask=there).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(inner + at * width + column, value.to(inner.dtype.element_ty), mask=there)


@kernel("count")
def swiglu_back(
    product,
    d_inner,
    d_product,
    weights,
    pair,
    d_weights,
    ends,
    experts,
    count,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
):
    """d_product from d_inner, which becomes scale * inner; d_weights = <d_inner, inner>. d_product may be product itself:
    each element is read before the same program writes it.
    """
    at = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    scale = tl.full((ROWS,), 1.0, tl.float32)
    if SCALED:
        place = tl.load(pair + at, mask=at < count, other=0)
        scale = tl.load(weights + place, mask=at < count, other=0.0).to(tl.float32)
    dots = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, width, BLOCK):
        column = (first + tl.arange(0, BLOCK))[None, :]
        there = (at[:, None] < count) & (column < width)
        to_gate = at[:, None] * 2 * width + column
        to_inner = at[:, None] * width + column
        gate = tl.load(product + to_gate, mask=there, other=0.0).to(tl.float32)
        up = tl.load(product + to_gate + width, mask=there, other=0.0).to(tl.float32)
        given = tl.load(d_inner + to_inner, mask=there, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        inner = silu * up
        dots += given * inner
        given *= scale[:, None]
        d_gate = given * up * (sigmoid + silu * (1.0 - sigmoid))
        tl.store(d_product + to_gate, d_gate.to(d_product.dtype.element_ty), mask=there)
        tl.store(d_product + to_gate + width, (given * silu).to(d_product.dtype.element_ty), mask=there)
        tl.store(d_inner + to_inner, (inner * scale[:, None]).to(d_inner.dtype.element_ty), mask=there)
    if SCALED:
        total = tl.load(ends + experts - 1)
        tl.store(d_weights + place, tl.where(at < total, tl.sum(dots, axis=1), 0.0), mask=at < count)


@kernel("count")
def add_bias(rows, bias, expert, count, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """rows[i] += bias[expert[i]]."""
    at = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    there = (at[:, None] < count) & (column < width)
    own = tl.load(expert + at, mask=at < count, other=0).to(tl.int64)[:, None]
    to = rows + at[:, None] * width + column
    value = tl.load(to, mask=there).to(tl.float32) + tl.load(bias + own * width + column, mask=there).to(
        tl.float32
    )
    tl.store(to, value.to(rows.dtype.element_ty), mask=there)


@kernel("count")
def bias_dot(rows, bias, expert, dots, ends, experts, count, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """dots[i] = <rows[i], bias[expert[i]]>; zero past the last row."""
    at = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    own = tl.load(expert + at, mask=at < count, other=0).to(tl.int64)[:, None]
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, width, BLOCK):
        column = (first + tl.arange(0, BLOCK))[None, :]
        there = (at[:, None] < count) & (column < width)
        value = tl.load(rows + at[:, None] * width + column, mask=there, other=0.0).to(tl.float32)
        sums += value * tl.load(bias + own * width + column, mask=there, other=0.0).to(tl.float32)
    total = tl.load(ends + experts - 1)
    tl.store(dots + at, tl.where(at < total, tl.sum(sums, axis=1), 0.0), mask=at < count)


@kernel("count")
def clear_tail(rows, ends, experts, count, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """rows[ends[-1]:] = 0. Programs above the tail leave at once."""
    total = tl.load(ends + experts - 1)
    first = tl.program_id(0) * ROWS
    if first + ROWS > total:
        at = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
        there = (at >= total) & (at < count) & (column < width)
        tl.store(rows + at * width + column, tl.zeros((ROWS, BLOCK), rows.dtype.element_ty), mask=there)
