"""VaultGemma (Google 2025, arXiv:2510.15001): Gemma 2 without the norms behind its layers."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from jaxtrain.models import gemma2

NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(gemma2.Config):
    architecture: ClassVar[str] = "VaultGemmaForCausalLM"
    model_type: ClassVar[str] = "vaultgemma"
    block_norms: ClassVar[Mapping[str, str]] = NORMS


Model, names = gemma2.Model, gemma2.names
