"""The towers of Qwen's models: images of any size, rotations by row and column; those of Qwen3-VL
and Qwen3.5 also have positions between those of a learned grid, and features for the first layers
of the text (DeepStack: Meng et al. 2024, arXiv:2406.04334); and what a text around them shares.

Shapes: as in vision.py; M patches of a block.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from typing_extensions import override

from jaxtrain.batch import Images
from jaxtrain.distributed.sharding import gathered
from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import describe
from jaxtrain.huggingface.ops import (
    Flattened,
    ParameterEntry,
    PermutedRows,
    StackedOps,
    TensorOp,
    TensorRef,
    Transpose,
)
from jaxtrain.layers.linear import LayerInit, Linear
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.rope import Angles
from jaxtrain.models.blocks import spec_names
from jaxtrain.models.decoder import DecoderOptions
from jaxtrain.models.multimodal import ImageTextConfig
from jaxtrain.models.naming import NORM_TENSORS
from jaxtrain.models.vision import (
    PatchEmbedding,
    Vision,
    VisionConfig,
    VisionEncoder,
    look_up_values,
    make_stack,
    vision_init,
)

FRAMES = 2
"""Frames that a patch of a video spans; an image is the same frame twice."""
LINEARS = {"q": 0, "k": 1, "v": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenTowerConfig(VisionConfig):
    """Keys of `vision_config` that all of these towers have."""

    renamed: ClassVar[Mapping[str, str]] = {
        "num_hidden_layers": "depth",
        "num_attention_heads": "num_heads",
    }
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "in_channels": (3,),
        "in_chans": (3,),
        "temporal_patch_size": (FRAMES,),
    }
    patch_bias: ClassVar[bool] = False
    tensors: ClassVar[Mapping[str, str]]
    """Names of the parts of the MLPs and of the projector in folders."""
    spatial_merge_size: int
    out_hidden_size: int
    deepstack_visual_indexes: tuple[int, ...] = ()
    rope: tuple[tuple[str, Any], ...] = ()

    def make_tower(self, options: DecoderOptions, rngs: nnx.Rngs) -> "QwenTower":
        """Build the tower."""
        return QwenTower(self, options, rngs)

    @override
    def build(self, config: Any, options: DecoderOptions, rngs: nnx.Rngs) -> "QwenVision":
        return QwenVision(self, options, rngs)

    @override
    def check(self) -> None:
        super().check()
        if self.spatial_merge_size < 1:
            raise UserError(
                f"config.json: vision_config.spatial_merge_size={self.spatial_merge_size} must be"
                " at least 1"
            )
        head = self.hidden_size // self.num_attention_heads
        if head % 4:
            raise UserError(
                f"config.json: vision_config: heads of {head} dims; rows and columns turn pairs of"
                " a half each, which needs a multiple of 4"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridTowerConfig(QwenTowerConfig):
    """Keys of a tower with learned positions."""

    patch_bias: ClassVar[bool] = True
    tensors: ClassVar[Mapping[str, str]] = {
        **{"up": "linear_fc1", "down": "linear_fc2"},
        **{"merger.norm": "norm", "merger.up": "linear_fc1", "merger.down": "linear_fc2"},
    }
    deep: ClassVar[bool] = False
    """True where the text's first layers get features of the tower's layers."""
    num_position_embeddings: int

    @property
    @override
    def side(self) -> int:
        return int(self.num_position_embeddings**0.5)

    @override
    def make_tower(self, options: DecoderOptions, rngs: nnx.Rngs) -> "GridTower":
        return GridTower(self, options, rngs)

    @override
    def check(self) -> None:
        super().check()
        layers = self.deepstack_visual_indexes
        if self.side**2 != self.num_position_embeddings:
            raise UserError(
                f"config.json: vision_config.num_position_embeddings={self.num_position_embeddings}"
                " is no square"
            )
        if layers and not self.deep:
            raise UserError(
                f"config.json: vision_config.deepstack_visual_indexes={list(layers)}; only [] is"
                f" computed for {self.model_type}"
            )
        if list(layers) != [n for n in range(self.num_hidden_layers) if n in layers]:
            raise UserError(
                f"config.json: vision_config.deepstack_visual_indexes={list(layers)} must ascend,"
                f" from 0 and below depth={self.num_hidden_layers}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenImageConfig(ImageTextConfig):
    """Attributes of a text whose pairs of dims turn by time, row or column."""

    media: ClassVar[tuple[str, ...]] = ("image_token_id", "video_token_id")
    """Not what stands before and behind an image: those are read like text."""
    section: ClassVar[tuple[int, ...]] = (24, 20, 20)
    """mrope_section where config.json has none."""
    tower_root: ClassVar[str] = "model.visual."
    """Beginning of the names of the tower's tensors."""

    @override
    def check(self) -> None:
        super().check()
        if self.vision is not None and self.vision.out_hidden_size != self.hidden_size:
            raise UserError(
                f"config.json: vision_config.out_hidden_size={self.vision.out_hidden_size} must be"
                f" the text's hidden_size={self.hidden_size}"
            )
        _ = self.rope_axes  # which refuses another mrope_section

    @property
    @override
    def merge(self) -> int:
        return self.vision.spatial_merge_size

    @property
    @override
    def rope_axes(self) -> tuple[int, ...] | None:
        if self.vision is None:
            return None
        [(frequency, _)] = self.encodings().values()
        section = dict(self.rope).get("mrope_section", self.section)
        numbers = section if isinstance(section, list | tuple) else ()
        if len(numbers) != 3 or any(type(n) is not int or n < 0 for n in numbers):
            raise UserError(
                f"config.json: mrope_section is {describe(section)}; it must be three numbers of"
                " pairs"
            )
        return self.divide_axes(len(frequency), section)

    def divide_axes(self, pairs: int, section: Sequence[int]) -> tuple[int, ...]:
        """Return what each pair of dims turns by, 0 time, 1 row, 2 column: here in turn as long as
        section [time, row, column] of them last."""
        return tuple(
            pair % 3 if pair % 3 and pair < 3 * section[pair % 3] else 0 for pair in range(pairs)
        )

    @override
    def layers(self) -> tuple[LayerSpec, ...]:
        specs = super().layers()
        count = 0 if self.vision is None else len(self.vision.deepstack_visual_indexes)
        if count > len(specs):
            raise UserError(
                f"config.json: vision_config.deepstack_visual_indexes names {count} layers; the"
                f" text has num_hidden_layers={self.num_hidden_layers}"
            )
        deep = (dataclasses.replace(spec, adds=index) for index, spec in enumerate(specs[:count]))
        return (*deep, *specs[count:])


