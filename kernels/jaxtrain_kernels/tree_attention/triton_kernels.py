"""The bodies of tree attention's Triton kernels; imported only where Triton is.

A program has one tile of queries (of keys in `keys_gradient`) of one head and two lists of blocks
of the other side: what is wholly visible, and what wants the mask. Each list has its loop, so that
neither branches. Keys may stand in another order than the row's (`blocks.arrange`): `order` says
where each is read, and where its gradient goes. Scores and the log-sum-exp are to base 2.

Head dims are DIM + REST (192 = 128 + 64): a tile has a power of two of columns. All arrays are
row-major [B, T, heads, dims]; offsets that grow with the batch or the row are 64 bits wide.
"""

import triton
import triton.language as tl


@triton.jit
def tile_of(order_ptr, HEADS: tl.constexpr, TILES: tl.constexpr):
    """(row of the batch, number of the tile in it, both as one number, head) of a program: the
    longest tiles first, heads of a tile side by side, for they share what they read."""
    item = tl.program_id(0)
    tile = tl.load(order_ptr + item // HEADS)
    return (tile // TILES).to(tl.int64), tile % TILES, tile.to(tl.int64), item % HEADS


@triton.jit
def read(ptr, row, STRIDE: tl.constexpr, DIMS: tl.constexpr, used, CUT: tl.constexpr):
    """[rows, DIMS] of an array; zeros where CUT and not `used`."""
    ptrs = ptr + row[:, None] * STRIDE + tl.arange(0, DIMS)[None, :]
    if CUT:
        return tl.load(ptrs, mask=used[:, None], other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def write(ptr, row, STRIDE: tl.constexpr, DIMS: tl.constexpr, used, CUT: tl.constexpr, values):
    ptrs = ptr + row[:, None] * STRIDE + tl.arange(0, DIMS)[None, :]
    values = values.to(ptr.dtype.element_ty)
    if CUT:
        tl.store(ptrs, values, mask=used[:, None])
    else:
        tl.store(ptrs, values)


@triton.jit
def place_of(order_ptr, key, ORDERED: tl.constexpr):
    """Return the keys' places in the row."""
    if ORDERED:
        return tl.load(order_ptr + key).to(tl.int64)
    else:
        return key.to(tl.int64)


@triton.jit
def product(a, b, rest_a, rest_b, REST: tl.constexpr, PRECISION: tl.constexpr):
    """[m, n] = a b^T, the rest of the dims added."""
    # Head dims that are no power of two (192, 80) are a power of two and a rest: Triton's tiles
    # must be powers of two, and padding would waste up to half of the matmul.
    out = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    if REST:
        out = tl.dot(rest_a, tl.trans(rest_b), out, input_precision=PRECISION)
    return out


@triton.jit
def capped(score, CAP: tl.constexpr):
    """tanh(score * CAP) to 1e-6 where there is a softcap: the hardware's own has 11 bits."""
    if CAP != 0.0:
        return 1.0 - 2.0 / (1.0 + tl.exp2(score * (CAP * 2.885390081777927)))  # 2 / ln 2
    else:
        return score


@triton.jit
def slope(weight, score, CAP: tl.constexpr):
    """`weight` times the derivative of capped scores, up to a constant factor."""
    if CAP != 0.0:
        return weight * (1.0 - score * score)
    else:
        return weight


@triton.jit
def attend(
    acc,
    top,
    total,
    q,
    q_rest,
    row,
    position,
    k_ptr,
    v_ptr,
    since_ptr,
    until_ptr,
    key_position_ptr,
    order_ptr,
    list_ptr,
    count,
    MASKED: tl.constexpr,
    S: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    CAP: tl.constexpr,
    LOGIT: tl.constexpr,
    WINDOW: tl.constexpr,
    ORDERED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The softmax of a tile over one list of key blocks."""
    # Constexpr: unmasked blocks are compiled without bounds checks.
    CUT: tl.constexpr = MASKED and S % K_BLOCK != 0  # a cut block is never wholly visible
    for i in range(0, count):
        key = (tl.load(list_ptr + i) >> 1) * K_BLOCK + tl.arange(0, K_BLOCK)
        used = key < S
        slot = place_of(order_ptr, key, ORDERED)
        k = read(k_ptr, slot, K_STRIDE, DIM, used, CUT)
        k_rest = k
        if REST:
            k_rest = read(k_ptr + DIM, slot, K_STRIDE, REST, used, CUT)
        v = read(v_ptr, slot, V_STRIDE, VALUE, used, CUT)
        score = capped(product(q, k, q_rest, k_rest, REST, PRECISION), CAP)
        if MASKED:
            since, until = tl.load(since_ptr + key), tl.load(until_ptr + key)
            seen = (row[:, None] >= since[None, :]) & (row[:, None] < until[None, :])
            if WINDOW:
                key_position = tl.load(key_position_ptr + key)
                seen &= position[:, None] - key_position[None, :] < WINDOW
            score = tl.where(seen, score, float("-inf"))
        new = tl.maximum(top, tl.max(score, 1) * LOGIT)
        base = new
        if MASKED:  # a query that has seen nothing yet: -inf - -inf is not a number
            base = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp2(score * LOGIT - base[:, None])
        # Online softmax: sums so far are rescaled to the new maximum.
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None]
        # Weights are rounded to the values' dtype for the tensor cores; sums stay float32.
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new
    return acc, top, total


@triton.jit
def forward(
    q_ptr,
    k_ptr,
    v_ptr,
    since_ptr,
    until_ptr,
    position_ptr,
    key_position_ptr,
    order_ptr,
    tiles_ptr,
    whole_count_ptr,
    whole_ptr,
    part_count_ptr,
    part_ptr,
    out_ptr,
    lse_ptr,
    T: tl.constexpr,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    CAP: tl.constexpr,
    LOGIT: tl.constexpr,
    WINDOW: tl.constexpr,
    ORDERED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out [B, T, N, VALUE] and the log-sum-exp float32 [B, N, T]; a query that sees nothing gets 0
    and +inf. The arrays of keys and the lists are whole blocks long, q, k and v are not."""
    TILES: tl.constexpr = (T + Q_BLOCK - 1) // Q_BLOCK
    BLOCKS: tl.constexpr = (S + K_BLOCK - 1) // K_BLOCK
    CUT: tl.constexpr = T % Q_BLOCK != 0
    KEYS: tl.constexpr = BLOCKS * K_BLOCK
    Q_STRIDE: tl.constexpr = HEADS * (DIM + REST)
    K_STRIDE: tl.constexpr = KEY_HEADS * (DIM + REST)
    V_STRIDE: tl.constexpr = KEY_HEADS * VALUE
    batch, number, tile, head = tile_of(tiles_ptr, HEADS, TILES)
    key_head = head // (HEADS // KEY_HEADS)
    row = number * Q_BLOCK + tl.arange(0, Q_BLOCK)
    # 64 bits: offsets of long batches with many heads exceed int32.
    wide, used = row.to(tl.int64), row < T
    q_ptr += batch * T * Q_STRIDE + head * (DIM + REST)
    k_ptr += batch * S * K_STRIDE + key_head * (DIM + REST)
    v_ptr += batch * S * V_STRIDE + key_head * VALUE
    q = read(q_ptr, wide, Q_STRIDE, DIM, used, CUT)
    q_rest = q
    if REST:
        q_rest = read(q_ptr + DIM, wide, Q_STRIDE, REST, used, CUT)
    position = row
    if WINDOW:
        position = tl.load(position_ptr + batch * TILES * Q_BLOCK + row)
    acc = tl.zeros((Q_BLOCK, VALUE), tl.float32)
    top = tl.full((Q_BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((Q_BLOCK,), tl.float32)
    # Whole blocks first, then those that need the mask: two specialized loops.
    for masked in tl.static_range(2):
        count = tl.load((part_count_ptr if masked else whole_count_ptr) + tile)
        acc, top, total = attend(
            acc,
            top,
            total,
            q,
            q_rest,
            row,
            position,
            k_ptr,
            v_ptr,
            since_ptr + batch * KEYS,
            until_ptr + batch * KEYS,
            key_position_ptr + batch * KEYS,
            order_ptr + batch * KEYS,
            (part_ptr if masked else whole_ptr) + tile * BLOCKS,
            count,
            masked == 1,
            S,
            K_STRIDE,
            V_STRIDE,
            DIM,
            REST,
            VALUE,
            K_BLOCK,
            CAP,
            LOGIT,
            WINDOW,
            ORDERED,
            PRECISION,
        )
    # A query that sees nothing gets 0, and an lse of +inf, by which its weights vanish backwards.
    empty = total == 0.0
    acc = acc * tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))[:, None]
    lse = tl.where(empty, float("inf"), top + tl.log2(tl.where(empty, 1.0, total)))
    out_ptr += batch * T * (HEADS * VALUE) + head * VALUE
    write(out_ptr, wide, HEADS * VALUE, VALUE, used, CUT, acc)
    tl.store(lse_ptr + (batch * HEADS + head) * T + row, lse, mask=used)


@triton.jit
def attend_back(
    dq,
    dq_rest,
    q,
    q_rest,
    d_out,
    lse,
    delta,
    row,
    position,
    k_ptr,
    v_ptr,
    since_ptr,
    until_ptr,
    key_position_ptr,
    order_ptr,
    list_ptr,
    count,
    MASKED: tl.constexpr,
    S: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    CAP: tl.constexpr,
    LOGIT: tl.constexpr,
    WINDOW: tl.constexpr,
    ORDERED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq of a tile, without the scale, from one list of key blocks."""
    CUT: tl.constexpr = MASKED and S % K_BLOCK != 0
    for i in range(0, count):
        key = (tl.load(list_ptr + i) >> 1) * K_BLOCK + tl.arange(0, K_BLOCK)
        used = key < S
        slot = place_of(order_ptr, key, ORDERED)
        k = read(k_ptr, slot, K_STRIDE, DIM, used, CUT)
        k_rest = k
        if REST:
            k_rest = read(k_ptr + DIM, slot, K_STRIDE, REST, used, CUT)
        v = read(v_ptr, slot, V_STRIDE, VALUE, used, CUT)
        score = capped(product(q, k, q_rest, k_rest, REST, PRECISION), CAP)
        weight = tl.exp2(score * LOGIT - lse[:, None])
        if MASKED:
            since, until = tl.load(since_ptr + key), tl.load(until_ptr + key)
            seen = (row[:, None] >= since[None, :]) & (row[:, None] < until[None, :])
            if WINDOW:
                key_position = tl.load(key_position_ptr + key)
                seen &= position[:, None] - key_position[None, :] < WINDOW
            weight = tl.where(seen, weight, 0.0)
        d_weight = tl.dot(d_out, tl.trans(v), input_precision=PRECISION)
        # The factor of the scale is applied once, at the end, in float32.
        d_score = slope(weight * (d_weight - delta[:, None]), score, CAP).to(k.dtype)
        dq = tl.dot(d_score, k, dq, input_precision=PRECISION)
        if REST:
            dq_rest = tl.dot(d_score, k_rest, dq_rest, input_precision=PRECISION)
    return dq, dq_rest


@triton.jit
def queries_gradient(
    q_ptr,
    k_ptr,
    v_ptr,
    d_out_ptr,
    lse_ptr,
    delta_ptr,
    since_ptr,
    until_ptr,
    position_ptr,
    key_position_ptr,
    order_ptr,
    tiles_ptr,
    whole_count_ptr,
    whole_ptr,
    part_count_ptr,
    part_ptr,
    dq_ptr,
    T: tl.constexpr,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    CAP: tl.constexpr,
    LOGIT: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    ORDERED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq [B, T, N, DIM + REST]; lse as `forward` writes it, delta [B, N, T] is rowsum(dO O)."""
    TILES: tl.constexpr = (T + Q_BLOCK - 1) // Q_BLOCK
    BLOCKS: tl.constexpr = (S + K_BLOCK - 1) // K_BLOCK
    CUT: tl.constexpr = T % Q_BLOCK != 0
    KEYS: tl.constexpr = BLOCKS * K_BLOCK
    Q_STRIDE: tl.constexpr = HEADS * (DIM + REST)
    K_STRIDE: tl.constexpr = KEY_HEADS * (DIM + REST)
    V_STRIDE: tl.constexpr = KEY_HEADS * VALUE
    batch, number, tile, head = tile_of(tiles_ptr, HEADS, TILES)
    key_head = head // (HEADS // KEY_HEADS)
    row = number * Q_BLOCK + tl.arange(0, Q_BLOCK)
    wide, used = row.to(tl.int64), row < T
    at_q = batch * T * Q_STRIDE + head * (DIM + REST)
    k_ptr += batch * S * K_STRIDE + key_head * (DIM + REST)
    v_ptr += batch * S * V_STRIDE + key_head * VALUE
    q = read(q_ptr + at_q, wide, Q_STRIDE, DIM, used, CUT)
    q_rest = q
    if REST:
        q_rest = read(q_ptr + at_q + DIM, wide, Q_STRIDE, REST, used, CUT)
    d_out_ptr += batch * T * (HEADS * VALUE) + head * VALUE
    d_out = read(d_out_ptr, wide, HEADS * VALUE, VALUE, used, CUT)
    at_row = (batch * HEADS + head) * T + row
    lse = tl.load(lse_ptr + at_row, mask=used, other=float("inf"))
    delta = tl.load(delta_ptr + at_row, mask=used, other=0.0)
    position = row
    if WINDOW:
        position = tl.load(position_ptr + batch * TILES * Q_BLOCK + row)
    dq = tl.zeros((Q_BLOCK, DIM), tl.float32)
    dq_rest = dq
    if REST:
        dq_rest = tl.zeros((Q_BLOCK, REST), tl.float32)
    for masked in tl.static_range(2):
        count = tl.load((part_count_ptr if masked else whole_count_ptr) + tile)
        dq, dq_rest = attend_back(
            dq,
            dq_rest,
            q,
            q_rest,
            d_out,
            lse,
            delta,
            row,
            position,
            k_ptr,
            v_ptr,
            since_ptr + batch * KEYS,
            until_ptr + batch * KEYS,
            key_position_ptr + batch * KEYS,
            order_ptr + batch * KEYS,
            (part_ptr if masked else whole_ptr) + tile * BLOCKS,
            count,
            masked == 1,
            S,
            K_STRIDE,
            V_STRIDE,
            DIM,
            REST,
            VALUE,
            K_BLOCK,
            CAP,
            LOGIT,
            WINDOW,
            ORDERED,
            PRECISION,
        )
    write(dq_ptr + at_q, wide, Q_STRIDE, DIM, used, CUT, dq * SCALE)
    if REST:
        write(dq_ptr + at_q + DIM, wide, Q_STRIDE, REST, used, CUT, dq_rest * SCALE)


@triton.jit
def be_attended(
    dk,
    dk_rest,
    dv,
    k,
    k_rest,
    v,
    since,
    until,
    key_position,
    q_ptr,
    d_out_ptr,
    lse_ptr,
    delta_ptr,
    position_ptr,
    list_ptr,
    count,
    MASKED: tl.constexpr,
    T: tl.constexpr,
    GROUP: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    D_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    CAP: tl.constexpr,
    LOGIT: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk, without the scale, and dv of a tile of keys from one list of query blocks, of every query
    head that shares the keys. Scores are transposed, [keys, queries]: intervals do not change."""
    CUT: tl.constexpr = MASKED and T % Q_BLOCK != 0
    for i in range(0, count * GROUP):
        head = i // count
        row = (tl.load(list_ptr + i % count) >> 1) * Q_BLOCK + tl.arange(0, Q_BLOCK)
        wide, used = row.to(tl.int64), row < T
        from_q = q_ptr + head * (DIM + REST)
        q = read(from_q, wide, Q_STRIDE, DIM, used, CUT)
        q_rest = q
        if REST:
            q_rest = read(from_q + DIM, wide, Q_STRIDE, REST, used, CUT)
        d_out = read(d_out_ptr + head * VALUE, wide, D_STRIDE, VALUE, used, CUT)
        at_row = head * T + row
        if CUT:
            lse = tl.load(lse_ptr + at_row, mask=used, other=float("inf"))
            delta = tl.load(delta_ptr + at_row, mask=used, other=0.0)
        else:
            lse, delta = tl.load(lse_ptr + at_row), tl.load(delta_ptr + at_row)
        score = capped(product(k, q, k_rest, q_rest, REST, PRECISION), CAP)
        weight = tl.exp2(score * LOGIT - lse[None, :])
        if MASKED:
            seen = (row[None, :] >= since[:, None]) & (row[None, :] < until[:, None])
            if WINDOW:
                position = tl.load(position_ptr + row)
                seen &= position[None, :] - key_position[:, None] < WINDOW
            weight = tl.where(seen, weight, 0.0)
        dv = tl.dot(weight.to(d_out.dtype), d_out, dv, input_precision=PRECISION)
        d_weight = tl.dot(v, tl.trans(d_out), input_precision=PRECISION)
        d_score = slope(weight * (d_weight - delta[None, :]), score, CAP).to(q.dtype)
        dk = tl.dot(d_score, q, dk, input_precision=PRECISION)
        if REST:
            dk_rest = tl.dot(d_score, q_rest, dk_rest, input_precision=PRECISION)
    return dk, dk_rest, dv


@triton.jit
def keys_gradient(
    q_ptr,
    k_ptr,
    v_ptr,
    d_out_ptr,
    lse_ptr,
    delta_ptr,
    since_ptr,
    until_ptr,
    position_ptr,
    key_position_ptr,
    order_ptr,
    tiles_ptr,
    whole_count_ptr,
    whole_ptr,
    part_count_ptr,
    part_ptr,
    dk_ptr,
    dv_ptr,
    T: tl.constexpr,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    CAP: tl.constexpr,
    LOGIT: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    ORDERED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk [B, S, K, DIM + REST] and dv [B, S, K, VALUE], in the row's own order of keys."""
    TILES: tl.constexpr = (S + K_BLOCK - 1) // K_BLOCK
    BLOCKS: tl.constexpr = (T + Q_BLOCK - 1) // Q_BLOCK
    CUT: tl.constexpr = S % K_BLOCK != 0
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    Q_STRIDE: tl.constexpr = HEADS * (DIM + REST)
    K_STRIDE: tl.constexpr = KEY_HEADS * (DIM + REST)
    V_STRIDE: tl.constexpr = KEY_HEADS * VALUE
    batch, number, tile, key_head = tile_of(tiles_ptr, KEY_HEADS, TILES)
    key = number * K_BLOCK + tl.arange(0, K_BLOCK)
    used, at_key = key < S, batch * TILES * K_BLOCK + key
    slot = place_of(order_ptr + batch * TILES * K_BLOCK, key, ORDERED)
    at_k = batch * S * K_STRIDE + key_head * (DIM + REST)
    at_v = batch * S * V_STRIDE + key_head * VALUE
    k = read(k_ptr + at_k, slot, K_STRIDE, DIM, used, CUT)
    k_rest = k
    if REST:
        k_rest = read(k_ptr + at_k + DIM, slot, K_STRIDE, REST, used, CUT)
    v = read(v_ptr + at_v, slot, V_STRIDE, VALUE, used, CUT)
    since, until = tl.load(since_ptr + at_key), tl.load(until_ptr + at_key)
    key_position = key
    if WINDOW:
        key_position = tl.load(key_position_ptr + at_key)
    head = key_head * GROUP
    dk = tl.zeros((K_BLOCK, DIM), tl.float32)
    dk_rest = dk
    if REST:
        dk_rest = tl.zeros((K_BLOCK, REST), tl.float32)
    dv = tl.zeros((K_BLOCK, VALUE), tl.float32)
    for masked in tl.static_range(2):
        count = tl.load((part_count_ptr if masked else whole_count_ptr) + tile)
        dk, dk_rest, dv = be_attended(
            dk,
            dk_rest,
            dv,
            k,
            k_rest,
            v,
            since,
            until,
            key_position,
            q_ptr + batch * T * Q_STRIDE + head * (DIM + REST),
            d_out_ptr + batch * T * (HEADS * VALUE) + head * VALUE,
            lse_ptr + (batch * HEADS + head) * T,
            delta_ptr + (batch * HEADS + head) * T,
            position_ptr + batch * BLOCKS * Q_BLOCK,
            (part_ptr if masked else whole_ptr) + tile * BLOCKS,
            count,
            masked == 1,
            T,
            GROUP,
            Q_STRIDE,
            HEADS * VALUE,
            DIM,
            REST,
            VALUE,
            Q_BLOCK,
            CAP,
            LOGIT,
            WINDOW,
            PRECISION,
        )
    write(dk_ptr + at_k, slot, K_STRIDE, DIM, used, CUT, dk * SCALE)
    if REST:
        write(dk_ptr + at_k + DIM, slot, K_STRIDE, REST, used, CUT, dk_rest * SCALE)
    write(dv_ptr + at_v, slot, V_STRIDE, VALUE, used, CUT, dv)
