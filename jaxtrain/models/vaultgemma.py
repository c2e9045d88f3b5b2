"""VaultGemma (Google 2025, arXiv:2510.15001): Gemma 2 without the norms behind its layers."""

import dataclasses
from typing import ClassVar

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models import gemma2
from jaxtrain.models.naming import decoder_names

NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(gemma2.Config):
    architecture: ClassVar[str] = "VaultGemmaForCausalLM"
    model_type: ClassVar[str] = "vaultgemma"


class Model(gemma2.Model):
    norms = NORMS


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    bias = config.attention_bias
    return decoder_names(config, qkv_bias=bias, out_bias=bias, norms=NORMS)
