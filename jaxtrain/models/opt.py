"""OPT (Zhang et al. 2022, arXiv:2205.01068): LayerNorm, learned positions from the third row of
their table on, an MLP without a gate behind a ReLU, biases."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, DenseSpec, SpecDecoder, spec_names
from jaxtrain.models.joint_heads import EqualHeadsConfig
from jaxtrain.models.naming import rename_tensors

PARTS = {"up": "fc1", "down": "fc2"}
NORMS = {"attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(EqualHeadsConfig):
    architecture: ClassVar[str] = "OPTForCausalLM"
    model_type: ClassVar[str] = "opt"
    final_norm_name: ClassVar[str] = "final_layer_norm"
    prefix: ClassVar[str] = "model.decoder."
    renamed: ClassVar[Mapping[str, str]] = {
        "hidden_act": "activation_function",
        "initializer_range": "init_std",
        "intermediate_size": "ffn_dim",
    }
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "_remove_final_layer_norm": (False,),
        "do_layer_norm_before": (True,),
        "layer_norm_elementwise_affine": (True,),
        "layerdrop": (),
    }

    rms_norm_eps: float = 1e-5
    """Of the family; no attribute of its files."""
    enable_bias: bool = True
    """On all matrices of a layer."""
    word_embed_proj_dim: int | None = None
    """Features of a token's embedding."""

    def check(self) -> None:
        if self.word_embed_proj_dim not in (None, self.hidden_size):
            raise UserError(
                f"config.json: word_embed_proj_dim={self.word_embed_proj_dim} is supported only if"
                f" it is hidden_size, {self.hidden_size}"
            )
        super().check()

    def to_hf(self) -> dict[str, Any]:
        raw = super().to_hf()
        del raw["rms_norm_eps"]
        return raw

    def layers(self) -> tuple[LayerSpec, ...]:
        return (LayerSpec(rope="none"),) * self.num_hidden_layers

    def encodings(self) -> dict[str, Any]:
        return {}

    @property
    def first_position(self) -> int | None:
        return 2

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.enable_bias
        attention = AttentionSpec(qkv_bias=bias, out_bias=bias, out_name="out_proj")
        return BlockSpec(attention, DenseSpec(bias=bias, parts=PARTS), norms=NORMS)


Model = SpecDecoder


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    return rename_tensors(spec_names(config), lambda name: name.replace(".mlp.", "."))
