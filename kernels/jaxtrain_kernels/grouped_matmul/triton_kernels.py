"""The bodies of grouped_matmul's Triton kernels; imported only where Triton is."""

import triton
import triton.language as tl

from jaxtrain_kernels.triton_tiles import load, order


@triton.jit
def product(
    x_ptr,
    w_ptr,
    group_ptr,
    active_ptr,
    out_ptr,
    BLOCKS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    WALK: tl.constexpr,
):
    """out[p] = x[p] @ w[group of p], zeros in unused blocks; w [E, K, N], TRANSPOSED [E, N, K]."""
    CUT_N: tl.constexpr = N % TILE_N != 0
    CUT_K: tl.constexpr = K % TILE_K != 0
    block, column = order(tl.program_id(0), BLOCKS, tl.cdiv(N, TILE_N), WALK)
    p = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    n = column * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    used_n = n < N
    w_ptr += tl.load(group_ptr + block).to(tl.int64) * (K * N)
    x_ptrs = x_ptr + p[:, None] * K + k[None, :]
    if TRANSPOSED:
        w_ptrs = w_ptr + n[:, None] * K + k[None, :]
    else:
        w_ptrs = w_ptr + k[:, None] * N + n[None, :]
    acc = tl.zeros((BLOCK, TILE_N), tl.float32)
    steps = tl.where(block < tl.load(active_ptr), tl.cdiv(K, TILE_K), 0)
    for step in range(0, steps):
        used_k = k < K - step * TILE_K
        x = load(x_ptrs, k == k, used_k, False, CUT_K)
        if TRANSPOSED:
            w = tl.trans(load(w_ptrs, used_n, used_k, CUT_N, CUT_K))
            w_ptrs += TILE_K
        else:
            w = load(w_ptrs, used_k, used_n, CUT_K, CUT_N)
            w_ptrs += TILE_K * N
        # float32 sums over the whole depth; results are rounded once.
        acc = tl.dot(x, w, acc)
        x_ptrs += TILE_K
    out_ptrs = out_ptr + p[:, None] * N + n[None, :]
    if CUT_N:
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=used_n[None, :])
    else:
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty))


@triton.jit
def weight_gradient(
    x_ptr,
    dy_ptr,
    starts_ptr,
    ends_ptr,
    out_ptr,
    K: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_N: tl.constexpr,
    WALK: tl.constexpr,
):
    """out[e] [K, N] = x^T dy over the rows of expert e, ROWS at a time; zeros where it has none."""
    CUT_N: tl.constexpr = N % TILE_N != 0
    CUT_K: tl.constexpr = K % TILE_K != 0
    TILES_K: tl.constexpr = (K + TILE_K - 1) // TILE_K
    TILES_N: tl.constexpr = (N + TILE_N - 1) // TILE_N
    expert = tl.program_id(0) // (TILES_K * TILES_N)
    row, column = order(tl.program_id(0) % (TILES_K * TILES_N), TILES_K, TILES_N, WALK)
    k = row * TILE_K + tl.arange(0, TILE_K)
    n = column * TILE_N + tl.arange(0, TILE_N)
    used_k, used_n = k < K, n < N
    start, end = tl.load(starts_ptr + expert), tl.load(ends_ptr + expert)
    p = start.to(tl.int64) + tl.arange(0, ROWS)
    # Read as x^T: by tl.trans the tile would pass through registers instead of being copied ahead.
    x_ptrs = x_ptr + k[:, None] + p[None, :] * K
    dy_ptrs = dy_ptr + p[:, None] * N + n[None, :]
    acc = tl.zeros((TILE_K, TILE_N), tl.float32)
    for _ in range(start, end, ROWS):
        x = load(x_ptrs, used_k, p >= 0, CUT_K, False)
        dy = load(dy_ptrs, p >= 0, used_n, False, CUT_N)
        acc = tl.dot(x, dy, acc)
        x_ptrs += ROWS * K
        dy_ptrs += ROWS * N
    out_ptrs = out_ptr + expert.to(tl.int64) * (K * N) + k[:, None] * N + n[None, :]
    if CUT_K or CUT_N:
        mask = used_k[:, None] & used_n[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty))
