"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its length scalings.

`frequencies` runs on the host in float64 once per model; `angles` once per forward pass, shared by
all layers; `rotate` in every attention layer.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtrain_kernels.rotate_heads.reference import rotate as rotate_halves
from jaxtrain_kernels.rotate_heads.reference import rotate_pairs

from jaxtrain.errors import UserError

YARN = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
OPTIONAL = {
    "default": set(),
    "linear": set(),
    "llama3": set(),
    "yarn": YARN | {"attention_factor", "truncate"},
    "longrope": {"attention_factor", "factor"},
    "proportional": {"factor"},
    "dynamic": YARN | {"factor"},
}
REQUIRED = {
    "default": set(),
    "linear": {"factor"},
    "proportional": set(),
    "dynamic": {"alpha"},
    "longrope": {"short_factor", "long_factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings"},
}


class Angles(NamedTuple):
    """cos and sin of every token's rotation, [B, T, H/2], float32 or wider."""

    cos: jax.Array
    sin: jax.Array


def frequencies(
    head_dim: int,
    rope: Mapping[str, Any],
    family_keys: Collection[str] = (),
    longest: int = 0,
    row_tokens: int = 0,
) -> tuple[np.ndarray, float]:
    """(inverse frequencies float64 [dims/2], factor on cos and sin) for Hugging Face's parameters.

    `rope` holds rope_type, rope_theta and what the type needs (REQUIRED, OPTIONAL); family_keys:
    further keys that the family reads, such as partial_rotary_factor, the share of dims that are
    rotated, or alpha. longest: the positions that a model is made for; row_tokens: those that it
    will see, by which "longrope" and, without an alpha, "dynamic" choose; 0: unknown. Raises
    UserError for another type, a missing or an unknown key.
    """
    kind = rope.get("rope_type", "default")
    by_length = "alpha" not in family_keys
    if kind not in REQUIRED or (kind == "dynamic" and by_length and not longest):
        kinds = sorted({*REQUIRED} - ({"dynamic"} if by_length and not longest else set()))
        raise UserError(f"rope_type={kind!r} is not supported; supported: {kinds}")
    set_keys = {key for key, value in rope.items() if value is not None}
    required = {"factor"} if kind == "dynamic" and by_length else REQUIRED[kind]
    missing = required | {"rope_theta"}
    missing -= set_keys
    if missing:
        raise UserError(f"rope_type={kind!r} needs the keys {sorted(missing)}; found {dict(rope)}")
    unknown = set_keys - required - OPTIONAL[kind] - {"rope_type", "type", "rope_theta"}
    unknown -= {"partial_rotary_factor"} if rope.get("partial_rotary_factor") == 1.0 else set()
    unknown -= {*family_keys}
    if kind == "default":  # left over by a scaling that was switched off; has no effect there
        unknown -= {"factor", "original_max_position_embeddings"}
    if unknown:
        raise UserError(f"rope_type={kind!r} does not know the keys {sorted(unknown)}")
    share = rope.get("partial_rotary_factor") or 1.0
    if kind == "proportional":
        return _proportional(head_dim, share, rope), 1.0
    dims = int(head_dim * share)
    # transformers rotates whole pairs of an odd number of dims, with frequencies of that number.
    odd = dims % 2 and kind != "default"
    if odd or not 0 < dims <= head_dim:
        raise UserError(
            f"config.json: partial_rotary_factor={share} of head_dim={head_dim} gives {dims} dims"
            " to rotate; an even number from 2 to head_dim is needed"
        )
    base = _powers(rope["rope_theta"], dims)
    match kind:
        case "linear":
            return base / rope["factor"], 1.0
        case "llama3":
            return _llama3(base, rope), 1.0
        case "yarn":
            return _yarn(base, dims, rope)
        case "longrope":
            return _longrope(base, rope, longest, row_tokens or longest)
        case "dynamic":
            if dims < 4:
                raise UserError(f"rope_type='dynamic' needs heads of 4 dims or more, not {dims}")
            # Hunyuan's longer base, whatever the length of a text; else NTK's, by that of a run.
            stretch = _stretch(rope, longest, row_tokens) if by_length else rope["alpha"]
            return _powers(rope["rope_theta"] * stretch ** (dims / (dims - 2)), dims), 1.0
    return base, 1.0


def _powers(theta: float, dims: int) -> np.ndarray:
    return theta ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)


def _stretch(rope: Mapping[str, Any], longest: int, row_tokens: int) -> float:
    """Factor that stretches the base for rows longer than a model was made for: "dynamic NTK"."""
    # By the rows of a run and not by each text, as for "longrope".
    return rope["factor"] * max(row_tokens, longest) / longest - (rope["factor"] - 1)


