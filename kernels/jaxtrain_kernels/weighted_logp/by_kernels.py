"""weighted_logp by kernels: rows in chunks, three matmuls each, one pass over logits.

A fused kernel computes a chunk's logits and writes w = 2^(z - base) in bfloat16, with the rows'
sums. `base` is a guess, the largest of the target's logit and a sample of the vocabulary's: the
exponents of float32 and bfloat16 forgive an error of 2^120 and rounding is relative, so a guess
costs no accuracy; where it fails the chunk is done again. Softmax is then a number per row,
p = w / sum w, and the gradient's two matmuls read w as it is: that number multiplies the hidden
states of the one and the result of the other. No pass over [T, V] is made beside three matmuls.
"""

from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain_kernels.logp_gather.by_kernels import NEAR, Options, run, target_logits
from jaxtrain_kernels.logp_gather.gpu import LOG2E
from jaxtrain_kernels.logp_gather.reference import LogProbs
from jaxtrain_kernels.logp_gather.slices import Axis, across, join, local_targets

SAMPLE = 512  # vocabulary rows that the guess looks at: 0.3% of a matmul with 151,936
CHUNK = 2**28  # numbers of [T, V] alive at once (512 MiB in bfloat16), or 7/8 of those of the head


class KernelBackend(NamedTuple):
    """Static parameters of the kernels, besides shapes."""

    softcap: float | None
    freeze_head: bool
    axis: Axis
    rows: int
    splits: int
    config: Any
    kernels: ModuleType
    """TILE_T, `statistics` and `exponentials` as in `logp_gather.gpu`."""

    def values(self, hidden, head, targets, temperature):
        """Without gradients: no logits in memory at all."""
        options = Options(self.softcap, True, 0, self.config, self.kernels)
        local, is_local = local_targets(targets, head.shape[0], self.axis)
        part = run(options, hidden, head, jnp.where(is_local, local, 0), temperature)
        return part if self.axis is None else join(part, is_local, self.axis)

    def values_and_gradients(self, hidden, head, targets, weights, temperature):
        """Per-token results of a chunk of rows; see `gradient.Backend`."""
        return _values_and_gradients(self, hidden, head, targets, weights, temperature)


