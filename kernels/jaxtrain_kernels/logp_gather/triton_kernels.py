"""Bodies of the Triton kernels that compute hidden @ head.T in tiles and reduce them: imported
only where Triton is installed. `triton_gpu.py` documents their results."""

import triton
import triton.language as tl

from jaxtrain_kernels.triton_tiles import order


@triton.jit
def logits(
    hidden_ptr,
    head_ptr,
    t,
    v,
    T: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_V: tl.constexpr,
    TILE_D: tl.constexpr,
):
    """float32 [TILE_T, TILE_V]: hidden[t] @ head[v].T; 0 outside of [T, V]. TILE_D divides D."""
    d = tl.arange(0, TILE_D)
    # 64 bits: T * D and V * D may exceed int32.
    hidden_ptrs = hidden_ptr + t.to(tl.int64)[:, None] * D + d[None, :]
    head_ptrs = head_ptr + v.to(tl.int64)[:, None] * D + d[None, :]
    acc = tl.zeros((TILE_T, TILE_V), tl.float32)
    for _ in range(0, D, TILE_D):
        if T % TILE_T == 0:
            hidden = tl.load(hidden_ptrs)
        else:
            hidden = tl.load(hidden_ptrs, mask=(t < T)[:, None], other=0.0)
        if V % TILE_V == 0:
            head = tl.load(head_ptrs)
        else:
            head = tl.load(head_ptrs, mask=(v < V)[:, None], other=0.0)
        # float32 sums; no logit is rounded before the softmax.
        acc = tl.dot(hidden, tl.trans(head), acc)
        hidden_ptrs += TILE_D
        head_ptrs += TILE_D
    return acc


