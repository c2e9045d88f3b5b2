"""Held-out loss, and calculator problems solved by the model itself."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.config import Config
from jaxtrain.metrics import add_pairs, average
from jaxtrain.parallel.feed import feed
from jaxtrain.parameters import Params


def held_out_loss(
    evaluate: Callable, params: Params, batches: Iterator[Batch], mesh: Any
) -> dict[str, float]:
    """Weighted means over all batches [1, B, T]: loss, entropy and the tokens scored.

    evaluate: `step.make_eval`'s function. Empty data gives an empty dict.
    """
    total: dict[str, tuple[float, float]] = {}
    for batch in batches:
        placed = feed(batch, mesh)
        micro = type(placed)(*[_first(field) for field in placed])
        found = evaluate(params, micro)
        total = add_pairs(
            total, {name: (float(s), float(w)) for name, (s, w) in found.items()}
        )
    means = average(total)
    if "nll" not in means:
        return {}
    loss = means.pop("nll")
    return {"loss": loss, "perplexity": float(np.exp(min(loss, 80.0))), **means}


def _first(field: Any) -> Any:
    """Drop the microstep axis of a batch of one."""
    if field is None:
        return None
    if isinstance(field, dict):
        return {name: value[0] for name, value in field.items()}
    return field[0]
