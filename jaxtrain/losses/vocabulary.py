"""The vocabulary ops on a mesh: each device on its tokens and its slice of the vocabulary.

Kernels see local arrays only; this file owns the shard_map around them. Tokens are split over the
axes of rows and length, the head over the axis of the vocabulary where that divides it; whatever
else the head is sharded by is gathered. What the slices of a vocabulary find is put together from
their log-sum-exps.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtrain_kernels import LogProbs, logp_gather

from jaxtrain.parallel.rules import partition_spec


def gather_logp(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    target_BT: jax.Array,
    *,
    temperature: jax.Array | float | None = None,
    freeze_head: bool = False,
    impl: str = "auto",
) -> LogProbs:
    """`logp_gather` of every token; fields float32 [B, T].

    `temperature` is a number or [B, T]. All arrays may be sharded in any way.
    """
    if temperature is None:
        temperature_BT = None
    else:
        temperature_BT = jnp.broadcast_to(temperature, target_BT.shape)

    def local(split, hidden_BTD, head_VD, target_BT, temperature_BT):
        rows, length, width = hidden_BTD.shape
        op = functools.partial(logp_gather, freeze_head=freeze_head, impl=impl)
        if temperature_BT is not None:
            op = functools.partial(op, temperature=temperature_BT.reshape(-1))
        if split is not None:
            op = functools.partial(_joined, op, split)
        found = op(hidden_BTD.reshape(-1, width), head_VD, target_BT.reshape(-1))
        return LogProbs(*(field.reshape(rows, length) for field in found))

    return _per_device(local, hidden_BTD, head_VD, target_BT, temperature_BT)


def _joined(op, axes, hidden, head, targets) -> LogProbs:
    """One LogProbs from those of each device's slice of the vocabulary along mesh axes `axes`."""
    size = head.shape[0]
    mine = targets - jax.lax.axis_index(axes) * size
    own = (mine >= 0) & (mine < size)
    part = op(hidden, head, jnp.where(own, mine, 0))
    top = jax.lax.pmax(jax.lax.stop_gradient(part.lse), axes)
    total = jax.lax.psum(jnp.exp(part.lse - top), axes)
    lse = top + jnp.log(total)
    share = jnp.exp(part.lse - lse)
    # A slice's expected logit is lse - entropy of its own; relative to the whole's log-sum-exp, so
    # that the entropy is no difference of large numbers.
    entropy = jax.lax.psum(share * (part.entropy + lse - part.lse), axes)
    logp = jax.lax.psum(jnp.where(own, part.logp + part.lse - lse, 0.0), axes)
    return LogProbs(logp, entropy, lse)


def _per_device(local, hidden_BTD, head_VD, *per_token):
    """`local(axes that split the vocabulary or None, ...)` on each device's part of the arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return local(None, hidden_BTD, head_VD, *per_token)
    tokens = partition_spec(("rows", "length", None), hidden_BTD.shape, mesh)
    split = partition_spec(("vocab", None), head_VD.shape, mesh)[0]
    by_token = PartitionSpec(*tokens[:2])
    return jax.shard_map(
        functools.partial(local, split),
        in_specs=(tokens, PartitionSpec(split), *(by_token for _ in per_token)),
        out_specs=by_token,
        check_vma=False,
    )(hidden_BTD, head_VD, *per_token)
