"""Functions shared by Triton kernels; imported only by their modules, where Triton is installed."""

import triton
import triton.language as tl


@triton.jit
def order(index, rows, columns, WALK: tl.constexpr):
    """(row tile, column tile) of a program: WALK row tiles, then the next column tile, so that
    programs under way at one time share what they read."""
    group = index // (WALK * columns)
    first = group * WALK
    height = tl.minimum(rows - first, WALK)
    within = index % (WALK * columns)
    return first + within % height, within // height


@triton.jit
def load(ptrs, rows, columns, CUT_ROWS: tl.constexpr, CUT_COLUMNS: tl.constexpr):
    """A tile with zeros where `rows` or `columns` are False, if any can be."""
    if CUT_ROWS and CUT_COLUMNS:
        return tl.load(ptrs, mask=rows[:, None] & columns[None, :], other=0.0)
    elif CUT_ROWS:
        return tl.load(ptrs, mask=rows[:, None], other=0.0)
    elif CUT_COLUMNS:
        return tl.load(ptrs, mask=columns[None, :], other=0.0)
    else:
        return tl.load(ptrs)
