"""GPT-Neo (Black et al. 2021), TinyStories (arXiv:2305.07759): GPT-2 with windows in some layers
and scores that nothing scales."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, DenseSpec, SpecDecoder
from jaxtrain.models.gpt2 import NORMS, PARTS, PositionedConfig
from jaxtrain.models.joint_heads import gpt_names
from jaxtrain.models.naming import rename_tensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PositionedConfig):
    architecture: ClassVar[str] = "GPTNeoForCausalLM"
    model_type: ClassVar[str] = "gpt_neo"
    renamed: ClassVar[Mapping[str, str]] = {
        "hidden_act": "activation_function",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "rms_norm_eps": "layer_norm_epsilon",
    }
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {"attention_layers": ()}

    attention_types: Any
    """(kinds of layers, global or local; times that they follow each other), and so on."""
    window_size: int

    @property
    def attention_layers(self) -> list[str]:
        """The kind of each layer."""
        return [kind for kinds, times in self.attention_types for kind in kinds * times]

    def check(self) -> None:
        if unknown := sorted({*self.attention_layers} - {"global", "local"}):
            raise UserError(
                f"config.json: attention_types names {', '.join(unknown)}; supported: global, local"
            )
        super().check()

    def layers(self) -> tuple[LayerSpec, ...]:
        windows = {"global": None, "local": self.window_size}
        return tuple(LayerSpec(window=windows[w], rope="none") for w in self.attention_layers)

    def block_spec(self, kind: str) -> BlockSpec:
        attention = AttentionSpec(out_bias=True, out_name="out_proj", scale=1.0)
        return BlockSpec(attention, DenseSpec(bias=True, parts=PARTS), norms=NORMS)


Model = SpecDecoder


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    return rename_tensors(
        gpt_names(config), lambda name: name.replace(".attn.", ".attn.attention.")
    )
