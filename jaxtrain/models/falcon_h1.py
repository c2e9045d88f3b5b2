"""Falcon-H1 (TII 2025, arXiv:2507.22448): attention and Mamba-2 side by side in every layer, and
factors on almost everything."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.linear import LayerInit
from jaxtrain.layers.mamba2 import MambaOptions
from jaxtrain.layers.mlp import ScaledMLP
from jaxtrain.layers.parallel_mixer import ParallelMixer
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, DenseSpec, SpecDecoder, spec_names
from jaxtrain.models.decoder import DecoderOptions
from jaxtrain.models.mamba import Mamba2Config, MambaSpec

NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}
CARRIED = {
    *("mamba_chunk_size", "mlp_expansion_factor", "num_logits_to_keep"),
    *("time_step_floor", "time_step_max", "time_step_min", "time_step_rank"),
}
"""Attributes that do not change what is computed here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Mamba2Config):
    architecture: ClassVar[str] = "FalconH1ForCausalLM"
    model_type: ClassVar[str] = "falcon_h1"
    final_norm_name: ClassVar[str] = "final_layernorm"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **dict.fromkeys(CARRIED, ()),
        "attn_layer_indices": (None,),
        "mamba_use_mlp": (True,),
    }

    mamba_d_ssm: int | None = None
    """N P; None: mamba_expand * hidden_size."""
    mamba_proj_bias: bool
    mamba_rms_norm: bool
    """True if there is a norm behind the recurrence."""
    mamba_norm_before_gate: bool
    projectors_bias: bool
    """Of Mamba's output."""
    attention_bias: bool
    """On all four projections."""
    mlp_bias: bool
    embedding_multiplier: float
    lm_head_multiplier: float
    """Of logits."""
    key_multiplier: float
    attention_in_multiplier: float
    attention_out_multiplier: float
    ssm_in_multiplier: float
    ssm_out_multiplier: float
    ssm_multipliers: tuple[float, ...]
    """Of z, x, B, C and dt."""
    mlp_multipliers: tuple[float, ...]
    """Of gates and of the MLP's output."""

    def check(self) -> None:
        for name, count in (("ssm_multipliers", 5), ("mlp_multipliers", 2)):
            if len(getattr(self, name)) != count:
                raise UserError(f"config.json: {name} must have {count} numbers")
        super().check()

    @property
    def mamba_options(self) -> MambaOptions:
        """Choices of the Mamba-2 layers."""
        norm = "gate_last" if self.mamba_norm_before_gate else "gate_first"
        return MambaOptions(
            norm=norm if self.mamba_rms_norm else None,
            scales=self.ssm_multipliers,
            in_bias=self.mamba_proj_bias,
            out_bias=self.projectors_bias,
        )

    @property
    def embedding_scale(self) -> float:
        return self.embedding_multiplier

    @property
    def logit_scale(self) -> float:
        return self.lm_head_multiplier

    def block_spec(self, kind: str) -> BlockSpec:
        return BlockSpec(ParallelSpec(), ScaledSpec(bias=self.mlp_bias), norms=NORMS)


class ParallelSpec:
    """Attention and Mamba-2 of the config's sizes."""

    mamba = MambaSpec("attention.mamba")

    def attention(self, config: Config) -> AttentionSpec:
        """Return the declaration of attention: a factor on keys is one on scores."""
        bias, scale = config.attention_bias, config.key_multiplier * config.head_size**-0.5
        return AttentionSpec(qkv_bias=bias, out_bias=bias, scale=scale)

    def build(self, config: Config, options: DecoderOptions, init: LayerInit) -> ParallelMixer:
        return ParallelMixer(
            self.attention(config).build(config, options, init),
            self.mamba.build(config, options, init),
            (config.attention_in_multiplier, config.ssm_in_multiplier),
            (config.attention_out_multiplier, config.ssm_out_multiplier),
        )

    def names(self, config: Config, kind: str, layers: Sequence[int]) -> list[ParameterEntry]:
        inner = f"stack.{kind}.attention."
        return [
            entry._replace(param=entry.param.replace(inner, f"{inner}attention."))
            for entry in self.attention(config).names(config, kind, layers)
        ] + self.mamba.names(config, kind, layers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledSpec(DenseSpec):
    """The MLP with the config's factors."""

    module: str = "feed_forward"

    def build(self, config: Config, init: LayerInit) -> ScaledMLP:
        gate_scale, down_scale = config.mlp_multipliers
        return ScaledMLP(
            config.hidden_size,
            config.intermediate_size,
            gate_scale=gate_scale,
            down_scale=down_scale,
            activation=config.hidden_act,
            use_bias=self.bias,
            init=init,
        )


Model, names = SpecDecoder, spec_names
