"""The most likely tokens of a model in the place of every token, from logits in chunks.

Shapes: B rows, T packed tokens, D features, V ids (of this device's slice), C tokens of a chunk.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtrain_kernels.logp_gather.slices import Axis, across
from jaxtrain_kernels.precision import accumulator

from jaxtrain.batch import Batch
from jaxtrain.core.losses.logp import predictions
from jaxtrain.core.losses.vocabulary import place_tokens, stored_axes, whole_head
from jaxtrain.layers.embed import capped

MAX_LOGITS = 2**27
"""Logits of a chunk of one model: 512 MiB in float32."""


class TopK(NamedTuple):
    """The most likely tokens of a teacher."""

    ids: Any
    """int32 [..., k], in the whole vocabulary; -1: there are fewer than k."""
    logp: Any
    """float [..., k]; log-probs of `ids` under softmax(logits) over the whole vocabulary."""


def likeliest_tokens(model, batch: Batch, k: int) -> TopK:
    """Return the k most likely tokens and their log-probs [B, T, k] in the place of every token of
    rows [B, T], given those before it, chunk by chunk. Entries of tokens without a predecessor are
    meaningless."""
    hidden_BTD, _ = predictions(model, batch)
    head_VD = model.head()
    spec_BTD, vocabulary = place_tokens(hidden_BTD, head_VD)

    def local(hidden_BTD, head_VD) -> TopK:
        if spec_BTD is not None:
            head_VD = whole_head(head_VD, hidden_BTD.dtype, stored)
        low_VD = head_VD.astype(hidden_BTD.dtype)
        compute = accumulator(hidden_BTD.dtype)

        def of_token(h_D):
            z_V = jnp.einsum("D,VD->V", h_D, low_VD, preferred_element_type=compute)
            z_V = capped(z_V, model.logit_softcap)
            return TopK(*(x[0] for x in take_topk(z_V[None], k, vocabulary)))

        rows = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
        chunk = min(max(MAX_LOGITS // head_VD.shape[0] // 128, 1) * 128, rows.shape[0])
        topk = lax.map(of_token, rows, batch_size=chunk)
        return TopK(*(x.reshape(*hidden_BTD.shape[:2], -1) for x in topk))

    if spec_BTD is None:
        return local(hidden_BTD, head_VD)
    stored = stored_axes(head_VD)
    by_token = PartitionSpec(*spec_BTD[:2], None)
    return jax.shard_map(
        local,
        in_specs=(spec_BTD, PartitionSpec(vocabulary, stored or None)),
        out_specs=TopK(by_token, by_token),
        check_vma=False,
    )(hidden_BTD, head_VD)


def take_topk(v_CV, k: int, axis: Axis = None) -> TopK:
    """Return the k most likely tokens of the teacher's logits / temperature."""
    lp_CV = log_softmax(v_CV, axis)
    logp_Ck, ids_Ck = lax.top_k(lp_CV, min(k, lp_CV.shape[1]))
    if axis is None:
        return TopK(ids_Ck.astype(jnp.int32), logp_Ck)
    ids_Ck = ids_Ck.astype(jnp.int32) + lax.axis_index(axis) * lp_CV.shape[1]
    logp_Cn = lax.all_gather(logp_Ck, axis, axis=1, tiled=True)
    ids_Cn = lax.all_gather(ids_Ck, axis, axis=1, tiled=True)
    logp_Ck, place_Ck = lax.top_k(logp_Cn, min(k, logp_Cn.shape[1]))
    return TopK(jnp.take_along_axis(ids_Cn, place_Ck, axis=1), logp_Ck)


def log_softmax(z_CV, axis: Axis = None):
    """Over the whole vocabulary, of which this device may have a slice."""
    top_C1 = across(lax.pmax, z_CV.max(-1, keepdims=True), axis)
    total_C1 = across(lax.psum, jnp.exp(z_CV - top_C1).sum(-1, keepdims=True), axis)
    return z_CV - (top_C1 + jnp.log(total_C1))