@triton.jit
def bent(raw, SOFTCAP: tl.constexpr):
    """tanh(raw / SOFTCAP) to 1e-6; the hardware's own instruction has only 11 bits."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(raw * (2.885390081777927 / SOFTCAP)))


@triton.jit
def statistics(
    hidden_ptr,
    head_ptr,
    factor_ptr,
    active_ptr,
    out_ptr,
    T: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_V: tl.constexpr,
    TILE_D: tl.constexpr,
    WALK: tl.constexpr,
):
    """out [3, tiles of V, T]."""
    # Chunks without a weight are skipped on the device: which ones is data.
    if tl.load(active_ptr) == 0:
        return
    TILES: tl.constexpr = (V + TILE_V - 1) // TILE_V
    # Programs of neighboring tiles run at one time and share operands in L2.
    row, column = order(tl.program_id(0), tl.cdiv(T, TILE_T), TILES, WALK)
    t = row * TILE_T + tl.arange(0, TILE_T)
    v = column * TILE_V + tl.arange(0, TILE_V)
    z = logits(hidden_ptr, head_ptr, t, v, T, V, D, TILE_T, TILE_V, TILE_D)
    if SOFTCAP is not None:
        z = SOFTCAP * bent(z, SOFTCAP)
    if V % TILE_V:
        # Columns past the vocabulary: finite, so that 0 times their power is not NaN.
        z = tl.where((v < V)[None, :], z, -1e30)
    factor = tl.load(factor_ptr + t, mask=t < T, other=1.0)
    top = tl.max(z, 1) * factor
    power = tl.maximum(z * factor[:, None] - top[:, None], -150.0)  # 2^-150 is 0: no 0 * -inf
    weight = tl.exp2(power)
    out_ptrs = out_ptr + column * T + t
    tl.store(out_ptrs, top, mask=t < T)
    tl.store(out_ptrs + TILES * T, tl.sum(weight, 1), mask=t < T)
    tl.store(out_ptrs + 2 * TILES * T, tl.sum(weight * power, 1), mask=t < T)


@triton.jit
def exponentials(
    hidden_ptr,
    head_ptr,
    factor_ptr,
    base_ptr,
    active_ptr,
    into_ptr,
    sums_ptr,
    T: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_V: tl.constexpr,
    TILE_D: tl.constexpr,
    WALK: tl.constexpr,
):
    if tl.load(active_ptr) == 0:
        return
    TILES: tl.constexpr = (V + TILE_V - 1) // TILE_V
    row, column = order(tl.program_id(0), tl.cdiv(T, TILE_T), TILES, WALK)
    t = row * TILE_T + tl.arange(0, TILE_T)
    v = column * TILE_V + tl.arange(0, TILE_V)
    z = logits(hidden_ptr, head_ptr, t, v, T, V, D, TILE_T, TILE_V, TILE_D)
    sums_ptrs = sums_ptr + column * T + t
    slope = 1.0
    if SOFTCAP is not None:
        raw = tl.where((v < V)[None, :], z, -1e30)
        # The largest raw logit is needed too: weights are scaled by the cap's slope and do not show
        # it.
        tl.store(sums_ptrs + 2 * TILES * T, tl.max(raw, 1), mask=t < T)
        tanh = bent(z, SOFTCAP)
        z = SOFTCAP * tanh
        slope = 1.0 - tanh * tanh
    factor = tl.load(factor_ptr + t, mask=t < T, other=0.0)
    base = tl.load(base_ptr + t, mask=t < T, other=0.0)
    power = z * factor[:, None] - base[:, None]
    weight = tl.exp2(power)
    moment = weight * power
    if V % TILE_V:
        # `base` is a row's lse, or an estimate of it, so masked columns must be zeroed explicitly.
        weight = tl.where((v < V)[None, :], weight, 0.0)
        moment = tl.where((v < V)[None, :], moment, 0.0)
    inside = (t < T)[:, None] & (v < V)[None, :]
    into_ptrs = into_ptr + t.to(tl.int64)[:, None] * V + v[None, :]
    tl.store(into_ptrs, (weight * slope).to(into_ptr.dtype.element_ty), mask=inside)
    tl.store(sums_ptrs, tl.sum(weight, 1), mask=t < T)
    tl.store(sums_ptrs + TILES * T, tl.sum(moment, 1), mask=t < T)


@triton.jit
def d_logits(
    hidden_ptr,
    head_ptr,
    first_ptr,
    factor_ptr,
    base_ptr,
    a_ptr,
    b_ptr,
    out_ptr,
    T: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_V: tl.constexpr,
    TILE_D: tl.constexpr,
    WALK: tl.constexpr,
):
    row, column = order(tl.program_id(0), tl.cdiv(T, TILE_T), tl.cdiv(V, TILE_V), WALK)
    t = row * TILE_T + tl.arange(0, TILE_T)
    v = column * TILE_V + tl.arange(0, TILE_V)
    # `first` is data, so that one compiled kernel serves all chunks of the vocabulary.
    head_ptr += tl.load(first_ptr).to(tl.int64) * D
    z = logits(hidden_ptr, head_ptr, t, v, T, V, D, TILE_T, TILE_V, TILE_D)
    slope = 1.0
    if SOFTCAP is not None:
        tanh = bent(z, SOFTCAP)
        z = SOFTCAP * tanh
        slope = 1.0 - tanh * tanh
    inside = t < T
    factor = tl.load(factor_ptr + t, mask=inside, other=0.0)
    base = tl.load(base_ptr + t, mask=inside, other=0.0)
    a = tl.load(a_ptr + t, mask=inside, other=0.0)
    b = tl.load(b_ptr + t, mask=inside, other=0.0)
    power = z * factor[:, None] - base[:, None]
    # p is recomputed from the logits: cheaper than storing [T, V] probabilities.
    dz = tl.exp2(power) * (a[:, None] - b[:, None] * power) * slope
    out_ptrs = out_ptr + t.to(tl.int64)[:, None] * V + v[None, :]
    tl.store(out_ptrs, dz.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (v < V)[None, :])
