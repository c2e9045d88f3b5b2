"""Idefics3 (Laurençon et al. 2024, arXiv:2408.12637): Llama's network, and tiles of images through
a SigLIP-like tower, whose patches are shuffled into fewer, wider ones."""

import dataclasses
import json
from typing import ClassVar

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import describe
from jaxtrain.huggingface.ops import ParameterEntry, TensorRef, Transpose
from jaxtrain.models import llama
from jaxtrain.models.blocks import SpecDecoder, spec_names
from jaxtrain.models.multimodal import ImageTextConfig
from jaxtrain.models.vision import TileConfig, tower_names

Model = SpecDecoder


class TowerConfig(TileConfig):
    model_type: ClassVar[str] = "idefics3_vision"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ImageTextConfig):
    architecture: ClassVar[str] = "Idefics3ForConditionalGeneration"
    model_type: ClassVar[str] = "idefics3"
    text_type: ClassVar[str] = "llama"
    tower_type: ClassVar[type[TileConfig]] = TowerConfig
    prefixes: ClassVar[tuple[str, ...]] = ("model.text_model.", "text_model.")
    media: ClassVar[tuple[str, ...]] = ("image_token_id",)

    attention_bias: bool = False
    """On all four projections of the text's layers."""
    mlp_bias: bool = False

    def check(self) -> None:
        super().check()
        if self.vision is not None and self.vision.side % self.merge:
            raise UserError(
                f"config.json: scale_factor={self.merge} must divide the {self.vision.side} patches"
                " along a side of a tile (vision_config.image_size / patch_size)"
            )

    @property
    def merge(self) -> int:
        factor = json.loads(self.around or "{}").get("scale_factor", 2)
        if type(factor) is not int or factor < 1:
            raise UserError(f"config.json: scale_factor is {describe(factor)}; it is a number > 0")
        return factor

    block_spec = llama.Config.block_spec


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    root = config.prefix.removesuffix("text_model.")
    projector = Transpose(TensorRef(f"{root}connector.modality_projection.proj.weight"))
    return [
        *spec_names(config),
        *tower_names(config.vision, f"{root}vision_model."),
        ParameterEntry("vision.projector.kernel", projector),
    ]
