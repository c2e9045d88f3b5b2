"""The tower of Gemma 4 (Gemma Team 2026): images of any shape, whose queries and keys turn by
column in one half of a head and by row in the other.

    pixels -> 2 x - 1 -> patches + column's position + row's -> layers with four norms
    mean of a block's m * m patches -> sqrt(D) -> (x - bias) scale -> norm without weight -> matrix

Shapes: as in vision.py; M patches of a block, N heads of H dims.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from typing_extensions import override

from jaxtrain.batch import Images
from jaxtrain.distributed.sharding import gathered
from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import (
    ParameterEntry,
    SplitPiece,
    StackedOps,
    TensorRef,
    Transpose,
    full_index,
)
from jaxtrain.layers.attention import Attention, AttentionOptions
from jaxtrain.layers.block import Block
from jaxtrain.layers.linear import UNLIMITED, ClippedLinear, Linear
from jaxtrain.layers.mlp import GatedMLP
from jaxtrain.layers.norm import PreciseRMSNorm, RMSNorm, UnitRMSNorm
from jaxtrain.layers.rope import Angles, rotate
from jaxtrain.models.decoder import DecoderOptions
from jaxtrain.models.naming import SANDWICH_NORMS, linear_entries, norm_names, with_prefix
from jaxtrain.models.vision import (
    PatchEmbedding,
    Vision,
    VisionConfig,
    VisionEncoder,
    look_up_values,
    make_norm,
    make_stack,
    vision_init,
)

LINEARS = {
    **{f"attention.{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v")},
    "attention.out": "self_attn.o_proj",
    **{f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
NORMS = {
    **SANDWICH_NORMS,
    **{f"attention.{name}": f"self_attn.{name}" for name in ("q_norm", "k_norm")},
}
ROOT = "model.vision_tower."


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowerConfig(VisionConfig):
    """Attributes of a `vision_config`."""

    model_type: ClassVar[str] = "gemma4_vision"
    renamed: ClassVar[Mapping[str, str]] = {
        **{"hidden_act": "hidden_activation", "layer_norm_eps": "rms_norm_eps"}
    }
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "attention_bias": (False, None),
        "max_position_embeddings": (),
        # Of published folders; transformers reads a number of this name for texts alone.
        "global_head_dim": (),
    }
    norm: ClassVar[type[RMSNorm]] = PreciseRMSNorm
    num_key_value_heads: int
    head_dim: int
    pooling_kernel_size: int
    """m."""
    position_embedding_size: int
    """Positions along either side of an image."""
    use_clipped_linears: bool
    standardize: bool
    """Whether features are shifted and scaled."""
    rope: tuple[tuple[str, Any], ...] = ()

    @override
    def check_heads(self) -> None:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if kv_heads < 1 or heads < 1 or heads % kv_heads:
            raise UserError(
                f"config.json: vision_config.num_attention_heads={heads} must be a multiple of"
                f" num_key_value_heads={kv_heads}"
            )
        if self.head_dim < 4 or self.head_dim % 4:
            raise UserError(
                f"config.json: vision_config.head_dim={self.head_dim}; rows and columns turn pairs"
                " of a half each, which needs a multiple of 4"
            )
        for name in ("pooling_kernel_size", "position_embedding_size"):
            if (value := getattr(self, name)) < 1:
                raise UserError(f"config.json: vision_config.{name}={value} must be at least 1")

    @override
    def make_block(self, options: DecoderOptions, rngs: nnx.Rngs) -> Block:
        init = vision_init(self, options, rngs)
        linear = ClippedLinear if self.use_clipped_linears else Linear
        attention = AxialAttention(
            self.hidden_size,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
            AttentionOptions(
                qk_norm="head",
                v_norm=True,
                norm=self.norm,
                eps=self.layer_norm_eps,
                scale=1.0,
                impl=options.attention_impl,
                linear=linear,
            ),
            init=init,
        )
        mlp = GatedMLP(
            self.hidden_size,
            self.intermediate_size,
            activation=self.hidden_act,
            linear=linear,
            init=init,
        )
        return Block(attention, mlp, **{name: make_norm(self, init) for name in SANDWICH_NORMS})

    @override
    def build(self, config: Any, options: DecoderOptions, rngs: nnx.Rngs) -> "AxialVision":
        return AxialVision(self, config.hidden_size, options, rngs)


class AxialAttention(Attention):
    """Attention whose queries and keys turn by column in their first half, by row in the other."""

    @override
    def _norm_and_rotate(
        self, x_BTNH: jax.Array | None, norm: RMSNorm | None, angles: Angles | None
    ) -> jax.Array | None:
        assert x_BTNH is not None and norm is not None and angles is not None
        x_BTNH = norm(x_BTNH)
        # Pairs lie H/2 apart, as everywhere, in an order that scores of queries and keys that were
        # both turned so do not see.
        halves = x_BTNH.reshape(*x_BTNH.shape[:-1], 2, 2, -1).swapaxes(-3, -2)
        return rotate(halves.reshape(x_BTNH.shape), angles)


class AxialTower(VisionEncoder):
    """Patches with a learned position for their column and one for their row, and layers."""

    def __init__(self, config: TowerConfig, options: DecoderOptions, rngs: nnx.Rngs):
        init = vision_init(config, options, rngs)
        width, places = config.hidden_size, config.position_embedding_size
        self.patch = PatchEmbedding(3 * config.patch_size**2, width, use_bias=False, init=init)
        table = init.normal((2, places, width))
        self.position_table = nnx.Param(table, axes=(None, None, "embed"))
        self.stack = make_stack(config, options, rngs)
        ones, shifts = jnp.ones((width,), init.param_dtype), config.standardize
        self.std_bias = nnx.Param(0 * ones, axes=("norm",)) if shifts else None
        self.std_scale = nnx.Param(ones, axes=("norm",)) if shifts else None
        self.dims = config.head_dim // 2
        self.theta = float(dict(config.rope)["rope_theta"])

    @override
    def embed(self, images: Images) -> jax.Array:
        x_BPC = 2 * (look_up_values(images) - 0.5)
        # Channel, row, column; the kernel's rows are row, column, channel.
        by_channel = x_BPC.reshape(*x_BPC.shape[:2], 3, -1)
        x_BPD = self.patch(by_channel.swapaxes(-1, -2).reshape(x_BPC.shape))
        by_column, by_row = gathered(self.position_table, x_BPD.dtype)
        places_BP2 = images.row_col
        return x_BPD + (by_column[places_BP2[..., 1]] + by_row[places_BP2[..., 0]])

    @override
    def turn(self, images: Images) -> Mapping[str, Angles]:
        wide = jnp.promote_types(self.patch.dtype, jnp.float32)
        powers = jnp.arange(0, self.dims, 2, dtype=wide) / self.dims
        column_row_BP2 = images.row_col[..., ::-1].astype(wide)
        angle_BP2R = column_row_BP2[..., None] / self.theta**powers
        angle_BPR = angle_BP2R.reshape(*angle_BP2R.shape[:2], -1)
        return {"default": Angles(jnp.cos(angle_BPR), jnp.sin(angle_BPR))}

    def pool(self, x_BFMD: jax.Array) -> jax.Array:
        """[B, F, D]: the mean of each block, as long as features of the text are, shifted and
        scaled by numbers that are loaded and saved, and have no gradient."""
        wide = jnp.promote_types(x_BFMD.dtype, jnp.float32)
        mean_BFD = x_BFMD.astype(wide).mean(-2).astype(x_BFMD.dtype)
        y_BFD = mean_BFD.astype(wide) * x_BFMD.shape[-1] ** 0.5
        if self.std_bias is not None and self.std_scale is not None:
            bias, scale = map(jax.lax.stop_gradient, (self.std_bias[...], self.std_scale[...]))
            y_BFD = (y_BFD - bias.astype(wide)) * scale.astype(wide)
        return y_BFD.astype(x_BFMD.dtype)


class AxialVision(Vision):
    """`AxialTower`, and one matrix for the projector."""

    tower: AxialTower

    def __init__(
        self, config: TowerConfig, num_features: int, options: DecoderOptions, rngs: nnx.Rngs
    ):
        init = vision_init(config, options, rngs)
        self.merge, width = config.pooling_kernel_size, config.hidden_size
        self.tower = AxialTower(config, options, rngs)
        self.norm = UnitRMSNorm(width, eps=config.layer_norm_eps)
        self.projector = Linear(width, num_features, axes=("mlp", "embed"), init=init)

    @override
    def project(self, x_BFMD, captured):
        return self.projector(self.norm(self.tower.pool(x_BFMD))), ()


@dataclasses.dataclass(frozen=True)
class Limit:
    """A number whose infinity in a folder is UNLIMITED here."""

    name: str

    def shapes(self, shape):
        return {self.name: shape}

    def read(self, fetch, index):
        return np.clip(fetch(self.name, index).astype(np.float32), -UNLIMITED, UNLIMITED)

    def write(self, array, host) -> Iterator[SplitPiece]:
        array = host(array)
        # What bfloat16 makes of UNLIMITED may be less.
        infinite = np.abs(array.astype(np.float32)) > UNLIMITED / 2
        array = np.where(infinite, np.copysign(np.inf, array), array).astype(array.dtype)
        yield SplitPiece(self.name, array.shape, full_index(array.shape), array)


def tower_names(config: TowerConfig) -> list[ParameterEntry]:
    """Entries of tower and projector."""
    layers, embedder = range(config.num_hidden_layers), f"{ROOT}patch_embedder."
    entries = norm_names("block", layers, NORMS)
    for path, module in LINEARS.items():
        entries += linear_entries("block", layers, path, f"{module}.linear")
    entries = with_prefix(entries, f"{ROOT}encoder.")
    for path, module in LINEARS.items() if config.use_clipped_linears else ():
        for name in ClippedLinear.limits:
            tensors = (f"{ROOT}encoder.layers.{layer}.{module}.{name}" for layer in layers)
            limits = StackedOps(tuple(map(Limit, tensors)))
            entries.append(ParameterEntry(f"stack.block.{path}.{name}", limits))
    kernel = Transpose(TensorRef(f"{embedder}input_proj.weight"))
    entries += [
        ParameterEntry("patch.kernel", kernel),
        ParameterEntry("position_table", TensorRef(f"{embedder}position_embedding_table")),
    ]
    for name in ("std_bias", "std_scale") if config.standardize else ():
        entries.append(ParameterEntry(name, TensorRef(f"{ROOT}{name}")))
    projection = Transpose(TensorRef("model.embed_vision.embedding_projection.weight"))
    return [
        *(ParameterEntry(f"vision.tower.{entry.param}", entry.op) for entry in entries),
        ParameterEntry("vision.projector.kernel", projection),
    ]
