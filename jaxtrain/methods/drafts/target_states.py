"""States of a target's layers for the tokens of a batch: from the batch, or by running the target.

Shapes: B rows, T packed tokens, D the target's features, C captured layers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.batch import Batch

STATES = "target_states"
"""Stream [B, T, C * D]: outputs of the captured layers, one behind the other."""
LAST = "target_last"
"""Stream [B, T, D]: output of the last layer, final-normed."""


class TargetStates(NamedTuple):
    """The target's states that drafts read, without gradients."""

    captured: jax.Array
    """[B, T, C * D], in the order of the layers that were asked for."""
    last: jax.Array | None
    """[B, T, D]; None if not requested."""


def read_target(
    target: Any, batch: Batch, layers: Sequence[int], *, last: bool = False
) -> TargetStates:
    """Return the states of the tokens of rows [B, T]: the batch's streams if it has them, else
    those of `target`, a Decoder. last: whether to return the output of the last layer, too."""
    if STATES in batch.streams:
        assert not last or LAST in batch.streams, f"the batch has no stream {LAST}"
        captured = batch.streams[STATES]
        return TargetStates(captured, batch.streams[LAST] if last else None)
    return jax.lax.stop_gradient(run_target(target, batch, layers, last=last))


def run_target(target: Any, batch: Batch, layers: Sequence[int], *, last: bool) -> TargetStates:
    """Compute states of the tokens of rows [B, T] by running `target`, no deeper than needed."""
    if not last:
        return TargetStates(target.captured(batch, layers), None)
    output = target.hidden(batch, tuple(layers))
    captured = jnp.concatenate([output.captured[layer] for layer in layers], axis=-1)
    return TargetStates(captured, output.hidden)
