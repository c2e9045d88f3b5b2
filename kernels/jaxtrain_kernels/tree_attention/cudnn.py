"""The cuDNN backend of tree attention: plain packed documents, where every interval is causal.

By name only: beside our kernels it wins little (the backward of long documents), loses on short
ones, adds up dQ in no fixed order, and needs 8 * N * H * T bytes of workspace per document in the
backward. Whether rows are documents is data: a key's `until` is the end of its document for all of
them. The caller says so by naming this backend; on the device the claim is checked in O(T), and
where it fails the result is NaN, never a wrong number. PackedDocuments of one token, padding among
them, are their own value and never reach cuDNN. Its statistics come as one row per document; they
are kept as [B, N, T], like those of the other backends.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtrain_kernels import cudnn
from jaxtrain_kernels.context import Context

HEAD_DIMS = (64, 128)  # those whose numerics were checked on a GPU
MEAN = 4096  # tokens of a document that the default number of documents allows for


class PackedDocuments(NamedTuple):
    """The documents of a [B, T] batch of which B * T tokens lie one after another."""

    starts: jax.Array
    """int32 [G] first token of the B * T; B * T for those that are not there."""
    lengths: jax.Array
    """int32 [G], 0 for those that are not there."""
    index: jax.Array
    """int32 [B, T] which of the G holds a token; undefined where `held` is false."""
    held: jax.Array
    """bool [B, T]: a token of a document of two or more tokens."""
    ok: jax.Array
    """bool: rows are plain documents indeed, and at most G have two or more tokens."""


class Options(NamedTuple):
    """Static parameters, besides shapes."""

    window: int | None
    scale: float
    documents: int

    def settings(self) -> dict:
        return {"scale": self.scale, "window": self.window}


def attention(q, k, v, context, *, window=None, softcap=None, scale, sinks=None, documents=None):
    """Implement `jaxtrain_kernels.attention`; bfloat16, `until` alone, at most `documents` in a
    batch.

    `documents` counts those of two or more tokens; default one per `MEAN` tokens, two in a row.
    """
    cudnn.require_cudnn()
    B, T, _, H = q.shape
    if not q.dtype == k.dtype == v.dtype == jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16, got {q.dtype}, {k.dtype}, {v.dtype}")
    if v.shape != k.shape:
        raise NotImplementedError(f"values of {v.shape[-1]} dims beside keys of {k.shape[-1]}")
    if H not in HEAD_DIMS:
        raise NotImplementedError(f"head dim {H} is none of {HEAD_DIMS}")
    if softcap is not None:
        raise NotImplementedError("has no softcap")
    if sinks is not None:
        raise NotImplementedError("has no sinks")
    if k.shape[1] != T:
        raise NotImplementedError(f"{T} queries on {k.shape[1]} keys are no documents")
    if documents is None:
        documents = B * (T // MEAN)
    # Two documents of a row at least: one would switch jax to the unpacked call.
    documents = max(2 * B, documents + -documents % B)
    documents_found = find_documents(context.until, documents)
    if context.since is not None:
        row = jnp.arange(T, dtype=jnp.int32)[None]
        documents_found = documents_found._replace(
            ok=documents_found.ok & (context.since == row).all()
        )
    if window is not None:
        documents_found = documents_found._replace(
            ok=documents_found.ok & consecutive(documents_found, context)
        )
    return _attention(Options(window, scale, documents), q, k, v, documents_found)


def find_documents(until: jax.Array, most: int) -> PackedDocuments:
    """PackedDocuments of two or more tokens in rows whose `until` [B, T] is each document's end."""
    B, T = until.shape
    row = jnp.arange(T, dtype=jnp.int32)[None]
    before = jnp.concatenate([jnp.zeros((B, 1), jnp.int32), until[:, :-1]], 1)
    first = before == row
    plain = (first | (until == before)).all() & (until > row).all() & (until <= T).all()
    long = first & (until - row > 1)
    count = jnp.cumsum(long.reshape(-1), dtype=jnp.int32)
    slot = jnp.where(long.reshape(-1), count - 1, most)
    token = jnp.arange(B * T, dtype=jnp.int32)
    starts = jnp.full((most,), B * T, jnp.int32).at[slot].set(token, mode="drop")
    size = (until - row).reshape(-1)
    lengths = jnp.zeros((most,), jnp.int32).at[slot].set(size, mode="drop")
    held = ~(first & ~long)
    index = jnp.clip(count - 1, 0, most - 1).reshape(B, T)
    return PackedDocuments(starts, lengths, index, held, plain & (count[-1] <= most))


def consecutive(documents: PackedDocuments, context: Context) -> jax.Array:
    """bool: inside documents positions count up by one, and keys have those of queries."""
    positions = context.positions
    step = positions[:, 1:] - positions[:, :-1]
    together = (documents.index[:, 1:] == documents.index[:, :-1]) & documents.held[:, 1:]
    together &= documents.held[:, :-1]
    return ((step == 1) | ~together).all() & (positions == context.key_positions).all()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options, q, k, v, documents):
    return _forward(options, q, k, v, documents)[0]


def _forward(options, q, k, v, documents):
    """Output and natural log-sum-exp [B, N, T], undefined outside of documents."""
    parts, settings = (documents.starts, documents.lengths), options.settings()
    out, lse = cudnn.forward(q, k, v, *parts, **settings)
    alone = jnp.repeat(v, q.shape[2] // k.shape[2], 2)
    return choose(documents, out, alone), by_token(documents, lse)


def _attention_fwd(options, q, k, v, documents):
    out, lse = _forward(options, q, k, v, documents)
    # A remat policy that saves these names spares the backward a second forward.
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, documents, out, lse)


def _attention_bwd(options, residuals, d_out):
    q, k, v, documents, out, lse = residuals
    parts, settings = (documents.starts, documents.lengths), options.settings()
    lse = by_document(documents, lse)
    dq, dk, dv = cudnn.backward(q, k, v, *parts, out, lse, d_out, **settings)
    B, T, K, H = k.shape
    alone = d_out.reshape(B, T, K, -1, H).sum(3, dtype=jnp.float32).astype(v.dtype)
    zero = jnp.zeros((), q.dtype)
    return (
        choose(documents, dq, zero),
        choose(documents, dk, zero),
        choose(documents, dv, alone),
        None,
    )


_attention.defvjp(_attention_fwd, _attention_bwd)


def choose(documents: PackedDocuments, inside, alone):
    """[B, T, N, H]: `inside` documents, `alone` elsewhere, NaN if these are no documents."""
    nan = jnp.asarray(jnp.nan, inside.dtype)
    alone = jnp.where(documents.ok, alone, nan)
    return jnp.where((documents.held & documents.ok)[..., None, None], inside, alone)


def by_token(documents: PackedDocuments, lse_GNT):
    """[G, N, T] from each document's start -> [B, N, T]."""
    B, T = documents.index.shape
    token = jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)
    offset = jnp.clip(token - documents.starts[documents.index], 0, T - 1)
    lse_BTN = lse_GNT.swapaxes(1, 2)[documents.index, offset]
    return jnp.where(documents.held[..., None], lse_BTN, 0.0).swapaxes(1, 2)


def by_document(documents: PackedDocuments, lse_BNT):
    """The inverse of `by_token`; what lies behind a document's end is arbitrary but finite."""
    B, N, T = lse_BNT.shape
    flat = lse_BNT.swapaxes(0, 1).reshape(N, B * T)
    token = documents.starts[:, None] + lax.broadcasted_iota(jnp.int32, (1, T), 1)
    return flat[:, jnp.clip(token, 0, B * T - 1)].swapaxes(0, 1)
