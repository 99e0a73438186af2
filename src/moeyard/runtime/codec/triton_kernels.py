"""Encode and decode on a GPU, one pass over memory each. Bound by memory: what receivers hold is read and written once.

A program has a block of 1024 values of one expert. Rows of tables say which expert of the stack, of what is held and of the message
it is; messages are 32-bit words, a scale in the upper or lower half of one.
"""
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(1024)


@triton.jit
def _place(rows, width, at):
    """(row of the master, of what is held, of the message; block; places of its values; which of them are there)."""
    block, i = tl.program_id(0), tl.program_id(1)
    place = block * 1024 + at
    return (
        tl.load(rows + 3 * i),
        tl.load(rows + 3 * i + 1),
        tl.load(rows + 3 * i + 2),
        block,
        place,
        place < width,
    )


@triton.jit
def _scale(total, count):
    return (total / count.to(tl.float32)).to(tl.bfloat16).to(tl.float32)


@triton.jit(do_not_specialize=["width", "stride", "first"])
def encode_bits(master, held, words, halves, rows, width, stride, first, BITS: tl.constexpr):
    """stride, first: words of a message, and where this stack's begin."""
    at = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    own, copy, message, block, place, there = _place(rows, width, at)
    known = tl.load(held + copy * width + place, mask=there, other=0.0)
    e = tl.load(master + own * width + place, mask=there, other=0.0).to(tl.float32) - known
    size = tl.abs(e)
    scale = _scale(tl.sum(tl.sum(size, axis=1), axis=0), tl.minimum(width - block * 1024, 1024))
    shift = tl.arange(0, 32)[:, None]
    into = words + message * stride + first + block * (32 * BITS) + tl.arange(0, 32)
    tl.store(into, tl.sum((e < 0).to(tl.int32) << shift, axis=0))
    step = scale
    if BITS == 2:
        large = size >= scale * 1.25
        tl.store(into + 32, tl.sum(large.to(tl.int32) << shift, axis=0))
        step = tl.where(large, scale * 1.875, scale * 0.5625)
    tl.store(held + copy * width + place, known + tl.where(e < 0, -step, step), mask=there)
    blocks = (width + 1023) // 1024
    tl.store(halves + 2 * (message * stride + first + blocks * (32 * BITS)) + block, scale.to(tl.bfloat16))


@triton.jit(do_not_specialize=["width", "stride", "first"])
def decode_bits(weights, held, words, halves, rows, width, stride, first, BITS: tl.constexpr):
    at = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    own, copy, message, block, place, there = _place(rows, width, at)
    known = tl.load(held + copy * width + place, mask=there, other=0.0)
    blocks = (width + 1023) // 1024
    scale = tl.load(halves + 2 * (message * stride + first + blocks * (32 * BITS)) + block).to(tl.float32)
    shift = tl.arange(0, 32)[:, None]
    source = words + message * stride + first + block * (32 * BITS) + tl.arange(0, 32)
    negative = (tl.load(source)[None, :] >> shift) & 1
    step = scale
    if BITS == 2:
        large = (tl.load(source + 32)[None, :] >> shift) & 1
        step = tl.where(large == 1, scale * 1.875, scale * 0.5625)
    known += tl.where(negative == 1, -step, step)
    tl.store(held + copy * width + place, known, mask=there)
    tl.store(weights + own * width + place, known.to(weights.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["width", "stride", "first"])
def encode_pick(
    master, held, words, halves, rows, width, stride, first, N: tl.constexpr, PLANES: tl.constexpr
):
    """Of N values, 1024 / N apart, the largest."""
    GROUPS: tl.constexpr = 1024 // N
    LANES: tl.constexpr = GROUPS // 32
    at = tl.arange(0, N)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    own, copy, message, block, place, there = _place(rows, width, at)
    known = tl.load(held + copy * width + place, mask=there, other=0.0)
    e = tl.load(master + own * width + place, mask=there, other=0.0).to(tl.float32) - known
    size = tl.abs(e)
    scale = _scale(tl.sum(tl.max(size, axis=0), axis=0), tl.minimum(width - block * 1024, GROUPS))
    chosen = tl.argmax(size, axis=0)
    taken = tl.arange(0, N)[:, None] == chosen[None, :]
    negative = tl.sum((taken & (e < 0)).to(tl.int32), axis=0)
    known += tl.where(taken, tl.where(negative[None, :] == 1, -scale, scale), 0.0)
    tl.store(held + copy * width + place, known, mask=there)
    code = tl.reshape(chosen | (negative * N), (32, LANES))
    into = words + message * stride + first + block * (LANES * PLANES) + tl.arange(0, LANES)
    for plane in tl.static_range(PLANES):
        bits = ((code >> plane) & 1) << tl.arange(0, 32)[:, None]
        tl.store(into + plane * LANES, tl.sum(bits, axis=0))
    blocks = (width + 1023) // 1024
    tl.store(
        halves + 2 * (message * stride + first + blocks * (LANES * PLANES)) + block, scale.to(tl.bfloat16)
    )


@triton.jit(do_not_specialize=["width", "stride", "first"])
def decode_pick(
    weights, held, words, halves, rows, width, stride, first, N: tl.constexpr, PLANES: tl.constexpr
):
    GROUPS: tl.constexpr = 1024 // N
    LANES: tl.constexpr = GROUPS // 32
    at = tl.arange(0, N)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    own, copy, message, block, place, there = _place(rows, width, at)
    known = tl.load(held + copy * width + place, mask=there, other=0.0)
    blocks = (width + 1023) // 1024
    scale = tl.load(halves + 2 * (message * stride + first + blocks * (LANES * PLANES)) + block).to(
        tl.float32
    )
    group = tl.arange(0, GROUPS)
    source = words + message * stride + first + block * (LANES * PLANES) + group % LANES
    code = tl.zeros((GROUPS,), tl.int32)
    for plane in tl.static_range(PLANES):
        code |= ((tl.load(source + plane * LANES) >> (group // LANES)) & 1) << plane
    taken = tl.arange(0, N)[:, None] == (code & (N - 1))[None, :]
    known += tl.where(taken, tl.where((code >= N)[None, :], -scale, scale), 0.0)
    tl.store(held + copy * width + place, known, mask=there)
    tl.store(weights + own * width + place, known.to(weights.dtype.element_ty), mask=there)
