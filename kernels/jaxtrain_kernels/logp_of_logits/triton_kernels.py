"""The body of logp_of_logits' Triton kernel; imported only where Triton is."""

import triton
import triton.language as tl


@triton.jit
def row_statistics(
    logits_ptr,
    factor_ptr,
    out_ptr,
    T: tl.constexpr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    LENGTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """out [3, PARTS, T] of given logits: a program reads LENGTH tiles of a row, once."""
    t, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    logits_ptr += t.to(tl.int64) * V
    factor = tl.load(factor_ptr + t)
    top = -1e30  # below any logit, yet finite: 0 times the first shift must not be NaN
    total = tl.zeros((TILE,), tl.float32)
    moment = tl.zeros((TILE,), tl.float32)
    first = part * LENGTH
    for tile in range(first, tl.minimum(first + LENGTH, tl.cdiv(V, TILE))):
        v = tile * TILE + tl.arange(0, TILE)
        if V % TILE == 0:
            x = tl.load(logits_ptr + v)
        else:
            x = tl.load(logits_ptr + v, mask=v < V, other=-float("inf"))
        x = x.to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0) * factor)
        shift = top - higher
        decay = tl.exp2(shift)
        power = tl.maximum(x * factor - higher, -150.0)  # 2^-150 is 0: no 0 * -inf
        weight = tl.exp2(power)
        moment = (moment + total * shift) * decay + weight * power
        total = total * decay + weight
        top = higher
    out_ptrs = out_ptr + part * T + t
    tl.store(out_ptrs, top)
    tl.store(out_ptrs + PARTS * T, tl.sum(total, 0))
    tl.store(out_ptrs + 2 * PARTS * T, tl.sum(moment, 0))
