"""Idefics3 (Laurençon et al. 2024, arXiv:2408.12637): Llama's network, and tiles of images through
a SigLIP-like tower, whose patches are shuffled into fewer, wider ones."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import describe
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models import llama
from jaxtrain.models.decoder import DecoderOptions
from jaxtrain.models.multimodal import TextConfig
from jaxtrain.models.naming import with_prefix
from jaxtrain.models.vision import Vision, VisionConfig, tower_names


class TileVisionConfig(VisionConfig):
    model_type: ClassVar[str] = "idefics3_vision"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(TextConfig):
    architecture: ClassVar[str] = "Idefics3ForConditionalGeneration"
    model_type: ClassVar[str] = "idefics3"
    text_type: ClassVar[str] = "llama"
    vision_type: ClassVar[type[VisionConfig]] = TileVisionConfig
    prefixes: ClassVar[tuple[str, ...]] = ("model.text_model.", "text_model.")
    media: ClassVar[tuple[str, ...]] = ("image_token_id",)

    attention_bias: bool = False
    """On all four projections of the text's layers."""
    mlp_bias: bool = False

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        for key in ("text_config", "vision_config"):
            if not isinstance(raw.get(key), Mapping):
                raise UserError(
                    f"config.json: {key} is {describe(raw.get(key))}; {cls.architecture} has an"
                    " object there"
                )
        vision = cls.vision_type.from_hf(raw["vision_config"])
        config = dataclasses.replace(super().from_hf(raw), vision=vision)
        merge = config.merge
        if vision.side % merge:
            raise UserError(
                f"config.json: scale_factor={merge} must divide the {vision.side} patches along a"
                " side of a tile (vision_config.image_size / patch_size)"
            )
        return config

    @property
    def merge(self) -> int:
        """Patches along a side of the block that one feature is made of."""
        factor = json.loads(self.around or "{}").get("scale_factor", 2)
        if type(factor) is not int or factor < 1:
            raise UserError(f"config.json: scale_factor is {describe(factor)}; it is a number > 0")
        return factor

    def check_drawn(self) -> None:
        """Nothing: the tower is drawn with the text."""


class Model(llama.Model):
    def make_vision(self, config: Config, options: DecoderOptions, rngs: nnx.Rngs) -> Vision:
        return Vision(config.vision, config.merge, config.hidden_size, options, rngs)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    root = config.prefix.removesuffix("text_model.")
    connector = f"{root}connector.modality_projection.proj"
    tower = tower_names(config.vision, f"{root}vision_model.", connector)
    return [*with_prefix(llama.names(config), config.prefix), *tower]
