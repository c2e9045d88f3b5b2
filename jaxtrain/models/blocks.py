"""Blocks as families declare them: a mixer, an MLP and norms, and what their tensors are called.

`Config.block_spec(kind)` of a family returns the BlockSpec of the layers of a kind. The blocks of
`SpecDecoder` and the entries of `spec_names` both come from it, so that they cannot differ.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.attention import Attention, AttentionOptions
from jaxtrain.layers.block import Block
from jaxtrain.layers.linear import LayerInit
from jaxtrain.layers.mixer import Mixer
from jaxtrain.layers.mlp import MLP, GatedMLP
from jaxtrain.layers.moe import MoE, MoEOptions
from jaxtrain.layers.norm import RMSNorm
from jaxtrain.layers.router import Router
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import (
    EXPERT_PARTS,
    PRE_NORMS,
    expert_names,
    joint_mlp_names,
    layer_entry,
    linear_entries,
    norm_names,
    outer_names,
    with_prefix,
)


class MixerSpec(Protocol):
    """Declaration of the mixer of a block."""

    def build(self, config: Any, options: DecoderOptions, init: LayerInit) -> Mixer:
        """Build the layer."""
        ...

    def names(self, config: Any, kind: str, layers: Sequence[int]) -> list[ParameterEntry]:
        """List its parameters in the layers that are stored as `stack.<kind>`."""
        ...


class MLPSpec(Protocol):
    """Declaration of the layer behind the mixer of a block."""

    def build(self, config: Any, init: LayerInit) -> MLP | MoE:
        """Build the layer."""
        ...

    def names(self, config: Any, kind: str, layers: Sequence[int]) -> list[ParameterEntry]:
        """List its parameters in the layers that are stored as `stack.<kind>`."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec(AttentionOptions):
    """Attention with these options; `eps`, `impl` and, unless one is named, `norm` are the
    model's."""

    norm: type[RMSNorm] | None = None
    kv_heads: int | None = None
    """Key-value heads; None: num_key_value_heads."""
    layer: type[Attention] = Attention
    out_name: str = "o_proj"
    gate_name: str = "gate_proj"
    """Name of the kernel of an output gate that is not joint."""
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    sinks_name: str = "sinks"

    def build(self, config: DecoderConfig, options: DecoderOptions, init: LayerInit) -> Attention:
        norm, eps = self.norm or config.norm, config.rms_norm_eps
        return self.layer(
            config.hidden_size,
            config.num_attention_heads,
            self.kv_heads or config.num_key_value_heads,
            config.head_size,
            dataclasses.replace(self, norm=norm, eps=eps, impl=options.attention_impl),
            init=init,
        )

    def names(self, config: Any, kind: str, layers: Sequence[int]) -> list[ParameterEntry]:
        entries = self.projection_names(config, kind, layers)
        if self.output_gate not in (None, "joint"):
            entries += linear_entries(kind, layers, "attention.gate", f"self_attn.{self.gate_name}")
        if self.qk_norm:
            pairs = zip(("q_norm", "k_norm"), self.qk_norm_names, strict=True)
            norms = {f"attention.{norm}": f"self_attn.{name}" for norm, name in pairs}
            parts = (self.norm or config.norm).parameters
            entries += norm_names(kind, layers, norms, parts=parts)
        if self.sinks:
            name = f"self_attn.{self.sinks_name}"
            entries.append(layer_entry(kind, layers, "attention.sinks", name))
        return entries

    def projection_names(
        self, config: Any, kind: str, layers: Sequence[int]
    ) -> list[ParameterEntry]:
        """List the matrices of queries, keys, values and outputs, and their biases."""
        linear = functools.partial(linear_entries, kind, layers)
        names = [(f"attention.{part}", f"self_attn.{part}_proj") for part in "qkv"]
        entries = [entry for pair in names for entry in linear(*pair, bias=self.qkv_bias)]
        return entries + linear("attention.out", f"self_attn.{self.out_name}", bias=self.out_bias)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """An MLP, with a gate if `parts` names one."""

    hidden: int | None = None
    """F; None: intermediate_size."""
    bias: bool = False
    parts: Mapping[str, str] = dataclasses.field(default_factory=lambda: EXPERT_PARTS)
    """{matrix: what its tensor is called}."""
    module: str = "mlp"
    joint: bool = False
    """Gate and up are one tensor."""

    def build(self, config: DecoderConfig, init: LayerInit) -> MLP:
        make, hidden = GatedMLP if "gate" in self.parts else MLP, self._width(config)
        width, act = config.hidden_size, config.hidden_act
        return make(width, hidden, activation=act, use_bias=self.bias, init=init)

    def names(self, config: Any, kind: str, layers: Sequence[int]) -> list[ParameterEntry]:
        if self.joint:
            return joint_mlp_names(kind, layers, self._width(config))
        return [
            entry
            for path, tensor in self.parts.items()
            for entry in linear_entries(
                kind, layers, f"mlp.{path}", f"{self.module}.{tensor}", bias=self.bias
            )
        ]

    def _width(self, config: DecoderConfig) -> int:
        return config.intermediate_size if self.hidden is None else self.hidden


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsSpec(MoEOptions):
    """Experts with these options, routed by `config.routing`, each a tensor of its own in folders;
    `activation` is the model's unless one is named."""

    activation: Any = None
    hidden: int
    """F of an expert."""
    choice_bias: str | None = None
    """Name of the bias of the router's choice; None: it has none."""
    logit_bias: bool = False
    """Add a trained bias to the router's logits (gpt-oss)."""
    wide: bool = False
    """Multiply in float32 in the router."""
    module: str = "mlp"
    router: str = "gate"
    shared_name: str = "shared_experts"
    shared_gate_name: str = "shared_expert_gate"
    parts: Mapping[str, str] = dataclasses.field(default_factory=lambda: EXPERT_PARTS)

    def build(self, config: Any, init: LayerInit) -> MoE:
        width, (_, count) = config.hidden_size, config.experts_per_token
        router = Router(
            width,
            count,
            config.routing,
            choice_bias=self.choice_bias is not None,
            logit_bias=self.logit_bias,
            wide=self.wide,
            init=init,
        )
        options = dataclasses.replace(self, activation=self.activation or config.hidden_act)
        return MoE(router, width, self.hidden, count, options, init=init)

    def names(self, config: Any, kind: str, layers: Sequence[int]) -> list[ParameterEntry]:
        entries = expert_names(
            kind,
            layers,
            config.experts_per_token[1],
            module=self.module,
            router=self.router,
            parts=self.parts,
            choice_bias=self.choice_bias,
            shared=self.shared_name if self.num_shared else None,
        )
        return entries + self.gate_names(kind, layers)

    def gate_names(self, kind: str, layers: Sequence[int]) -> list[ParameterEntry]:
        """List the kernel of each token's share of the shared expert, if it takes one."""
        if not self.gate_shared:
            return []
        name = f"{self.module}.{self.shared_gate_name}.weight"
        return [layer_entry(kind, layers, "mlp.shared_gate.kernel", name, transpose=True)]


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """A block of a mixer and an MLP between norms."""

    mixer: MixerSpec = AttentionSpec()
    mlp: MLPSpec = DenseSpec()
    _: dataclasses.KW_ONLY
    norms: Mapping[str, str] = dataclasses.field(default_factory=lambda: PRE_NORMS)
    """{norm of `Block`: what its tensors are called}: PRE_NORMS, POST_NORMS or SANDWICH_NORMS of
    models.naming, or others."""
    parallel: bool = False
    """The MLP reads what the mixer reads: see `Block`."""
    residual_scale: float = 1.0
    """Factor on what either layer adds."""

    def build(self, config: DecoderConfig, options: DecoderOptions, rngs: nnx.Rngs) -> Block:
        """Build a block; mixer, MLP and norms are created, and so drawn, in this order."""
        init = options.layer_init(config, rngs)
        mixer, mlp = self.mixer.build(config, options, init), self.mlp.build(config, init)
        width, eps = config.hidden_size, config.rms_norm_eps
        norms = {n: config.norm(width, eps=eps, param_dtype=init.param_dtype) for n in self.norms}
        scale = self.residual_scale
        return Block(mixer, mlp, parallel=self.parallel, residual_scale=scale, **norms)

    def names(self, config: Any, kind: str, layers: Sequence[int]) -> list[ParameterEntry]:
        """List the parameters of the layers that are stored as `stack.<kind>`."""
        return [
            *norm_names(kind, layers, self.norms, parts=config.norm.parameters),
            *self.mixer.names(config, kind, layers),
            *self.mlp.names(config, kind, layers),
        ]


class SpecDecoder(Decoder):
    """A Decoder of the blocks that its config declares."""

    def make_block(
        self, kind: str, config: DecoderConfig, options: DecoderOptions, rngs: nnx.Rngs
    ) -> nnx.Module:
        return config.block_spec(kind).build(config, options, rngs)


def spec_names(config: DecoderConfig) -> list[ParameterEntry]:
    """Every parameter of a SpecDecoder and the tensors of a Hugging Face folder that it is made
    of."""
    entries = outer_names(config, config.final_norm_name)
    for kind, layers in config.layers_by_kind().items():
        entries += config.block_spec(kind).names(config, kind, layers)
    return with_prefix(entries, config.prefix)