def choose_rows(T: int, D: int, V: int, tile: int) -> int:
    """Rows of a chunk: whole tiles, few chunks of about one size, for each adds to the whole head
    gradient once and rounds it to the head's dtype."""
    most = max(CHUNK, V * D * 7 // 8) // V
    chunks = -(-T // most)
    return -(-T // (chunks * tile)) * tile


def choose_splits(T: int, D: int, V: int) -> int:
    """Pieces of the vocabulary whose products with w are summed after, to fill the device."""
    del T, D, V
    return 1


def _values_and_gradients(backend, hidden, head, targets, weights, temperature):
    T, D = hidden.shape
    low = head.astype(hidden.dtype)
    factor = jnp.full((T,), LOG2E, jnp.float32)
    if temperature is not None:
        factor = factor / temperature
    missing = (
        -T % backend.kernels.TILE_T
    )  # rows of padding have factor and weight 0: finite, and no gradient
    arrays = tuple(
        jnp.pad(x, ((0, missing),) + ((0, 0),) * (x.ndim - 1)) if missing else x
        for x in (hidden, targets, weights, factor)
    )
    padded = T + missing
    rows = min(backend.rows, padded)
    rest = padded % rows or rows

    def chunk(carry, first, size=rows):
        values, best, d_hidden, d_head = carry
        parts = (lax.dynamic_slice_in_dim(x, first, size) for x in arrays)
        scores, piece, d_head = _chunk(backend, low, d_head, head.dtype, *parts)
        values = lax.dynamic_update_slice_in_dim(values, jnp.stack(scores[:3]), first, 1)
        best = lax.dynamic_update_slice_in_dim(best, scores.top, first, 0)
        d_hidden = lax.dynamic_update_slice_in_dim(d_hidden, piece, first, 0)
        return (values, best, d_hidden, d_head), None

    # The first is no iteration: the head's gradient starts from its product, not from zeros. It is
    # the short one: after the scan a sum would need a second gradient beside the first.
    # `best` by itself: where nobody asks for it, neither it nor the pass that finds it is left.
    numbers = jnp.zeros((3, padded), jnp.float32), jnp.zeros(padded, jnp.float32)
    carry = *numbers, jnp.zeros((padded, D), hidden.dtype), None
    carry, _ = chunk(carry, jnp.int32(0), rest)
    if padded > rest:
        carry, _ = lax.scan(chunk, carry, jnp.arange(rest, padded, rows, dtype=jnp.int32))
    values, best, d_hidden, d_head = carry
    return LogProbs(*values[:, :T], best[:T]), d_hidden[:T], d_head


def _chunk(backend, low, d_head, head_dtype, hidden, targets, weights, factor):
    """(LogProbs, d_hidden, d_head with its part added) of some rows."""
    V, D = low.shape
    kernels = backend.kernels
    local, is_local = local_targets(targets, V, backend.axis)
    f32 = jnp.float32

    z_target = target_logits(hidden, low, jnp.where(is_local, local, 0), backend.softcap)
    z_target = across(lax.psum, jnp.where(is_local, z_target, 0.0), backend.axis)
    sample = low[:: max(1, V // SAMPLE)][:SAMPLE]  # more than 512 would not be aligned
    highest = jnp.einsum("TD,VD->TV", hidden, sample, preferred_element_type=f32).max(1)
    if backend.softcap is not None:
        highest = backend.softcap * jnp.tanh(highest / backend.softcap)
    highest = across(lax.pmax, highest, backend.axis)
    base = jnp.maximum(z_target, highest) * factor
    options = {"softcap": backend.softcap, "config": backend.config}
    w_TV, sums = kernels.exponentials(hidden, low, factor, base, **options)
    total, moment = across(lax.psum, sums[:2].sum(1), backend.axis)

    # A guess that failed: take the true maxima. Both kernels return at once if none did. It
    # shows in the sum, which overflows; it cannot vanish: `base` is one of the row's own logits.
    failed = ~jnp.isfinite(total)
    again = failed.any().astype(jnp.int32)[None]
    top = kernels.statistics(hidden, low, factor, active=again, **options)[0].max(0)
    base = jnp.where(failed, across(lax.pmax, top, backend.axis), base)
    # Into a Ref, in place: a second [T, V] would need memory and a pass that chooses between them.
    weights_ref = jax.new_ref(w_TV)
    true = kernels.exponentials(
        hidden, low, factor, base, active=again, into=weights_ref, **options
    )
    w_TV = jax.freeze(weights_ref)
    exact = across(lax.psum, true[:2].sum(1), backend.axis)
    total, moment = jnp.where(failed[None], exact, jnp.stack([total, moment]))

    log_total = jnp.log2(total)
    power = z_target * factor - base  # the target's own
    logp = (power - log_total) / LOG2E
    if backend.softcap is None:
        highest = jnp.log2(w_TV.max(1).astype(f32))
    else:  # w_TV is the derivative by the raw logit
        raw = sums[2].max(0) / backend.softcap
        highest = backend.softcap * jnp.tanh(raw) * factor - base
    top = (across(lax.pmax, highest, backend.axis) - log_total) / LOG2E
    scores = LogProbs(
        logp,
        (log_total - moment / total) / LOG2E,
        (base + log_total) / LOG2E,
        jnp.where(logp >= top - NEAR, logp, top),  # w is rounded to bfloat16
    )
    # d logp / dz = 1[target] - w / total = -(w - total 1[target]) / total.
    target_w = jnp.exp2(power) - total
    if backend.softcap is not None:
        target_w *= 1.0 - jnp.square(z_target / backend.softcap)
    # Where the target is on another device, V: out of range, and dropped.
    index = jnp.where(is_local, local, V)
    w_TV = w_TV.at[jnp.arange(len(index)), index].set(
        target_w.astype(w_TV.dtype), mode="drop", unique_indices=True
    )
    scale = (-weights * factor / LOG2E / total)[:, None]
    if backend.splits == 1:
        d_hidden = jnp.einsum("TV,VD->TD", w_TV, low, preferred_element_type=f32)
    else:
        w_TSV = w_TV.reshape(-1, backend.splits, V // backend.splits)
        low_SVD = low.reshape(backend.splits, -1, D)
        d_hidden = jnp.einsum("TSV,SVD->STD", w_TSV, low_SVD, preferred_element_type=f32).sum(0)
    d_hidden = (d_hidden * scale).astype(hidden.dtype)
    if backend.freeze_head:
        return scores, d_hidden, None
    scaled = (hidden.astype(f32) * scale).astype(hidden.dtype)
    piece = jnp.einsum("TV,TD->VD", w_TV, scaled, preferred_element_type=head_dtype)
    return scores, d_hidden, piece if d_head is None else d_head + piece
