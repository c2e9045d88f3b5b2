"""Log-probs, scores and hidden states of a batch under the models of a run, without gradients."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.batch import IMAGE_SLOT, ROUTED, Batch
from jaxtrain.core.losses.logp import token_logp
from jaxtrain.core.roles import ModelSnapshot
from jaxtrain.core.step import take_micro
from jaxtrain.distributed.feed import feed, to_host
from jaxtrain.models.parameters import Params, Rebuild

POOLING = "pooling"
"""Stream: weight of a token in each of the requested features."""


class Scorer:
    """Score host batches with the current models; call it on every process."""

    def __init__(self, snapshot: Callable[[], ModelSnapshot], *, impl: str = "auto"):
        """snapshot: returns the current models. impl: backend of the log-prob op."""
        self.snapshot, self.impl = snapshot, impl

    def logp(
        self, batch: Batch, role: str, temperature: float | None = None, *, drawable: bool = False
    ) -> np.ndarray:
        """Return log-probs float32 [A, B, T] of every token of a batch [A, B, T] under a role's
        model; logits are divided by `temperature`, as in the sampler. drawable: see token_logp."""
        snapshot = self.snapshot()
        score = make_logp(snapshot.roles.rebuild(role), self.impl, temperature, drawable)
        # A role that shares the policy's routers must send each token where the update will, or
        # the log-prob ratio would measure the routing as well.
        same = snapshot.roles.roles[role].weights != "own"
        names = (ROUTED,) if same and ROUTED in batch.streams else ()
        return self._run(score, role, batch, snapshot, names)

    def hidden(self, batch: Batch, role: str, layers: Sequence[int]) -> dict[int, np.ndarray]:
        """Return {layer: [A, B, T, D]}, the outputs of chosen layers of a role's model, in its
        dtype."""
        snapshot = self.snapshot()
        score = make_hidden(snapshot.roles.rebuild(role), tuple(layers))
        return self._run(score, role, batch, snapshot)

    def features(
        self, batch: Batch, role: str, layers: Sequence[int], places: int = 1
    ) -> np.ndarray:
        """Return float32 [A, B, S, places * C * D]: the outputs of C layers, concatenated, pooled
        over each of S sequences with the token weights streams[POOLING] [A, B, T, S * places]."""
        snapshot = self.snapshot()
        score = make_features(snapshot.roles.rebuild(role), tuple(layers), places)
        return self._run(score, role, batch, snapshot, (POOLING,))

    def scores(self, batch: Batch, role: str) -> np.ndarray:
        """Return [A, B, T, n], the scoring head's output of a role's model at every token."""
        snapshot = self.snapshot()
        score = make_scores(snapshot.roles.rebuild(role))
        return self._run(score, role, batch, snapshot)

    def topk(self, batch: Batch, role: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids int32, log-probs float32), [A, B, T, k], of a role's most likely tokens in
        the place of every token."""
        snapshot = self.snapshot()
        score = make_topk(snapshot.roles.rebuild(role), k)
        topk = self._run(score, role, batch, snapshot)
        return topk.ids, topk.logp

    @staticmethod
    def _run(
        score: Callable[[Params, Batch], Any],
        role: str,
        batch: Batch,
        snapshot: ModelSnapshot,
        names: Sequence[str] = (),
    ) -> Any:
        """Return what a jitted (params, batch [B, T]) returns, in numpy and with the axis A, for a
        batch [A, B, T] with only these streams, and that of images."""
        names = (*names, IMAGE_SLOT) if batch.images is not None else names
        streams = {name: batch.streams[name] for name in names}
        # Weights and streams differ between methods and rounds: without them all batches of a shape
        # share one compiled program.
        bare = batch._replace(weights={}, streams=streams, denoms={})
        params, mesh = snapshot.params(role), snapshot.roles.bundle.mesh
        # A microstep at a time, so that scoring needs no more memory than training, and no program
        # depends on their number. All are dispatched before the first one is read.
        outputs = [
            score(params, feed(take_micro(bare, index), mesh)) for index in range(len(batch.tokens))
        ]
        host = [jax.tree.map(lambda x: np.asarray(to_host(x)), output) for output in outputs]
        return jax.tree.map(lambda *parts: np.concatenate(parts), *host)


