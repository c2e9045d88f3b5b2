"""DeepSeek-V3 (arXiv:2412.19437): latent attention, and experts chosen by sigmoids within groups;
Kimi-K2 (Moonshot 2025) is one, too."""

import dataclasses
from typing import ClassVar

from jaxtrain.models.blocks import SpecDecoder, spec_names
from jaxtrain.models.latent import LatentConfig, PairedLatentConfig
from jaxtrain.models.mtp_form import MTPForm, layer_form


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PairedLatentConfig, LatentConfig):
    architecture: ClassVar[str] = "DeepseekV3ForCausalLM"
    model_type: ClassVar[str] = "deepseek_v3"

    @property
    def mtp_form(self) -> MTPForm:
        return layer_form(self.num_hidden_layers)


Model, names = SpecDecoder, spec_names