class QwenTower(VisionEncoder):
    """Patches and layers with rotations."""

    def __init__(self, config: QwenTowerConfig, options: DecoderOptions, rngs: nnx.Rngs):
        init = vision_init(config, options, rngs)
        width, num_in = config.hidden_size, 3 * config.patch_size**2
        self.patch = PatchEmbedding(
            num_in, width, frames=FRAMES, use_bias=config.patch_bias, init=init
        )
        self.stack = make_stack(config, options, rngs)
        self.capture = config.deepstack_visual_indexes
        self.dims = width // config.num_attention_heads // 2
        self.theta = float(dict(config.rope).get("rope_theta", 1e4))

    @override
    def embed(self, images: Images) -> jax.Array:
        return self.patch(look_up_values(images))

    @override
    def turn(self, images: Images) -> Mapping[str, Angles]:
        wide = jnp.promote_types(self.patch.dtype, jnp.float32)
        powers = jnp.arange(0, self.dims, 2, dtype=wide) / self.dims
        angle_BP2R = images.row_col[..., None].astype(wide) / self.theta**powers
        angle_BPR = angle_BP2R.reshape(*angle_BP2R.shape[:2], -1)
        return {"default": Angles(jnp.cos(angle_BPR), jnp.sin(angle_BPR))}


class GridTower(QwenTower):
    """A `QwenTower` with positions between those of the learned grid."""

    def __init__(self, config: GridTowerConfig, options: DecoderOptions, rngs: nnx.Rngs):
        super().__init__(config, options, rngs)
        init = vision_init(config, options, rngs)
        self.side = config.side
        shape = (self.side**2, config.hidden_size)
        self.position_table = nnx.Param(init.normal(shape), axes=(None, "embed"))

    @override
    def embed(self, images: Images) -> jax.Array:
        x_BPD = super().embed(images)
        table_SD, last = gathered(self.position_table, x_BPD.dtype), self.side - 1
        # Corner on corner, as torch interpolates with align_corners.
        wide = jnp.promote_types(x_BPD.dtype, jnp.float32)
        count_BP2 = jnp.maximum(images.grid - 1, 1).astype(wide)
        place_BP2 = images.row_col.astype(wide) * last / count_BP2
        low_BP2 = jnp.floor(place_BP2).astype(jnp.int32)
        share_BP2 = place_BP2 - low_BP2
        ends = [(low_BP2, 1 - share_BP2), (jnp.minimum(low_BP2 + 1, last), share_BP2)]
        for row_BP2, row_share_BP2 in ends:
            for col_BP2, col_share_BP2 in ends:
                index_BP = row_BP2[..., 0] * self.side + col_BP2[..., 1]
                share_BP = (row_share_BP2[..., 0] * col_share_BP2[..., 1]).astype(x_BPD.dtype)
                x_BPD = x_BPD + table_SD[index_BP] * share_BP[..., None]
        return x_BPD


