"""Decode attention for NVIDIA GPUs (Pallas, Triton): reads the slots that are seen, once.

In the style of Flash-Decoding: a program takes one row, a few key-value heads and a part of the
row's slots; a second kernel merges the parts of a row. The slots of several heads lie next to each
other in the cache, so a program takes as many heads as its queries fill the 16 rows of a matmul:
each tile of keys, whatever their head, is multiplied with all of the program's queries, and pairs
of different heads are masked. That costs no more than 16 padded rows per head, and what is read
lies in one piece. Codes of 8 bits are widened in registers, exactly; the scales of keys multiply
scores, and the logarithms of those of values are added to them: weights are at most 1 with their
scale, whatever that is. Several queries of a row are programs of
their own, cut up as one query alone is, so that each gives the same bits; all but the first read
the cache's row from L2. So do rows that share slots: tiles wholly within them are read from the
leader's row, and as rows vary fastest, those of a group run side by side.

Shapes: B rows, T queries of a row, S slots, K kv heads, N query heads, H head dim, L layers, P
parts of a row, R query rows of a program, J keys of a tile.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxtrain_kernels.mosaic import num_cores
from jaxtrain_kernels.triton import plt, require_fp8, require_nvidia

HEAD_DIMS = (64, 128, 256)
DTYPES = (jnp.bfloat16, jnp.float32)
CODES = (jnp.int8, jnp.float8_e4m3fn)
ROWS = 16  # of the smallest matmul
MASKED = -1e30  # finite: what is masked against itself must not be NaN
SMALLEST = 1e-20  # what scales are held above: there are keys without a value, but no -inf
LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes into which a call is split."""

    keys: int = 64
    """Keys of a tile, all heads of the program together."""
    part: int = 512
    """Slots of a program at most."""
    warps: int = 4
    stages: int = 3


