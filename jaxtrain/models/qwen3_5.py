"""Qwen3.5 and Qwen3.6 dense (Qwen Team 2026): three layers of linear attention, one of gated full
attention, and so on; folders with a tower for images, or of text alone."""

import dataclasses
from typing import ClassVar

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models.blocks import dense_mlp
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.hybrid import HybridConfig, linear_names, make_mixing_block, projection_names
from jaxtrain.models.naming import attention_names, mlp_names, outer_names
from jaxtrain.models.qwen_vision import GridTowerConfig, QwenImageConfig, qwen_names


class TowerConfig(GridTowerConfig):
    model_type: ClassVar[str] = "qwen3_5_vision"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(QwenImageConfig, HybridConfig):
    architecture: ClassVar[str] = "Qwen3_5ForCausalLM"
    also: ClassVar[tuple[str, ...]] = ("Qwen3_5ForConditionalGeneration",)
    model_type: ClassVar[str] = "qwen3_5"
    text_type: ClassVar[str] = "qwen3_5_text"
    tower_type: ClassVar[type[TowerConfig]] = TowerConfig
    tower_tensors: ClassVar[tuple[str, ...]] = ("model.visual.",)
    section: ClassVar[tuple[int, ...]] = (11, 11, 10)


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        return make_mixing_block(kind == "linear", config, options, rngs, dense_mlp)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    entries = outer_names(config)
    for kind, layers in config.layers_by_kind().items():
        if kind == "linear":
            entries += linear_names(config, kind, layers) + projection_names(config, kind, layers)
        else:
            entries += attention_names(kind, layers, qk_norm=True)
        entries += mlp_names(kind, layers)
    return qwen_names(config, entries)
