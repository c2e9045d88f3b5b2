"""GLM-5 (Zhipu AI 2026): in the form of DeepSeek-V3.2, layers that share an indexer's choice
included; as there, rows of up to `index_topk` tokens."""

import dataclasses
from typing import ClassVar

from jaxtrain.models import deepseek_v32
from jaxtrain.models.blocks import SpecDecoder, spec_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(deepseek_v32.Config):
    architecture: ClassVar[str] = "GlmMoeDsaForCausalLM"
    model_type: ClassVar[str] = "glm_moe_dsa"

    indexer_types: tuple[str, ...] | None = None
    """Which layers choose keys themselves; this and the next three say nothing of short rows."""
    index_topk_freq: int | None = None
    index_skip_topk_offset: int | None = None
    index_topk_pattern: str | None = None


Model, names = SpecDecoder, spec_names
