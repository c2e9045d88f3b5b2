"""Youtu-LLM (Tencent 2025, arXiv:2512.24618): DeepSeek-V3's latent attention and dense MLPs."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtrain.models import deepseek_v3
from jaxtrain.models.latent import PairedLatentConfig

Model, names = deepseek_v3.Model, deepseek_v3.names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PairedLatentConfig):
    architecture: ClassVar[str] = "YoutuForCausalLM"
    model_type: ClassVar[str] = "youtu"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "embedding_initializer_range": (),
        "mlp_bias": (False,),
    }
