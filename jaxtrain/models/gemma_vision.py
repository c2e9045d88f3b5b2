"""The tower of Gemma 3 (Gemma Team 2025, arXiv:2503.19786): SigLIP (Zhai et al. 2023,
arXiv:2303.15343) on a square of one size, blocks of whose patches are averaged.

Shapes: as in vision.py; M patches of a block.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from flax import nnx
from typing_extensions import override

from jaxtrain.batch import Images
from jaxtrain.distributed.sharding import gathered
from jaxtrain.huggingface.ops import ParameterEntry, TensorRef
from jaxtrain.layers.linear import LayerInit
from jaxtrain.layers.norm import ZeroCenteredRMSNorm
from jaxtrain.models.decoder import DecoderOptions
from jaxtrain.models.vision import TileConfig, Tower, Vision, tower_names, vision_init


@dataclasses.dataclass(frozen=True, kw_only=True)
class SquareConfig(TileConfig):
    """SigLIP's attributes of a `vision_config`."""

    model_type: ClassVar[str] = "siglip_vision_model"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **TileConfig.fixed,
        "vision_use_head": (),  # which reads what comes out of the tower, for others
    }

    @override
    def build(self, config: Any, options: DecoderOptions, rngs: nnx.Rngs) -> "SquareVision":
        return SquareVision(self, config.merge, config.hidden_size, options, rngs)


class SquareTower(Tower):
    """A `Tower` whose images all have as many patches as there are positions."""

    @override
    def place(self, images: Images) -> jax.Array:
        return images.row_col[..., 0] * self.side + images.row_col[..., 1]


class MeanProjector(nnx.Module):
    """[B, F, M, D] -> [B, F, out]: the mean over a block, a norm, and a matrix. Not a Linear: in
    transformers it is no module, and PEFT has no adapter for it."""

    def __init__(self, config: SquareConfig, num_out: int, init: LayerInit):
        width, eps = config.hidden_size, config.layer_norm_eps
        self.norm = ZeroCenteredRMSNorm(width, eps=eps, param_dtype=init.param_dtype)
        self.kernel = nnx.Param(init.normal((width, num_out)), axes=("mlp", "embed"))

    def __call__(self, x_BFMD: jax.Array) -> jax.Array:
        x_BFD = self.norm(x_BFMD.mean(-2))
        return x_BFD @ gathered(self.kernel, x_BFD.dtype)


class SquareVision(Vision):
    """`SquareTower` and `MeanProjector`."""

    def __init__(
        self,
        config: SquareConfig,
        merge: int,
        num_features: int,
        options: DecoderOptions,
        rngs: nnx.Rngs,
    ):
        self.merge = merge
        self.tower = SquareTower(config, options, rngs)
        self.projector = MeanProjector(config, num_features, vision_init(config, options, rngs))

    @override
    def project(self, x_BFMD, captured):
        return self.projector(x_BFMD), ()


def square_names(config: SquareConfig, tower: str, projector: str) -> list[ParameterEntry]:
    """Entries of tower and projector, whose tensors begin with these."""
    norm, kernel = (f"{projector}{name}" for name in ("mm_soft_emb_norm.weight", PROJECTION))
    return [
        *tower_names(config, tower),
        ParameterEntry("vision.projector.norm.scale", TensorRef(norm)),
        ParameterEntry("vision.projector.kernel", TensorRef(kernel)),
    ]


PROJECTION = "mm_input_projection_weight"
