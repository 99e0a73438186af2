"""The kernel that copies rows by a table of pieces: one launch packs a stage's messages and brings to their places what has arrived."""
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first"])
def move_rows(
    table,
    first,
    source,
    scratch,
    output,
    width,
    SPACES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Piece: (from, to, rows), up to ROWS rows one after another; a place is row * SPACES + space. Spaces: source, scratch, output."""
    piece = table + (first + tl.program_id(0)).to(tl.int64) * 3
    origin = tl.load(piece)
    target = tl.load(piece + 1)
    rows = tl.load(piece + 2)
    begin = source
    if origin % SPACES == 1:
        begin = scratch
    end = scratch
    if target % SPACES == 2:
        end = output
    row = tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    there = (row < rows) & (column < width)
    offset = row.to(tl.int64) * width + column
    value = tl.load(begin + (origin // SPACES) * width + offset, mask=there)
    tl.store(end + (target // SPACES) * width + offset, value, mask=there)
