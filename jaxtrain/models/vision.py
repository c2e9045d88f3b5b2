"""Towers that turn the patches of images into features, which stand in the text as tokens.

Patches are packed as tokens are (batch.Images), so the tower is a Stack like that of the text, with
attention within a segment. The projector makes one feature of m * m neighbors:

    pixels uint8 -> values -> patches [B, P, D] -> layers -> norm -> [B, P / m m, m m D] -> features

Shapes: B rows, P patches of a row, F features of a row, C numbers of a patch, D width.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtrain_kernels import Context
from typing_extensions import override

from jaxtrain.batch import Images
from jaxtrain.distributed.sharding import constrain, gathered
from jaxtrain.errors import UserError
from jaxtrain.huggingface.config import read_fields
from jaxtrain.huggingface.ops import Flattened, ParameterEntry, TensorRef, Transpose
from jaxtrain.layers.attention import Attention, AttentionOptions
from jaxtrain.layers.block import Block
from jaxtrain.layers.linear import LayerInit, Linear
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.mlp import ACTIVATIONS, MLP, GatedMLP
from jaxtrain.layers.noise import RowNoise, hash_bits, set_rng_bits, token_rng_bits
from jaxtrain.layers.norm import LayerNorm, RMSNorm
from jaxtrain.layers.rope import Angles
from jaxtrain.layers.stack import Stack, StackInputs
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, DenseSpec
from jaxtrain.models.decoder import DecoderOptions
from jaxtrain.models.naming import with_prefix
from jaxtrain.models.parameters import split_model

PATCH_NOISE, FEATURE_NOISE = 0x51ED270B, 0x2545F491
"""Salts of the random bits of patches and of features, which differ from those of tokens."""
NORMS = {"attention_norm": "layer_norm1", "mlp_norm": "layer_norm2"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The attributes of a `vision_config`, and how patches become features."""

    model_type: ClassVar[str]
    renamed: ClassVar[Mapping[str, str]] = {}
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {"num_channels": (3,)}
    norm: ClassVar[type[RMSNorm]] = LayerNorm
    gated: ClassVar[bool] = False
    """True if the MLPs have a gate."""
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    patch_size: int
    hidden_act: str
    layer_norm_eps: float = 1e-6
    initializer_range: float = 0.02

    @classmethod
    def from_hf(cls, raw: Any) -> Self:
        """Read a vision_config; UserError for what would be computed in another way."""
        if not isinstance(raw, Mapping):
            raise UserError("config.json: vision_config is missing, or no object")
        try:
            values = read_fields(cls, raw)
        except UserError as error:
            raise UserError(f"vision_config of {error}") from None
        names = {field.name for field in dataclasses.fields(cls)}
        config = cls(**{name: value for name, value in values.items() if name in names})
        config.check()
        return config

    def check(self) -> None:
        """Raise UserError if the sizes do not fit together."""
        if self.hidden_act not in ACTIVATIONS:
            raise UserError(
                f"config.json: vision_config.hidden_act={self.hidden_act!r}; supported:"
                f" {sorted(ACTIVATIONS)}"
            )
        self.check_heads()
        if self.patch_size < 1 or not 0 < self.side < 2**12:
            raise UserError(
                f"config.json: vision_config: patch_size={self.patch_size} gives {self.side}"
                " positions along a side of an image"
            )

    def check_heads(self) -> None:
        """Raise UserError if the sizes of attention do not fit together."""
        if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"config.json: vision_config.hidden_size={self.hidden_size} must be a multiple of"
                f" num_attention_heads={self.num_attention_heads}"
            )

    @property
    def side(self) -> int:
        """Patches along a side of the image that learned positions were trained on; 1 without
        such positions."""
        return 1

    def layers(self) -> tuple[LayerSpec, ...]:
        """Return the spec of each layer; by default all are alike."""
        return (LayerSpec(),) * self.num_hidden_layers

    def make_block(self, options: DecoderOptions, rngs: nnx.Rngs) -> Block:
        """Build a layer of the tower: by default attention and an MLP, with biases."""
        init = vision_init(self, options, rngs)
        width, heads = self.hidden_size, self.num_attention_heads
        choices = AttentionOptions(qkv_bias=True, out_bias=True, impl=options.attention_impl)
        attention = Attention(width, heads, heads, width // heads, choices, init=init)
        mlp = (GatedMLP if self.gated else MLP)(
            width, self.intermediate_size, activation=self.hidden_act, use_bias=True, init=init
        )
        norms = {name: make_norm(self, init) for name in NORMS}
        return Block(attention, mlp, **norms)

    @abstractmethod
    def build(self, config: Any, options: DecoderOptions, rngs: nnx.Rngs) -> "Vision":
        """Build the tower and the projector of a model with this `vision`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileConfig(VisionConfig):
    """Attributes of a tower whose images are squares of `image_size`."""

    image_size: int

    @property
    @override
    def side(self) -> int:
        return self.image_size // max(self.patch_size, 1)

    @override
    def build(self, config: Any, options: DecoderOptions, rngs: nnx.Rngs) -> "TileVision":
        return TileVision(self, config.merge, config.hidden_size, options, rngs)


class PatchEmbedding(nnx.Module):
    """[B, P, C] -> [B, P, D]: a convolution whose patches do not overlap. Not a Linear: PEFT has
    another form for adapters of convolutions, and in fewer bits it would lose the image. frames: of
    a video in a patch; an image is the same frame in all of them, so their kernels add up."""

    def __init__(
        self, num_in: int, num_out: int, *, frames: int = 1, use_bias: bool = True, init: LayerInit
    ):
        self.frames = frames
        self.kernel = nnx.Param(init.normal((num_in * frames, num_out)), axes=(None, "embed"))
        zeros = jnp.zeros((num_out,), init.param_dtype)
        self.bias = nnx.Param(zeros, axes=("norm",)) if use_bias else None
        self.dtype = jnp.dtype(init.dtype)

    def __call__(self, x_BPC: jax.Array) -> jax.Array:
        kernel = gathered(self.kernel, self.dtype)
        if self.frames > 1:  # columns are channel, frame, row, column
            kernel = kernel.reshape(3, self.frames, -1, kernel.shape[-1]).sum(1)
            kernel = kernel.reshape(-1, kernel.shape[-1])
        y_BPD = x_BPC.astype(self.dtype) @ kernel
        return y_BPD if self.bias is None else y_BPD + self.bias[...].astype(self.dtype)


class VisionEncoder(nnx.Module):
    """Base of towers: packed patches through layers that attend within a segment. A tower adds its
    parameters, `embed` and `turn`, and may capture outputs of layers."""

    stack: Stack
    norm: RMSNorm | None = None
    """Behind the last layer."""
    capture: tuple[int, ...] = ()

    @abstractmethod
    def embed(self, images: Images) -> jax.Array:
        """[B, P, D] of patches and their positions."""

    def turn(self, images: Images) -> Mapping[str, Angles]:
        """Rotations of queries and keys; none by default."""
        return {}

    def mask(self, images: Images, context: Context) -> Mapping[str, Context]:
        """Masks of layers that do not see all of a segment; none by default."""
        return {}

    def mixing_flops(self, images: Images) -> float:
        """FLOPs of a forward pass over host arrays besides those of weights, without padding."""
        return self.stack.mixing_flops(span_patches(images.since, images.until))

    def __call__(
        self, images: Images, rng_bits_BP: jax.Array | None
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Return ([B, P, D] of the patches of a batch, the captured outputs); rng_bits: of patches,
        for adapters that draw."""
        x_BPD = constrain(self.embed(images), "rows", "sequence", "features")
        index_P = jnp.arange(x_BPD.shape[1], dtype=jnp.int32)
        index_BP = jnp.broadcast_to(index_P, images.until.shape)
        context = Context(images.until, images.since, index_BP, index_BP)
        masks = self.mask(images, context)
        inputs = StackInputs(context, self.turn(images), masks=masks, rng_bits=rng_bits_BP)
        outputs = self.stack(x_BPD, inputs, capture=self.capture)[0]
        hidden_BPD = outputs.hidden if self.norm is None else self.norm(outputs.hidden)
        return hidden_BPD, [outputs.captured[layer] for layer in self.capture]


class Tower(VisionEncoder):
    """A SigLIP-like encoder (Zhai et al. 2023, arXiv:2303.15343) with a learned position for each
    patch of a square; the positions of smaller grids are those of their fractions of the side."""

    def __init__(self, config: VisionConfig, options: DecoderOptions, rngs: nnx.Rngs):
        init = vision_init(config, options, rngs)
        width, side = config.hidden_size, config.side
        self.side = side
        self.patch = PatchEmbedding(3 * config.patch_size**2, width, init=init)
        self.position_table = nnx.Param(init.normal((side * side, width)), axes=(None, "embed"))
        self.stack = make_stack(config, options, rngs)
        self.norm = make_norm(config, init)

    @override
    def embed(self, images: Images) -> jax.Array:
        x_BPD = self.patch(look_up_values(images))
        table_SD = gathered(self.position_table, x_BPD.dtype)
        return x_BPD + table_SD[self.place(images)]

    def place(self, images: Images) -> jax.Array:
        """Return the row of the position table of each patch, int32 [B, P]."""
        return bucket_positions(images.row_col, images.grid, self.side)


class Vision(nnx.Module):
    """Images -> features: `tower`, then `projector` on the m * m patches of each block, m being
    `merge`."""

    tower: VisionEncoder
    projector: nnx.Module
    merge: int

    def __call__(
        self, images: Images, noise: RowNoise | None
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Return features [B, F, D], F = P / (m m), and those for single layers of the text."""
        rows, patches = images.since.shape
        assert patches % self.merge**2 == 0, f"{patches} patches in blocks of {self.merge**2}"
        rng_bits_BP, count = None, patches // self.merge**2
        if noise is not None:
            rng_bits_BP = token_rng_bits(hash_bits(noise.rng_bits_B, PATCH_NOISE), patches)
            rng_bits_BF = token_rng_bits(hash_bits(noise.rng_bits_B, FEATURE_NOISE), count)
            set_rng_bits(self.projector, rng_bits_BF)
        x_BPD, captured = self.tower(images, rng_bits_BP)
        blocks = [x.reshape(rows, count, self.merge**2, -1) for x in (x_BPD, *captured)]
        return self.project(blocks[0], blocks[1:])

    @abstractmethod
    def project(
        self, x_BFMD: jax.Array, captured: Sequence[jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Make features of the patches of each block, and of those of captured layers."""

    def forward_flops(self, images: Images) -> dict[str, float]:
        """FLOPs of a forward pass over host arrays, without padding, by part."""
        patches = len(span_patches(images.since, images.until))
        tower, projector = (
            sum(x.size for path, x in split_model(part)[0].items() if path.endswith("kernel"))
            for part in (self.tower, self.projector)
        )
        return {
            "tower": 2.0 * tower * patches + self.tower.mixing_flops(images),
            "projector": 2.0 * projector * patches / self.merge**2,
        }


class TileVision(Vision):
    """A `Tower`, and one matrix for the projector."""

    def __init__(
        self,
        config: VisionConfig,
        merge: int,
        num_features: int,
        options: DecoderOptions,
        rngs: nnx.Rngs,
    ):
        init = vision_init(config, options, rngs)
        self.merge = merge
        self.tower = Tower(config, options, rngs)
        width = config.hidden_size * merge**2
        self.projector = Linear(width, num_features, axes=("mlp", "embed"), init=init)

    @override
    def project(self, x_BFMD, captured):
        return self.projector(x_BFMD.reshape(*x_BFMD.shape[:2], -1)), ()


def span_patches(since_BP: Any, until_BP: Any) -> np.ndarray:
    """Return the number of patches that each patch sees, int [n] of the patches that are not
    padding, from host arrays."""
    spans = (np.asarray(until_BP) - np.asarray(since_BP)).reshape(-1)
    return spans[spans > 1]


def vision_init(config: VisionConfig, options: DecoderOptions, rngs: nnx.Rngs) -> LayerInit:
    """Return how the parameters of a tower are created."""
    param_dtype = jnp.dtype(options.param_dtype)
    return LayerInit(rngs, config.initializer_range, param_dtype, jnp.dtype(options.dtype))


def make_norm(config: VisionConfig, init: LayerInit) -> RMSNorm:
    """Build a norm of patches."""
    return config.norm(config.hidden_size, eps=config.layer_norm_eps, param_dtype=init.param_dtype)


def make_stack(config: VisionConfig, options: DecoderOptions, rngs: nnx.Rngs) -> Stack:
    """Build the layers of a tower, all with parameters of the same shapes."""
    return Stack(
        config.layers(),
        lambda kind, rngs: config.make_block(options, rngs),
        remat=options.remat,
        scan=options.scan_layers,
        only=options.only_layer,
        rngs=rngs,
    )


def look_up_values(images: Images) -> jax.Array:
    """float32 [B, P, C] of the pixels."""
    rows, patches, width = images.pixels.shape
    # By channel, so that each gather reads a table of 256 numbers.
    pixels_BPCN = images.pixels.reshape(rows, patches, 3, width // 3).astype(jnp.int32)
    look_up = jax.vmap(jax.vmap(lambda table, x: table[x], (1, 1), 1))
    return look_up(images.values, pixels_BPCN).reshape(rows, patches, width)


def bucket_positions(row_col_BP2: jax.Array, grid_BP2: jax.Array, side: int) -> jax.Array:
    """int32 [B, P] rows of the position table: of fraction i / n of the image along each axis,
    among `side` buckets."""
    buckets_NN = bucket_table(side)
    row_col_BP2 = jnp.asarray(buckets_NN)[grid_BP2 - 1, row_col_BP2]
    return row_col_BP2[..., 0] * side + row_col_BP2[..., 1]


def bucket_table(side: int) -> np.ndarray:
    """int32 [n - 1, i] buckets of patch i of n <= `side`, in the float32 steps of transformers."""
    # On the host, since devices may divide less exactly, and fractions lie on the borders.
    unit = np.float32(1)
    borders = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)
    index = np.arange(side, dtype=np.float32)
    steps = unit / np.arange(1, side + 1, dtype=np.float32)
    fractions = np.minimum(index[None] * steps[:, None], np.float32(1 - 1e-6))
    return np.searchsorted(borders, fractions, side="right").astype(np.int32)


def tower_names(config: VisionConfig, root: str) -> list[ParameterEntry]:
    """Entries of a `Tower`, whose tensors begin with root."""
    layers, size = range(config.num_hidden_layers), config.patch_size
    module = f"{root}embeddings.patch_embedding"
    kernel = Transpose(Flattened(f"{module}.weight", (3, size, size)))
    attention = AttentionSpec(qkv_bias=True, out_bias=True, out_name="out_proj")
    mlp = DenseSpec(bias=True, parts={"up": "fc1", "down": "fc2"})
    block = BlockSpec(attention, mlp, norms=NORMS)
    entries = [
        ParameterEntry("patch.kernel", kernel),
        ParameterEntry("patch.bias", TensorRef(f"{module}.bias")),
        ParameterEntry("position_table", TensorRef(f"{root}embeddings.position_embedding.weight")),
        *with_prefix(block.names(config, "block", layers), f"{root}encoder."),
        ParameterEntry("norm.scale", TensorRef(f"{root}post_layernorm.weight")),
        ParameterEntry("norm.bias", TensorRef(f"{root}post_layernorm.bias")),
    ]
    return [ParameterEntry(f"vision.tower.{entry.param}", entry.op) for entry in entries]
