"""Adam whose numbers come with every step, as arrays of its state: a new rate compiles nothing."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.core.step import State
from jaxtrain.errors import UserError
from jaxtrain.text_safety import show

NUMBERS: Mapping[str, float] = {
    "learning_rate": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}
"""Fields of adam_params with the client's defaults."""
BELOW_ONE = ("beta1", "beta2")
MIN_EPS, MAX_NUMBER = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def make_adam() -> optax.GradientTransformation:
    """Return torch's AdamW, which decays every parameter, behind a clip of the global norm."""

    def make(learning_rate, beta1, beta2, eps, weight_decay, grad_clip_norm):
        def clip(grads: Any, _: Any) -> Any:
            norm = optax.tree.norm(grads)
            scale = jnp.minimum(1.0, grad_clip_norm / jnp.maximum(norm, 1e-12))
            scale = jnp.where(grad_clip_norm > 0, scale, 1.0)
            return jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)

        adam = optax.adamw(learning_rate, beta1, beta2, eps, weight_decay=weight_decay)
        return optax.chain(optax.stateless(clip), adam)

    return optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)(**NUMBERS)


def set_numbers(state: State, numbers: Mapping[str, float]) -> State:
    """Return the state whose next update takes these numbers."""
    injected = state.opt_state
    new = {
        name: jax.device_put(jnp.float32(numbers[name]), array.sharding)
        for name, array in injected.hyperparams.items()
    }
    return state._replace(opt_state=injected._replace(hyperparams=new))


def read_numbers(body: Mapping[str, Any]) -> dict[str, float]:
    """Read the numbers of an optim_step request; UserError names the field."""
    if body.get("optimizer_params") is not None:
        params = body["optimizer_params"]
        kind = params.get("type") if isinstance(params, dict) else params
        raise UserError(f"optimizer_params: {show(kind, 60)} is not trained here, only AdamW")
    params = body.get("adam_params")
    if not isinstance(params, dict):
        raise UserError(f"adam_params must be an object, not {show(params, 60)}")
    for name, value in params.items():
        if name not in NUMBERS:
            valid_names = ", ".join(NUMBERS)
            raise UserError(f"adam_params.{show(name, 60)} is unknown; there are {valid_names}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value <= MAX_NUMBER:
            raise UserError(f"adam_params.{name} must be a number from 0 on, not {show(value, 60)}")
        # As the device gets it: a bias correction that rounds to 0 makes the weights NaN.
        if name in BELOW_ONE and np.float32(value) >= 1:
            raise UserError(f"adam_params.{name} must be below 1 in float32, not {value}")
        # A new adapter has parameters whose first gradient is 0, and 0 / (0 + 0) is NaN.
        if name == "eps" and value < MIN_EPS:
            raise UserError(f"adam_params.eps must be {MIN_EPS:.2g} or more, not {value}")
    return {**NUMBERS, **{name: float(value) for name, value in params.items()}}