@functools.lru_cache(maxsize=32)
def make_logp(
    rebuild: Rebuild, impl: str, temperature: float | None, drawable: bool = False
) -> Callable[[Params, Batch], jax.Array]:
    """Compiled once `(params, batch [A, B, T]) -> log-probs float32 [A, B, T]`."""

    def score(params: Params, batch: Batch) -> jax.Array:
        model = rebuild(params)

        def score_micro(micro: Batch) -> jax.Array:
            return token_logp(model, micro, impl, temperature, drawable=drawable).logp

        # One microbatch at a time, so that scoring needs no more memory than training.
        return jax.lax.map(score_micro, batch)

    return jax.jit(score)


@functools.lru_cache(maxsize=32)
def make_topk(rebuild: Rebuild, k: int) -> Callable[[Params, Batch], Any]:
    """Compiled once `(params, batch [A, B, T]) -> TopK of [A, B, T, k]`."""

    from jaxtrain.core.losses.topk import TopK, likeliest_tokens

    def score(params: Params, batch: Batch) -> TopK:
        model = rebuild(params)
        return jax.lax.map(lambda micro: likeliest_tokens(model, micro, k), batch)

    return jax.jit(score)


@functools.lru_cache(maxsize=32)
def make_hidden(
    rebuild: Rebuild, layers: tuple[int, ...]
) -> Callable[[Params, Batch], dict[int, jax.Array]]:
    """Compiled once `(params, batch [A, B, T]) -> {layer: [A, B, T, D]}`."""

    def score(params: Params, batch: Batch) -> dict[int, jax.Array]:
        model = rebuild(params)
        return jax.lax.map(lambda micro: model.hidden(micro, layers).captured, batch)

    return jax.jit(score)


@functools.lru_cache(maxsize=32)
def make_features(
    rebuild: Rebuild, layers: tuple[int, ...], places: int
) -> Callable[[Params, Batch], jax.Array]:
    """Compiled once `(params, batch [A, B, T]) -> features float32 [A, B, S, places * C * D]`."""

    def pooled(model, micro: Batch) -> jax.Array:
        weights_BTN = micro.streams[POOLING]
        weights_BNT = jnp.swapaxes(weights_BTN, 1, 2)
        shape = (weights_BNT.shape[0], -1, places, weights_BNT.shape[2])
        return pool(model.captured(micro, layers), weights_BNT.reshape(shape))

    def score(params: Params, batch: Batch) -> jax.Array:
        model = rebuild(params)
        return jax.lax.map(lambda micro: pooled(model, micro), batch)

    return jax.jit(score)


@functools.lru_cache(maxsize=32)
def make_scores(rebuild: Rebuild) -> Callable[[Params, Batch], jax.Array]:
    """Compiled once `(params, batch [A, B, T]) -> scores [A, B, T, n]`, in at least float32."""

    def score(params: Params, batch: Batch) -> jax.Array:
        model = rebuild(params)
        return jax.lax.map(lambda micro: model.scores(model.hidden(micro).hidden), batch)

    return jax.jit(score)


def pool(states_TD: jax.Array, weights_SPT: jax.Array) -> jax.Array:
    """Features [..., S, P * D] of states [..., T, D] under weights [..., S, P, T]; at least
    float32."""
    dtype = jnp.promote_types(states_TD.dtype, jnp.float32)
    features = jnp.einsum(
        "...spt,...td->...spd",
        weights_SPT.astype(dtype),
        states_TD.astype(dtype),
        precision=jax.lax.Precision.HIGHEST,
    )
    return features.reshape(*features.shape[:-2], -1)
