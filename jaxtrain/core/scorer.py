"""Log-probs without gradients, of the policy as it is and of a reference policy."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxtrain.adapters.attach import without_adapters
from jaxtrain.batch import Batch
from jaxtrain.losses.logp import token_logp
from jaxtrain.models.build import to_host
from jaxtrain.models.parameters import Params, Rebuild
from jaxtrain.parallel.feed import feed


def make_logp(
    rebuild: Rebuild, impl: str, temperature: float | None, adapters: bool = True
) -> Callable[[Params, Batch], jax.Array]:
    """Compile-ready `(params, batch [A, B, T]) -> log-probs float32 [A, B, T]`.

    adapters=False: of the model without them.
    """

    def score(params: Params, batch: Batch) -> jax.Array:
        model = rebuild(params) if adapters else without_adapters(rebuild(params))
        return jax.lax.map(lambda micro: token_logp(model, micro, impl, temperature).logp, batch)

    return jax.jit(score)


class Scorer:
    """Scores host batches with parameters that whoever owns them hands over when asked."""

    def __init__(
        self,
        rebuild: Rebuild,
        mesh: jax.sharding.Mesh,
        policy: Callable[[], Params],
        reference: Callable[[], Params] | None,
        *,
        impl: str,
        temperature: float | None,
    ):
        """policy, reference: give the parameters of the moment; reference None: the policy's own
        without adapters."""
        self.mesh, self.policy, self.reference = mesh, policy, reference
        self.with_adapters = make_logp(rebuild, impl, temperature)
        self.without_adapters = make_logp(rebuild, impl, temperature, adapters=False)

    def logp(self, batch: Batch, who: str) -> np.ndarray:
        """[A, B, T] of every token under "policy" or "reference"."""
        bare = batch._replace(weights={}, streams={}, denoms={})
        placed = feed(bare, self.mesh)
        if who == "policy":
            found: Any = self.with_adapters(self.policy(), placed)
        elif self.reference is None:
            found = self.without_adapters(self.policy(), placed)
        else:
            found = self.with_adapters(self.reference(), placed)
        return np.asarray(to_host(found))
