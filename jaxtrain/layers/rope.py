"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its length scalings.

`frequencies` runs on the host in float64 once per model; `angles` once per forward pass, shared by
all layers; `rotate` in every attention layer.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError

OPTIONAL = {
    "default": set(),
    "linear": set(),
    "llama3": set(),
    "yarn": {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
}
REQUIRED = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
    "yarn": {"factor", "original_max_position_embeddings"},
}


class Angles(NamedTuple):
    """cos and sin of every token's rotation, [B, T, H/2], float32 or wider."""

    cos: jax.Array
    sin: jax.Array


def frequencies(head_dim: int, rope: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    """(inverse frequencies float64 [H/2], factor on cos and sin) for Hugging Face's parameters.

    `rope` holds rope_type, rope_theta and what the type needs (REQUIRED, OPTIONAL). Raises
    UserError for another type, a missing or an unknown key.
    """
    kind = rope.get("rope_type", "default")
    if kind not in REQUIRED:
        raise UserError(f"rope_type={kind!r} is not supported; supported: {sorted(REQUIRED)}")
    given = {key for key, value in rope.items() if value is not None}
    missing = REQUIRED[kind] | {"rope_theta"}
    missing -= given
    if missing:
        raise UserError(f"rope_type={kind!r} needs the keys {sorted(missing)}; found {dict(rope)}")
    unknown = given - REQUIRED[kind] - OPTIONAL[kind] - {"rope_type", "type", "rope_theta"}
    unknown -= {"partial_rotary_factor"} if rope.get("partial_rotary_factor") == 1.0 else set()
    if kind == "default":  # left over by a scaling that was switched off; has no effect there
        unknown -= {"factor", "original_max_position_embeddings"}
    if unknown:
        raise UserError(f"rope_type={kind!r} does not know the keys {sorted(unknown)}")
    base = rope["rope_theta"] ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    match kind:
        case "linear":
            return base / rope["factor"], 1.0
        case "llama3":
            return _llama3(base, rope), 1.0
        case "yarn":
            return _yarn(base, head_dim, rope)
    return base, 1.0


def _llama3(base: np.ndarray, rope: Mapping[str, Any]) -> np.ndarray:
    """Llama 3.1: long wavelengths divided by factor, short kept, a linear blend between."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * base / (2 * np.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return base * (keep + (1 - keep) / rope["factor"])


def _yarn(base: np.ndarray, head_dim: int, rope: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al. 2023, arXiv:2309.00071), with DeepSeek's mscale pair."""
    factor, length = rope["factor"], rope["original_max_position_embeddings"]

    def dim_of(turns: float) -> float:
        return (
            head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))
        )

    low = dim_of(rope.get("beta_fast") or 32)
    high = dim_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2) - low) / (high - low if high != low else 0.001)
    keep = 1 - np.clip(ramp, 0.0, 1.0)
    frequency = base * (keep + (1 - keep) / factor)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return frequency, float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return frequency, mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"])
    return frequency, mscale(1.0)


def angles(
    positions_BT: jax.Array, frequency: np.ndarray, factor: float, dtype: jnp.dtype
) -> Angles:
    """Angles of int32 positions [B, T], in float32 or, for a float64 `dtype`, float64."""
    wide = jnp.promote_types(dtype, jnp.float32)
    turn = positions_BT[..., None].astype(wide) * jnp.asarray(frequency, wide)
    return Angles(jnp.cos(turn) * factor, jnp.sin(turn) * factor)


def rotate(x_BTNH: jax.Array, angles: Angles) -> jax.Array:
    """x with dim i and i + H/2 rotated as a pair (the Hugging Face layout), in x's dtype. Angles
    of fewer dims than x has rotate the first ones; the others pass."""
    cos, sin = angles.cos[:, :, None], angles.sin[:, :, None]
    if 2 * cos.shape[-1] < x_BTNH.shape[-1]:
        turned, passed = jnp.split(x_BTNH, [2 * cos.shape[-1]], axis=-1)
        return jnp.concatenate([rotate(turned, angles), passed], axis=-1)
    first, second = jnp.split(x_BTNH.astype(cos.dtype), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)
