"""Feature matching (EBFT, arXiv:2603.12248): answers are rewarded for looking, to a frozen network,
like the ground truth and unlike each other.

    r_j = alignment * 2 cos(phi_j, phi) - diversity * 2 mean over j' != j of phi_j . phi_j'

Features are hidden states of a few layers, one behind the other, pooled over a sequence. Shapes:
T tokens, S pooled sequences, P places of a sequence that stand behind one another (3 for concat,
else 1), D width of a feature, G answers to one prompt. Nothing here is differentiated.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Pooling = Literal["last_token", "mean_pooling", "completion_mean", "concat"]

RANK_TOLERANCE = 1e-5
"""Of the largest singular value: directions of less count as not there."""
TINY = 1e-8
"""Least product of two norms that a cosine is divided by."""


def pooling_weights(method: Pooling, length: int, prompt_length: int = 0) -> np.ndarray:
    """float32 [P, length]: what each token of a sequence counts in each place of its feature.

    mean_pooling: all tokens, the prompt included. completion_mean: those from `prompt_length` on;
    zeros where there is none. concat: the tokens at 1/4, 2/4 and 3/4 of the length, as whole
    numbers. ValueError for a sequence without tokens.
    """
    if length < 1:
        raise ValueError(f"a feature needs at least one token, found {length}")
    match method:
        case "last_token":
            places = [length - 1]
        case "concat":
            places = [length // 4, length // 2, 3 * length // 4]
        case "mean_pooling" | "completion_mean":
            first = 0 if method == "mean_pooling" else min(prompt_length, length)
            weights_1T = np.zeros((1, length), np.float32)
            weights_1T[:, first:] = 1 / max(length - first, 1)
            return weights_1T
    weights_PT = np.zeros((len(places), length), np.float32)
    weights_PT[np.arange(len(places)), places] = 1
    return weights_PT


def normalize(features: jax.Array) -> jax.Array:
    """Each feature [..., D] with norm 1; zeros stay zeros."""
    norm = jnp.linalg.norm(features, axis=-1, keepdims=True)
    return features / jnp.maximum(norm, 1e-12)


def whiten(generated_GD: jax.Array, truth_D: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(answers [..., G, G], ground truth [..., G]) behind the whitening W of the answers, in
    coordinates of the directions that the answers span.

    With answers = V diag(s) U^T, W = U diag(1 / s) U^T over the s above RANK_TOLERANCE of the
    largest; no mean is taken off. Nothing of W's result lies outside U, so products and norms are
    those of `answers W` and `truth W`, without any D x D matrix: V is that of the G x G Gram
    matrix. Its square roots would lose half of the digits that the rank is judged by, so s are the
    norms of the rows V^T answers, and U is these rows, made orthogonal from the largest on. In
    whichever float the inputs are, float32 at least.
    """
    dtype = jnp.promote_types(generated_GD.dtype, jnp.float32)
    generated_GD, truth_D = generated_GD.astype(dtype), truth_D.astype(dtype)
    V = jnp.linalg.eigh(multiply("gd,hd->gh", generated_GD, generated_GD))[1][..., ::-1]
    rows_GD = multiply("gk,gd->kd", V, generated_GD)
    s_G = jnp.linalg.norm(rows_GD, axis=-1)
    keep_G = s_G > RANK_TOLERANCE * jnp.max(s_G, axis=-1, keepdims=True)
    inverse_G = jnp.where(keep_G, 1 / jnp.where(keep_G, s_G, 1), 0)
    U_GD = rows_GD * inverse_G[..., None]
    nearly_one = (
        multiply("gd,hd->gh", U_GD, U_GD) + jnp.eye(V.shape[-1], dtype=dtype) * ~keep_G[..., None]
    )
    along_G1 = multiply("gd,d->g", U_GD, truth_D)[..., None]
    L = jnp.linalg.cholesky(nearly_one)
    along_G = jax.lax.linalg.triangular_solve(L, along_G1, left_side=True, lower=True)[..., 0]
    return V * keep_G[..., None, :], along_G * inverse_G


def multiply(dims: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """einsum of the last axes, whatever stands before them, in full precision."""
    pair, out = dims.split("->")
    dims = "...{},...{}->...{}".format(*pair.split(","), out)
    return jnp.einsum(dims, lhs, rhs, precision=jax.lax.Precision.HIGHEST)


class FeatureRewards(NamedTuple):
    """Rewards of the answers to each prompt; shapes for features [..., G, D]."""

    rewards: jax.Array
    """[..., G]: alignment and diversity by their coefficients."""
    alignment: jax.Array
    """[..., G]: 2 cos(answer, ground truth)."""
    diversity: jax.Array
    """[..., G]: twice the mean product with the other answers; 0 where there is no other."""
    cfm: jax.Array
    """[...]: squared distance of the answers' mean from the ground truth, the paper's equation 2.
    """


def rewards(
    generated_GD: jax.Array,
    truth_D: jax.Array,
    *,
    alignment: float = 1.0,
    diversity: float = 1.0,
    whitening: bool = False,
) -> FeatureRewards:
    """Rewards of G answers [..., G, D] to a prompt by the feature of its ground truth [..., D].

    Both are brought to norm 1, or whitened by the answers where there are several. Then an answer
    that is the ground truth has an alignment of 2.
    """
    num_answers = generated_GD.shape[-2]
    dtype = jnp.promote_types(generated_GD.dtype, jnp.float32)
    generated, truth = generated_GD.astype(dtype), truth_D.astype(dtype)
    if whitening and num_answers > 1:
        generated, truth = whiten(generated, truth)
    else:
        generated, truth = normalize(generated), normalize(truth)
    norms = jnp.linalg.norm(generated, axis=-1) * jnp.linalg.norm(truth, axis=-1)[..., None]
    dots = multiply("gd,d->g", generated, truth)
    aligned = 2 * dots / jnp.maximum(norms, TINY)
    gram = multiply("gd,hd->gh", generated, generated)
    cross_terms = jnp.sum(gram, axis=-1) - jnp.diagonal(gram, axis1=-2, axis2=-1)
    alike = 2 * cross_terms / max(num_answers - 1, 1)
    gap = jnp.mean(generated, axis=-2) - truth
    return FeatureRewards(
        alignment * aligned - diversity * alike, aligned, alike, jnp.sum(gap**2, axis=-1)
    )
