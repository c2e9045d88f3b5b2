"""Vocabulary ops on a mesh: each device works on its tokens and its slice of the vocabulary.

Kernels see local arrays only; this file owns the shard_map around them. Tokens are split over the
axes of rows and length, the head over the axis of the vocabulary where that divides it; whatever
else the head is sharded by is gathered.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtrain_kernels import LogProbs, logp_gather, weighted_logp

from jaxtrain.distributed.sharding import partition_spec, split_axes


def gather_logp(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    target_BT: jax.Array,
    *,
    temperature: jax.Array | float | None = None,
    softcap: float | None = None,
    freeze_head: bool = False,
    impl: str = "auto",
) -> LogProbs:
    """Apply `logp_gather` to every token; fields float32 [B, T].

    `temperature` is a number or [B, T]; softcap: the model's `logit_softcap`. The
    arrays may be sharded in any way.
    """

    def local(axis, hidden_BTD, head_VD, target_BT, temperature_BT=None):
        log_probs = logp_gather(
            hidden_BTD.reshape(-1, hidden_BTD.shape[-1]),
            head_VD,
            target_BT.reshape(-1),
            temperature=None if temperature_BT is None else temperature_BT.reshape(-1),
            softcap=softcap,
            freeze_head=freeze_head,
            axis=axis,
            impl=impl,
        )
        return jax.tree.map(lambda field: field.reshape(target_BT.shape), log_probs)

    per_token = [target_BT]
    if temperature is not None:
        per_token.append(jnp.broadcast_to(temperature, target_BT.shape))
    spec_BTD, vocabulary = place_tokens(hidden_BTD, head_VD)
    if spec_BTD is None:
        return local(None, hidden_BTD, head_VD, *per_token)
    by_token = PartitionSpec(*spec_BTD[:2])
    stored = stored_axes(head_VD)

    def scored(hidden_BTD, head_VD, *per_token):
        return local(
            vocabulary, hidden_BTD, whole_head(head_VD, hidden_BTD.dtype, stored), *per_token
        )

    return jax.shard_map(
        scored,
        in_specs=(
            spec_BTD,
            PartitionSpec(vocabulary, stored or None),
            *(by_token for _ in per_token),
        ),
        out_specs=by_token,
        check_vma=False,
    )(hidden_BTD, head_VD, *per_token)


def sum_logp(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    target_BT: jax.Array,
    weight_BT: jax.Array,
    *,
    temperature: float | None = None,
    softcap: float | None = None,
    freeze_head: bool = False,
    impl: str = "auto",
) -> tuple[jax.Array, LogProbs]:
    """Apply `weighted_logp` to all tokens: (their weighted sum, float32 [B, T] without gradients).
    softcap: the model's `logit_softcap`."""

    def local(axis, hidden_BTD, head_VD, target_BT, weight_BT):
        total, log_probs = weighted_logp(
            hidden_BTD.reshape(-1, hidden_BTD.shape[-1]),
            head_VD,
            target_BT.reshape(-1),
            weight_BT.reshape(-1),
            temperature=temperature,
            softcap=softcap,
            freeze_head=freeze_head,
            axis=axis,
            impl=impl,
        )
        return total, jax.tree.map(lambda field: field.reshape(target_BT.shape), log_probs)

    spec_BTD, vocabulary = place_tokens(hidden_BTD, head_VD)
    if spec_BTD is None:
        return local(None, hidden_BTD, head_VD, target_BT, weight_BT)
    by_token = PartitionSpec(*spec_BTD[:2])
    shards: list[str] = []
    for axes in by_token:
        shards += [axes] if isinstance(axes, str) else axes or ()

    stored = stored_axes(head_VD)

    def summed(hidden_BTD, head_VD, *per_token):
        head_VD = whole_head(head_VD, hidden_BTD.dtype, stored)
        total, log_probs = local(vocabulary, hidden_BTD, head_VD, *per_token)
        return jax.lax.psum(total, tuple(shards)) if shards else total, log_probs

    return jax.shard_map(
        summed,
        in_specs=(spec_BTD, PartitionSpec(vocabulary, stored or None), by_token, by_token),
        out_specs=(PartitionSpec(), by_token),
        check_vma=False,
    )(hidden_BTD, head_VD, target_BT, weight_BT)


def place_tokens(hidden_BTD, head_VD):
    """Return (spec of the hidden states, mesh axes of the vocabulary or None); (None, None)
    locally."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return None, None
    spec_BTD = partition_spec(("rows", "length", None), hidden_BTD.shape, mesh)
    return spec_BTD, partition_spec(("vocab", None), head_VD.shape, mesh)[0]


def stored_axes(head_VD) -> tuple[str, ...]:
    """Mesh axes that the head's features are stored split over."""
    return split_axes(("vocab", "embed"), head_VD.shape, jax.sharding.get_abstract_mesh())[1]


def whole_head(head_VD, dtype, axes):
    """Gather all features of the head, in the dtype of the hidden states; inside shard_map.

    Gathered here and not by the partitioner, so that its gradient is scattered back.
    """
    if not axes:
        return head_VD
    return jax.lax.all_gather(head_VD.astype(dtype), axes, axis=1, tiled=True)
