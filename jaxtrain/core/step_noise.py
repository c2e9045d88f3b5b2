"""What a run draws in its steps: dropout on adapters, noise on embeddings."""

from typing import Any

import jax

from jaxtrain.core.roles import Roles
from jaxtrain.core.step import StepNoise
from jaxtrain.errors import UserError
from jaxtrain.layers.noise import RowNoise
from jaxtrain.models.build import abstract
from jaxtrain.models.decoder import Decoder


def find_draws(roles: Roles, alpha: float, seed: int) -> StepNoise | None:
    """None where nothing is drawn. Only the trained model draws, and only in its steps: never a
    reference or a teacher. alpha: NEFTune's. Raises UserError for a model that cannot."""
    adapter, role = roles.bundle.adapter, roles.trained
    dropout = 0.0 if adapter is None else adapter.dropout
    if not dropout and not alpha:
        return None
    if not isinstance(abstract(roles.bundle.architecture, **roles.bundle.options), Decoder):
        key = f"adapter.dropout {dropout}" if dropout else f"model.neftune_alpha {alpha}"
        raise UserError(f"{key}: what is trained here is no language model but a draft; remove it")

    def give(models: Any, rng_bits_B: jax.Array) -> Any:
        models[role].noise = RowNoise(rng_bits_B, alpha)
        return models

    return StepNoise(seed, give)
