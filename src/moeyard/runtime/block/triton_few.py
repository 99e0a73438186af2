"""Grouped matmuls for few rows an expert: they gather their rows while loading, so that there are few launches and no gathered rows.

A tile of rows belongs to one expert; tiles are counted expert by expert. Matrices are read by their strides, in either layout.
"""
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import triton
import triton.language as tl

from moeyard.runtime.block.launch import kernel


@triton.jit
def _tile(ends, tile, experts, ROWS: tl.constexpr, BINS: tl.constexpr):
    """(expert, first row, end of its rows) of a tile; past the last tile the expert is none."""
    bins = tl.arange(0, BINS)
    stop = tl.load(ends + bins, mask=bins < experts, other=0)
    start = tl.load(ends + bins - 1, mask=(bins > 0) & (bins < experts), other=0)
    tiles = tl.where(bins < experts, (stop - start + ROWS - 1) // ROWS, 0)
    until = tl.cumsum(tiles, axis=0)
    own = tl.sum((until <= tile).to(tl.int32), axis=0)
    first = tl.sum(tl.where(bins == own, start + (tile - until + tiles) * ROWS, 0), axis=0)
    end = tl.sum(tl.where(bins == own, stop, 0), axis=0)
    return own, first, end


@kernel()
def gate_up(
    x,
    pair,
    ends,
    matrix,
    product,
    inner,
    experts,
    width,
    columns,
    by_expert,
    by_in,
    by_out,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEEP: tl.constexpr,
    BINS: tl.constexpr,
):
    """product[row] = x[token of the row] @ matrix[expert], and inner[row] of it by SwiGLU; `columns` of the inner rows."""
    own, first, end = _tile(ends, tl.program_id(0), experts, ROWS, BINS)
    if own < experts:
        row = first + tl.arange(0, ROWS)
        token = tl.load(pair + row, mask=row < end, other=0).to(tl.int64) // TOP
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        matrix += own.to(tl.int64) * by_expert
        gate = tl.zeros((ROWS, BLOCK), tl.float32)
        up = tl.zeros((ROWS, BLOCK), tl.float32)
        for at in range(0, width, DEEP):
            deep = at + tl.arange(0, DEEP)
            given = tl.load(
                x + token[:, None] * width + deep[None, :],
                mask=(row < end)[:, None] & (deep < width)[None, :],
                other=0.0,
            )
            there = (deep < width)[:, None] & (column < columns)[None, :]
            place = matrix + deep.to(tl.int64)[:, None] * by_in
            beside = column.to(tl.int64)[None, :]
            gate = tl.dot(given, tl.load(place + beside * by_out, mask=there, other=0.0), gate)
            up = tl.dot(given, tl.load(place + (beside + columns) * by_out, mask=there, other=0.0), up)
        gate = gate.to(product.dtype.element_ty)
        up = up.to(product.dtype.element_ty)
        there = (row < end)[:, None] & (column < columns)[None, :]
        to = product + row.to(tl.int64)[:, None] * 2 * columns + column[None, :]
        tl.store(to, gate, mask=there)
        tl.store(to + columns, up, mask=there)
        gate = gate.to(tl.float32)
        value = gate * tl.sigmoid(gate) * up.to(tl.float32)
        to = inner + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(to, value.to(inner.dtype.element_ty), mask=there)


@kernel()
def times(
    x,
    pair,
    ends,
    matrix,
    out,
    experts,
    width,
    columns,
    by_expert,
    by_in,
    by_out,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEEP: tl.constexpr,
    BINS: tl.constexpr,
):
    """out[row] = x[token of the row] @ matrix[expert], or x[row] @ it where TOP is 0."""
    own, first, end = _tile(ends, tl.program_id(0), experts, ROWS, BINS)
    if own < experts:
        row = first + tl.arange(0, ROWS)
        source = row.to(tl.int64)
        if TOP > 0:
            source = tl.load(pair + row, mask=row < end, other=0).to(tl.int64) // TOP
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        matrix += own.to(tl.int64) * by_expert
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for at in range(0, width, DEEP):
            deep = at + tl.arange(0, DEEP)
            given = tl.load(
                x + source[:, None] * width + deep[None, :],
                mask=(row < end)[:, None] & (deep < width)[None, :],
                other=0.0,
            )
            place = matrix + deep.to(tl.int64)[:, None] * by_in + column.to(tl.int64)[None, :] * by_out
            there = (deep < width)[:, None] & (column < columns)[None, :]
            total = tl.dot(given, tl.load(place, mask=there, other=0.0), total)
        to = out + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=(row < end)[:, None] & (column < columns)[None, :])


@triton.jit
def _source(pair, row, there, TOP: tl.constexpr, LONG: tl.constexpr):
    """Where the rows lie on a side that has a row for each token, with TOP choices, or for each row if that is 0."""
    found = row
    if TOP > 0:
        if there is None:
            found = tl.load(pair + row) // TOP
        else:
            found = tl.load(pair + row, mask=there, other=0) // TOP
    if LONG:
        found = found.to(tl.int64)
    return found


@triton.jit
def _side(values, source, there, column, width):
    """Rows of one side; there: which of them are, or None for all and all columns."""
    place = values + (source * width)[:, None] + column[None, :]
    if there is None:
        found = tl.load(place)
    else:
        found = tl.load(place, mask=there[:, None] & (column < width)[None, :], other=0.0)
    return found


@kernel()
def outer(
    left,
    right,
    pair,
    ends,
    out,
    high,
    wide,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    LONG: tl.constexpr,
):
    """out[expert] = sum over its rows of left[row]^T right[row]; LEFT, RIGHT: that side has a row for each token, with so many choices.
    An expert without rows gets zeros. LONG: places pass 2**31. Tiles go down eight, then across: what they share stays near."""
    own = tl.program_id(1)
    tall = tl.cdiv(high, HIGH)
    broad = tl.cdiv(wide, WIDE)
    first = tl.program_id(0) // (8 * broad) * 8
    inside = tl.program_id(0) % (8 * broad)
    size = tl.minimum(tall - first, 8)
    m = (first + inside % size) * HIGH + tl.arange(0, HIGH)
    n = (inside // size) * WIDE + tl.arange(0, WIDE)
    start = tl.load(ends + own - 1, mask=own > 0, other=0)
    end = tl.load(ends + own)
    lane = tl.arange(0, ROWS)
    total = tl.zeros((HIGH, WIDE), tl.float32)
    last = start
    if EVEN:  # whole tiles, without a mask
        last = end - (end - start) % ROWS
        for at in range(start, last, ROWS):
            a = _side(left, _source(pair, at + lane, None, LEFT, LONG), None, m, high)
            b = _side(right, _source(pair, at + lane, None, RIGHT, LONG), None, n, wide)
            total = tl.dot(tl.trans(a), b, total)
    for at in range(last, end, ROWS):
        there = at + lane < end
        a = _side(left, _source(pair, at + lane, there, LEFT, LONG), there, m, high)
        b = _side(right, _source(pair, at + lane, there, RIGHT, LONG), there, n, wide)
        total = tl.dot(tl.trans(a), b, total)
    to = out + own.to(tl.int64) * high * wide + m.to(tl.int64)[:, None] * wide + n[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(m < high)[:, None] & (n < wide)[None, :])