def heuristic(B: int, S: int, K: int, N: int, H: int, itemsize: int = 2) -> Config:
    """16 KiB of keys a tile; the largest parts that give every core two programs of full rows.

    Codes of 8 bits wait for their conversion, not for memory: four programs, so that cores whose
    rows are short take over.
    """
    keys = max(ROWS, 16384 // (H * itemsize))
    groups = K // heads_together(K, N)
    part, programs = 64, (4 if itemsize == 1 else 2) * num_cores()
    while part < S and B * groups * pl.cdiv(S, 2 * part) >= programs:
        part *= 2
    # Float32 is multiplied without tensor cores: 4 warps would not have the registers.
    return Config(keys=keys, part=part, warps=4 if itemsize <= 2 else 8)


def heads_together(K: int, N: int) -> int:
    """Key-value heads of one program: a power of two that divides K and fills the query rows."""
    together = 1
    while K % (2 * together) == 0 and 2 * together * (N // K) <= ROWS:
        together *= 2
    return together


def decode_attention(
    q,
    k,
    v,
    layer,
    until,
    since,
    *,
    scale,
    softcap,
    sinks=None,
    k_scale=None,
    v_scale=None,
    leader=None,
    shared=None,
):
    """Implement `jaxtrain_kernels.decode_attention`; caches in bfloat16, float32 or 8 bits."""
    require_nvidia()
    B, _, N, H = q.shape
    S, K = k.shape[2:4]
    if H not in HEAD_DIMS:
        raise NotImplementedError(f"head dim {H} is none of {HEAD_DIMS}")
    if v.dtype != k.dtype or k.dtype not in (DTYPES if k_scale is None else CODES):
        raise NotImplementedError(
            "takes caches in bfloat16 or float32, and with scales in int8 or float8_e4m3fn, got"
            f" {k.dtype} and {v.dtype}"
        )
    if k_scale is not None and q.dtype != jnp.bfloat16:  # float32 would spill registers
        raise NotImplementedError(f"multiplies codes by queries in bfloat16, got {q.dtype}")
    if k.dtype == jnp.float8_e4m3fn:
        require_fp8()
    if N // K > ROWS:
        raise NotImplementedError(f"{N // K} query heads share a key, at most {ROWS} may")
    config = heuristic(B, S, K, N, H, k.dtype.itemsize)
    options = {"scale": scale, "softcap": softcap, "sinks": sinks}
    options |= {"k_scale": k_scale, "v_scale": v_scale, "leader": leader, "shared": shared}
    return run(config, q, k, v, layer, until, since, **options)


def run(
    config,
    q,
    k,
    v,
    layer,
    until,
    since,
    *,
    scale,
    softcap,
    sinks=None,
    k_scale=None,
    v_scale=None,
    leader=None,
    shared=None,
    interpret=False,
):
    """`decode_attention` behind its checks."""
    B, T, N, H = q.shape
    S, K = k.shape[2:4]
    rows, shape = B * T, q.shape
    q, until = q.reshape(rows, N, H), until.reshape(rows)
    since = None if since is None else since.reshape(rows)
    together = heads_together(K, N)
    parts = pl.cdiv(S, config.part)
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    final = jax.ShapeDtypeStruct(q.shape, q.dtype)
    partial = (
        jax.ShapeDtypeStruct((rows, parts, N, H), jnp.float32),
        jax.ShapeDtypeStruct((rows, parts, N), jnp.float32),
    )
    # Rows vary fastest: what runs together are the same parts of all rows, not those that are past
    # the end of some row.
    out = pl.pallas_call(
        functools.partial(
            _attend,
            config=config,
            few=T,
            together=together,
            scale=scale,
            softcap=softcap,
            split=parts > 1,
        ),
        grid=(rows, K // together, parts),
        out_shape=partial if parts > 1 else final,
        compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name="decode_attention",
    )(
        layer.reshape(1),
        since,
        until,
        leader,
        shared,
        sinks if parts == 1 else None,
        *(q, k, v, k_scale, v_scale),
    )
    if parts == 1:
        return out.reshape(shape)
    merged = pl.pallas_call(
        functools.partial(_merge, slots=S, part=config.part),
        grid=(rows, N),
        out_shape=final,
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="decode_attention_merge",
    )(since, until, sinks, *out)
    return merged.reshape(shape)


def _attend(
    layer_ref,
    since_ref,
    until_ref,
    leader_ref,
    shared_ref,
    sinks_ref,
    q_ref,
    k_ref,
    v_ref,
    k_scale_ref,
    v_scale_ref,
    *out_refs,
    config: Config,
    few: int,
    together: int,
    scale: float,
    softcap: float | None,
    split: bool,
):
    row, group, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    _, N, H = q_ref.shape
    queries = N // k_ref.shape[3]
    R = max(ROWS, pl.next_power_of_2(together * queries))
    J = config.keys
    assert J % together == 0, f"tiles of {J} keys for {together} heads together"
    slots = J // together
    layer, batch_row = layer_ref[0], row // few
    if shared_ref is not None:
        leader, shared = leader_ref[batch_row], shared_ref[batch_row]
    since, until = _interval(since_ref, until_ref, row, k_ref.shape[2])
    start = since + part * config.part
    stop = jnp.minimum(until, start + config.part)
    first = group * together
    heads = pl.ds(first * queries, R)
    real_R1 = (jnp.arange(R) < together * queries)[:, None]
    real_RH = jnp.broadcast_to(real_R1, (R, H))

    compute = k_ref.dtype if k_scale_ref is None else q_ref.dtype
    # GPUs convert e4m3 to float16 two by two, and to bfloat16 by way of it, one by one.
    halves = k_ref.dtype == jnp.float8_e4m3fn and compute == jnp.bfloat16
    compute = jnp.dtype(jnp.float16) if halves else compute
    # Without it, float32 would be multiplied with 10 bits.
    precision = jax.lax.Precision.HIGHEST if compute == jnp.float32 else None
    dot = functools.partial(plt.dot, precision=precision)

    def owner_of(end):
        """Return the row from which a tile that ends before slot `end` is read."""
        return batch_row if shared_ref is None else jnp.where(end <= shared, leader, batch_row)

    def fetch(ref, owner, slot_J, head_J, inside_J):
        slot_JH, head_JH, inside_JH = (
            jnp.broadcast_to(x[:, None], (J, H)) for x in (slot_J, head_J, inside_J)
        )
        dim_JH = jax.lax.broadcasted_iota(jnp.int32, (J, H), 1)
        none = jnp.zeros((), ref.dtype)
        codes_JH = plt.load(
            ref.at[layer, owner, slot_JH, head_JH, dim_JH], mask=inside_JH, other=none
        )
        return codes_JH.astype(compute)

    def fetch_scale(ref, owner, slot_J, head_J, inside_J):
        return plt.load(ref.at[layer, owner, slot_J, head_J], mask=inside_J, other=0.0)[None, :]

    def step(tile, carry):
        sum_RH, total_R, top_R = carry
        index_J = jnp.arange(J, dtype=jnp.int32)
        begin = start + tile * slots
        slot_J, head_J = begin + index_J // together, index_J % together
        inside_J = slot_J < stop
        key_index = (owner_of(begin + slots), slot_J, first + head_J, inside_J)
        k_JH = fetch(k_ref, *key_index)
        score_RJ = dot(q_RH, k_JH, trans_b=True) * (scale if softcap else scale * LOG2E)
        if halves:
            score_RJ *= size_R1
        if k_scale_ref is not None:
            score_RJ *= fetch_scale(k_scale_ref, *key_index)
        if softcap:
            # 2 / (1 + exp2) rather than tanh: the hardware's has only 11 bits
            ratio_RJ = jnp.exp2(score_RJ * (2 * LOG2E / softcap))
            score_RJ = (softcap * LOG2E) * (1.0 - 2.0 / (1.0 + ratio_RJ))
        owner_R = jnp.arange(R, dtype=jnp.int32) // queries
        seen_RJ = inside_J[None, :] & (owner_R[:, None] == head_J[None, :])
        if v_scale_ref is not None:
            value_1J = fetch_scale(v_scale_ref, *key_index)
            value_1J = jnp.maximum(value_1J, SMALLEST)
            score_RJ += jnp.log2(value_1J)
        score_RJ = jnp.where(seen_RJ, score_RJ, MASKED)
        # Every query sees the first slot of a tile, but those of padding, which are not written.
        # Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867): rescale by the new
        # maximum.
        new_top_R = jnp.maximum(top_R, score_RJ.max(1))
        shrink_R = jnp.exp2(top_R - new_top_R)
        weight_RJ = jnp.exp2(score_RJ - new_top_R[:, None])
        v_JH = fetch(v_ref, *key_index)
        # Weights carry the values' scales; the softmax's denominator must not, so they are divided
        # out.
        bare_RJ = weight_RJ if v_scale_ref is None else weight_RJ * (1.0 / value_1J)
        total_R = total_R * shrink_R + bare_RJ.sum(1)
        sum_RH = sum_RH * shrink_R[:, None] + dot(weight_RJ.astype(compute), v_JH)
        return sum_RH, total_R, new_top_R

    def attend():
        # A part may begin past the row's end, where cdiv is negative.
        tiles = jnp.maximum(0, pl.cdiv(stop - start, slots))
        total_R, top_R = jnp.zeros(R, jnp.float32), jnp.full(R, MASKED, jnp.float32)
        if sinks_ref is not None:  # as if it had been seen first
            sink_R = plt.load(sinks_ref.at[heads], mask=real_R1[:, 0], other=MASKED)
            total_R, top_R = jnp.ones(R, jnp.float32), sink_R * LOG2E
        sum_RH, total_R, top_R = jax.lax.fori_loop(
            0, tiles, step, (jnp.zeros((R, H), jnp.float32), total_R, top_R)
        )
        total_R = jnp.where(total_R == 0, 1.0, total_R)
        out_RH = sum_RH / total_R[:, None]
        if not split:
            plt.store(out_refs[0].at[row, heads], out_RH.astype(out_refs[0].dtype), mask=real_RH)
            return
        plt.store(out_refs[0].at[row, part, heads], out_RH, mask=real_RH)
        # Parts are normalized on their own; the merge weighs them by their log-sum-exp.
        lse_R = top_R + jnp.log2(total_R)
        plt.store(out_refs[1].at[row, part, heads], lse_R, mask=real_R1[:, 0])

    q_RH = plt.load(q_ref.at[row, heads], mask=real_RH, other=0.0)
    if halves:  # numbers of at most 1, or float16 would not hold those of bfloat16
        wide_RH = q_RH.astype(jnp.float32)
        size_R1 = jnp.maximum(jnp.abs(wide_RH).max(1), SMALLEST)[:, None]
        q_RH = wide_RH / size_R1
    q_RH = q_RH.astype(compute)
    if split:
        pl.when(start < stop)(attend)
    else:
        attend()


def _interval(since_ref, until_ref, row, slots: int):
    """Return the slots that the row sees, clipped to the cache: finished rows may be past its
    end."""
    since = 0 if since_ref is None else jnp.maximum(since_ref[row], 0)
    return since, jnp.minimum(until_ref[row], slots)


def _merge(since_ref, until_ref, sinks_ref, part_ref, lse_ref, out_ref, *, slots: int, part: int):
    row, head = pl.program_id(0), pl.program_id(1)
    H = out_ref.shape[-1]
    P = pl.next_power_of_2(part_ref.shape[1])
    index_P = jnp.arange(P, dtype=jnp.int32)
    # The others were not written.
    since, until = _interval(since_ref, until_ref, row, slots)
    written_P = index_P * part < until - since
    lse_P = plt.load(lse_ref.at[row, pl.ds(0, P), head], mask=written_P, other=MASKED)
    top = lse_P.max(0)
    sink = MASKED if sinks_ref is None else sinks_ref[head] * LOG2E
    top = jnp.maximum(top, sink)
    weight_P = jnp.where(written_P, jnp.exp2(lse_P - top), 0.0)
    total = weight_P.sum(0)
    if sinks_ref is not None:
        total += jnp.exp2(sink - top)
    mask_PH = jnp.broadcast_to(written_P[:, None], (P, H))
    part_PH = plt.load(part_ref.at[row, pl.ds(0, P), head], mask=mask_PH, other=0.0)
    out_H = (part_PH * weight_P[:, None]).sum(0) / jnp.where(total == 0, 1.0, total)
    out_ref[row, head] = out_H.astype(out_ref.dtype)
