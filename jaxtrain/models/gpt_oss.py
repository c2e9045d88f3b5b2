"""gpt-oss (OpenAI 2025, arXiv:2508.10925): experts with biases and a clamped activation in every
layer, attention with a sink a head, whose window every other layer lacks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from jaxtrain_kernels import Clamped

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import shorten
from jaxtrain.huggingface.ops import Interleaved, ParameterEntry, StackedOps, TensorOp, TensorRef
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.norm import PreciseRMSNorm, RMSNorm
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, ExpertsSpec, SpecDecoder, spec_names
from jaxtrain.models.experts import ExpertsConfig
from jaxtrain.models.naming import layer_entry
from jaxtrain.models.windows import windowed_layers

SAME = {"experts_per_token": "num_experts_per_tok"}
"""Further names that the makers' files have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ExpertsConfig):
    architecture: ClassVar[str] = "GptOssForCausalLM"
    model_type: ClassVar[str] = "gpt_oss"
    norm: ClassVar[type[RMSNorm]] = PreciseRMSNorm

    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    attention_bias: bool = True
    """On all four projections."""
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702
    """See jaxtrain_kernels.Clamped."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        raw = dict(raw)
        for alias, name in SAME.items():
            value = raw.pop(alias, None)
            if value is not None and raw.setdefault(name, value) != value:
                raise UserError(
                    f"config.json: {alias}={shorten(value)} and {name}={shorten(raw[name])} are"
                    " two names of one number; remove one"
                )
        # What positions are scaled from stands in rope_scaling, too, which is what is read.
        length = raw.pop("initial_context_length", None)
        scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        stated = scaling.get("original_max_position_embeddings", length)
        if length is not None and length != stated:
            raise UserError(
                f"config.json: initial_context_length={shorten(length)}, but positions are scaled"
                f" from original_max_position_embeddings={shorten(stated)}; remove the first"
            )
        return super().from_hf(raw)

    def layers(self) -> tuple[LayerSpec, ...]:
        return windowed_layers(self.num_hidden_layers, self.layer_types, self.sliding_window)

    def check(self) -> None:
        if self.hidden_act != "silu":
            raise UserError(f"config.json: hidden_act={self.hidden_act!r}; gpt_oss has silu alone")
        super().check()

    @property
    def experts_spec(self) -> ExpertsSpec:
        return InterleavedExperts(
            hidden=self.intermediate_size,
            activation=Clamped(self.swiglu_limit, self.swiglu_alpha),
            use_bias=True,
            logit_bias=True,
        )

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.attention_bias
        attention = AttentionSpec(qkv_bias=bias, out_bias=bias, sinks=True)
        return BlockSpec(attention, self.experts_spec)


class InterleavedExperts(ExpertsSpec):
    """Experts, all of them in one tensor [E, in, out], gate and up in turns; and their biases."""

    def names(self, config: Any, kind: str, layers: Sequence[int]) -> list[ParameterEntry]:
        def entry(part: str, tensor: str, offset: int | None) -> ParameterEntry:
            def op(layer: int) -> TensorOp:
                name = f"model.layers.{layer}.mlp.experts.{tensor}"
                return TensorRef(name) if offset is None else Interleaved(name, -1, offset, 2)

            ops = tuple(op(layer) for layer in layers)
            return ParameterEntry(f"stack.{kind}.mlp.experts.{part}", StackedOps(ops))

        return [
            layer_entry(kind, layers, "mlp.router.kernel", "mlp.router.weight", transpose=True),
            layer_entry(kind, layers, "mlp.router.bias", "mlp.router.bias"),
            entry("gate.kernel", "gate_up_proj", 0),
            entry("up.kernel", "gate_up_proj", 1),
            entry("down.kernel", "down_proj", None),
            entry("gate.bias", "gate_up_proj_bias", 0),
            entry("up.bias", "gate_up_proj_bias", 1),
            entry("down.bias", "down_proj_bias", None),
        ]


Model, names = SpecDecoder, spec_names