def _proportional(head_dim: int, share: float, rope: Mapping[str, Any]) -> np.ndarray:
    """Gemma 4: all dims are paired as without a share, but only the first pairs turn."""
    base = _powers(rope["rope_theta"], head_dim) / rope.get("factor", 1.0)
    # A frequency of 0 is no rotation: all dims stay paired as the kernel expects.
    return np.where(np.arange(len(base)) < int(share * head_dim // 2), base, 0.0)


def _longrope(
    base: np.ndarray, rope: Mapping[str, Any], longest: int, row_tokens: int
) -> tuple[np.ndarray, float]:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): a divisor for each frequency, of two lists."""
    length = rope["original_max_position_embeddings"]
    # Chosen once for a run, as servers do: a choice by each text's length would turn cached keys
    # wrong when it grows.
    name = "long_factor" if row_tokens > length else "short_factor"
    divisor = np.asarray(rope[name], np.float64)
    if divisor.shape != base.shape:
        raise UserError(
            f"config.json: {name} has {divisor.size} numbers; {base.size} pairs are rotated"
        )
    if length < 2:
        raise UserError(
            f"config.json: original_max_position_embeddings={length} must be at least 2 for"
            " longrope"
        )
    factor = rope.get("factor") or longest / length
    if rope.get("attention_factor") is not None:
        return base / divisor, float(rope["attention_factor"])
    grown = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    return base / divisor, grown


def _llama3(base: np.ndarray, rope: Mapping[str, Any]) -> np.ndarray:
    """Llama 3.1: long wavelengths divided by factor, short kept, a linear blend between."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * base / (2 * np.pi)
    # Llama 4's two are equal: no wave lies between.
    keep = np.clip((turns - low) / max(high - low, 1e-12), 0.0, 1.0)
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
    # As in transformers, whose limit is the number of dims and not of pairs.
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
    """Angles of int32 positions [B, T], or [B, T, R] for each frequency, in float32 or, for a
    float64 `dtype`, float64."""
    wide = jnp.promote_types(dtype, jnp.float32)
    positions_BTR = positions_BT if positions_BT.ndim == 3 else positions_BT[..., None]
    # Never in bfloat16, which cannot tell positions above 256 apart.
    angle_BTR = positions_BTR.astype(wide) * jnp.asarray(frequency, wide)
    return Angles(jnp.cos(angle_BTR) * factor, jnp.sin(angle_BTR) * factor)


def place_images(
    positions_BT: jax.Array,
    until_BT: jax.Array,
    slot_BT: jax.Array,
    row_col_BP2: jax.Array,
    grid_BP2: jax.Array,
    merge: int,
) -> jax.Array:
    """int32 [B, T, 3] time, row and column of tokens (M-RoPE: Wang et al. 2024, arXiv:2409.12191).

    An image of h x w features that begins at n has (n, n + row, n + column), and what follows it on
    its branch goes on at n + max(h, w). positions, until: of a packed forest, whose images lie
    whole in one node; slot: the feature at a token, -1 at text; row_col, grid: of the patches, of
    which merge * merge make a feature.
    """
    first_BT1 = jnp.maximum(slot_BT, 0)[..., None] * merge**2
    row_col_BT2, grid_BT2 = (
        jnp.take_along_axis(x_BP2, first_BT1, axis=1) // merge for x_BP2 in (row_col_BP2, grid_BP2)
    )
    row_col_BT2 = jnp.where(slot_BT[..., None] < 0, 0, row_col_BT2)
    (row_BT, col_BT), (high_BT, wide_BT) = (
        (x_BT2[..., 0], x_BT2[..., 1]) for x_BT2 in (row_col_BT2, grid_BT2)
    )
    last_BT = (slot_BT >= 0) & (row_BT == high_BT - 1) & (col_BT == wide_BT - 1)
    change_BT = jnp.where(last_BT, jnp.maximum(high_BT, wide_BT) - high_BT * wide_BT, 0)
    # All tokens behind an image, up to the end of its subtree, begin earlier by what it saves.
    steps = jnp.pad(change_BT, ((0, 0), (1, 0)))
    steps = steps.at[jnp.arange(len(steps))[:, None], until_BT].add(-change_BT)
    moved_BT = jnp.cumsum(steps, axis=1)[:, :-1].astype(positions_BT.dtype)
    start_BT = positions_BT + moved_BT - (row_BT * wide_BT + col_BT)
    return jnp.stack([start_BT, start_BT + row_BT, start_BT + col_BT], axis=-1)


def rotate(x_BTNH: jax.Array, angles: Angles, adjacent: bool = False) -> jax.Array:
    """x with dim i and i + H/2 rotated as a pair (the Hugging Face layout), in x's dtype. Angles
    of fewer dims than x has rotate the first ones; the others pass.

    adjacent: pairs are dims 2i and 2i + 1. They come out in the order above, which scores of
    queries and keys that were both turned so do not see.
    """
    if not adjacent:
        return rotate_halves(x_BTNH, *angles)
    R = 2 * angles.cos.shape[-1]
    wide_BTNR = x_BTNH[..., :R].astype(angles.cos.dtype)
    turned = rotate_pairs(wide_BTNR[..., 0::2], wide_BTNR[..., 1::2], *angles).astype(x_BTNH.dtype)
    return jnp.concatenate([turned, x_BTNH[..., R:]], axis=-1) if R < x_BTNH.shape[-1] else turned


class PositionScale(NamedTuple):
    """Factor 1 + beta ln(1 + floor(position / length)) on queries, which sharpens attention over
    long texts (Llama 4, Mistral)."""

    beta: float
    length: int
    first: int = 0
    """Number of the first position."""

    @classmethod
    def from_rope(cls, rope: Mapping[str, Any]) -> "PositionScale | None":
        """Read Hugging Face's parameters; None if they have no such scale."""
        beta, length = (
            rope.get("llama_4_scaling_beta"),
            rope.get("original_max_position_embeddings"),
        )
        return None if beta is None or length is None else cls(beta, length)

    def __call__(self, positions_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """[B, T] of int32 positions, in float32 or, for a float64 `dtype`, float64."""
        wide = jnp.promote_types(dtype, jnp.float32)
        steps_BT = (positions_BT + self.first) // self.length
        return 1 + self.beta * jnp.log1p(steps_BT.astype(wide))
