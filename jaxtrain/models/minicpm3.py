"""MiniCPM 3 (OpenBMB 2024): latent attention, dense MLPs, and three multipliers."""

import dataclasses
from typing import ClassVar

from jaxtrain.errors import UserError
from jaxtrain.models import deepseek_v3
from jaxtrain.models.latent import LatentAttentionConfig

Model, names = deepseek_v3.Model, deepseek_v3.names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LatentAttentionConfig):
    architecture: ClassVar[str] = "MiniCPM3ForCausalLM"
    model_type: ClassVar[str] = "minicpm3"

    scale_emb: float
    """Factor of embeddings."""
    scale_depth: float
    """Factor of what a layer adds, which is also divided by the root of the number of layers."""
    dim_model_base: int
    """Logits are divided by hidden_size / dim_model_base."""

    def check(self) -> None:
        if self.dim_model_base < 1:
            raise UserError(f"config.json: dim_model_base={self.dim_model_base} must be above 0")
        super().check()

    @property
    def adjacent(self) -> bool:
        return False

    @property
    def embedding_scale(self) -> float:
        return self.scale_emb

    @property
    def residual_scale(self) -> float:
        return self.scale_depth / self.num_hidden_layers**0.5

    @property
    def logit_scale(self) -> float:
        return self.dim_model_base / self.hidden_size