class Merger(nnx.Module):
    """[..., M, D] -> [..., out]: norm, the patches of a block side by side, two matrices with GELU
    between; joined: the norm is over all patches of the block."""

    def __init__(self, config: QwenTowerConfig, init: LayerInit, joined: bool = False):
        width = config.hidden_size * config.spatial_merge_size**2
        norm_width = width if joined else config.hidden_size
        eps = config.layer_norm_eps
        self.joined = joined
        self.norm = config.norm(norm_width, eps=eps, param_dtype=init.param_dtype)
        self.up = Linear(width, width, axes=("embed", "mlp"), use_bias=True, init=init)
        out = config.out_hidden_size
        self.down = Linear(width, out, axes=("mlp", "embed"), use_bias=True, init=init)

    def __call__(self, x_BFMD: jax.Array) -> jax.Array:
        flat = (*x_BFMD.shape[:-2], -1)
        x_BFD = self.norm(x_BFMD.reshape(flat) if self.joined else x_BFMD).reshape(flat)
        return self.down(jax.nn.gelu(self.up(x_BFD), approximate=False))


class Projector(nnx.Module):
    """The merger of the last layer, and one for each layer in `deepstack_visual_indexes`."""

    def __init__(self, config: QwenTowerConfig, init: LayerInit):
        self.merger = Merger(config, init)
        count = len(config.deepstack_visual_indexes)
        self.deep = nnx.List([Merger(config, init, joined=True) for _ in range(count)])


class QwenVision(Vision):
    """`QwenTower` and `Projector`."""

    projector: Projector

    def __init__(self, config: QwenTowerConfig, options: DecoderOptions, rngs: nnx.Rngs):
        self.merge = config.spatial_merge_size
        self.tower = config.make_tower(options, rngs)
        self.projector = Projector(config, vision_init(config, options, rngs))

    @override
    def project(
        self, x_BFMD: jax.Array, captured: Sequence[jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        deep = zip(self.projector.deep, captured, strict=True)
        return self.projector.merger(x_BFMD), tuple(merger(x) for merger, x in deep)


def qwen_names(config: QwenImageConfig) -> list[ParameterEntry]:
    """Every parameter of the text and of the tower, if there is one, and their tensors."""
    tower = [] if config.vision is None else qwen_tower_names(config.vision, config.tower_root)
    return [*spec_names(config), *tower]


def qwen_tower_names(config: QwenTowerConfig, root: str) -> list[ParameterEntry]:
    """Entries of tower and projector; root: of their tensors."""
    layers, size, width = range(config.num_hidden_layers), config.patch_size, config.hidden_size
    entries = [
        ParameterEntry(
            "tower.patch.kernel",
            Transpose(Flattened(f"{root}patch_embed.proj.weight", (3, FRAMES, size, size))),
        )
    ]
    if config.patch_bias:
        entries.append(
            ParameterEntry("tower.patch.bias", TensorRef(f"{root}patch_embed.proj.bias"))
        )
    if isinstance(config, GridTowerConfig):
        entries.append(ParameterEntry("tower.position_table", TensorRef(f"{root}pos_embed.weight")))

    def stack(param: str, make: Any) -> None:
        ops: tuple[TensorOp, ...] = tuple(make(f"{root}blocks.{layer}.") for layer in layers)
        entries.append(ParameterEntry(f"tower.stack.block.{param}", StackedOps(ops)))

    for name, part in LINEARS.items():
        rows = ((part * width, width),)
        stack(
            f"attention.{name}.kernel",
            lambda prefix, rows=rows: Transpose(
                PermutedRows(f"{prefix}attn.qkv.weight", 0, rows, 3 * width)
            ),
        )
        stack(
            f"attention.{name}.bias",
            lambda prefix, rows=rows: PermutedRows(f"{prefix}attn.qkv.bias", 0, rows, 3 * width),
        )
    mlp = {f"mlp.{part}": f"mlp.{name}" for part, name in config.tensors.items() if "." not in part}
    for param, name in {"attention.out": "attn.proj", **mlp}.items():
        stack(
            f"{param}.kernel",
            lambda prefix, name=name: Transpose(TensorRef(f"{prefix}{name}.weight")),
        )
        stack(f"{param}.bias", lambda prefix, name=name: TensorRef(f"{prefix}{name}.bias"))
    for param, name in (("attention_norm", "norm1"), ("mlp_norm", "norm2")):
        for part in config.norm.parameters:
            tensor = f"{name}.{NORM_TENSORS[part]}"
            stack(f"{param}.{part}", lambda prefix, tensor=tensor: TensorRef(prefix + tensor))
    mergers = {"projector.merger": f"{root}merger"}
    for index in range(len(config.deepstack_visual_indexes)):
        mergers[f"projector.deep.{index}"] = f"{root}deepstack_merger_list.{index}"
    for path, module in mergers.items():
        norm = f"{module}.{config.tensors['merger.norm']}"
        entries += [
            ParameterEntry(f"{path}.norm.{part}", TensorRef(f"{norm}.{NORM_TENSORS[part]}"))
            for part in config.norm.parameters
        ]
        for part in ("up", "down"):
            name = config.tensors[f"merger.{part}"]
            kernel = Transpose(TensorRef(f"{module}.{name}.weight"))
            entries += [
                ParameterEntry(f"{path}.{part}.kernel", kernel),
                ParameterEntry(f"{path}.{part}.bias", TensorRef(f"{module}.{name}.bias")),
            ]
    return [ParameterEntry(f"vision.{entry.param}", entry.op) for entry in entries]
