"""Nemotron-H (NVIDIA 2025, arXiv:2504.03624) and Nemotron 3: Mamba-2, attention, MLPs and experts
in any order, one of them a layer; no position encoding.

The head that predicts a further token (`mtp.`) is carried along unless it is trained."""

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Self

import numpy as np
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.huggingface.config import read_fields
from jaxtrain.huggingface.files import describe
from jaxtrain.huggingface.ops import TIED_COPY, ParameterEntry, TensorRef
from jaxtrain.layers.attention import Attention, AttentionOptions
from jaxtrain.layers.block import SingleBlock
from jaxtrain.layers.linear import LayerInit
from jaxtrain.layers.mamba2 import Mamba2, MambaSizes
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.mlp import MLP
from jaxtrain.layers.moe import MoE, MoEOptions
from jaxtrain.layers.norm import PreciseRMSNorm, RMSNorm
from jaxtrain.layers.router import Router, RoutingOptions
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.mamba import mamba_names, read_dt_limit
from jaxtrain.models.mtp_form import MTPForm, nemotron_form, read_count
from jaxtrain.models.naming import (
    CHOICE_BIAS,
    expert_names,
    layer_entry,
    linear_entries,
    predictor_names,
    score_paths,
    with_prefix,
)

LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Of `hybrid_override_pattern`, a letter a layer."""
KINDS = {
    **{kind: kind for kind in LETTERS.values()},
    "linear_attention": "mamba",
    "full_attention": "attention",
}
"""Entries of `layers_block_type`, old and new."""
CARRIED = {
    *("chunk_size", "expand", "moe_shared_expert_overlap", "norm_eps"),
    *("num_logits_to_keep", "num_nextn_predict_layers", "mtp_hybrid_override_pattern"),
    *("mtp_layers_block_type", "partial_rotary_factor", "rope_theta", "rescale_prenorm_residual"),
    *("time_step_floor", "time_step_max", "time_step_min", "use_mamba_kernels"),
}
"""Attributes that do not change what is computed here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "NemotronHForCausalLM"
    model_type: ClassVar[str] = "nemotron_h"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **dict.fromkeys(CARRIED, ()),
        "mamba_ssm_cache_dtype": ("float32",),
    }
    renamed: ClassVar[Mapping[str, str]] = {
        "hidden_act": "mlp_hidden_act",
        "rms_norm_eps": "layer_norm_epsilon",
    }
    norm: ClassVar[type[RMSNorm]] = PreciseRMSNorm

    layers_block_type: tuple[str, ...]
    """Of KINDS."""
    mamba_num_heads: int
    mamba_head_dim: int
    n_groups: int
    ssm_state_size: int
    conv_kernel: int
    use_conv_bias: bool
    time_step_limit: tuple[float, ...]
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    moe_shared_expert_intermediate_size: int
    moe_latent_size: int | None = None
    """Width that experts read and write; None: hidden_size."""
    norm_topk_prob: bool
    routed_scaling_factor: float
    n_group: int
    topk_group: int
    prefix: str = "backbone."
    """Of all tensors but the head's."""

    @property
    def carries(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ("mtp.",) if self.mtp is None else ()

    @property
    def goes_stale(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.carries

    @property
    def head_kinds(self) -> tuple[str, ...]:
        """Blocks of the multi-token prediction head, by the values of KINDS."""
        stated = dict(self.fixed_attributes)
        names = ("mtp_hybrid_override_pattern", "mtp_layers_block_type")
        raw = {name: json.loads(stated[name]) for name in names if name in stated}
        kinds = read_kinds(raw, "mtp_") or ["attention", "moe"]
        if "mamba" in (types := tuple(KINDS[kind] for kind in kinds)):
            raise UserError(
                f"config.json: {' and '.join(raw)} of a multi-token prediction head must name"
                ' attention, experts or MLPs, such as "*E"; Mamba-2 is not computed there'
            )
        return types

    @property
    def mtp_form(self) -> MTPForm:
        return nemotron_form(len(self.head_kinds))

    @property
    def num_predicted(self) -> int | None:
        return read_count(dict(self.fixed_attributes), "num_nextn_predict_layers")

    def inner_config(self, tensors: Collection[str]) -> Self:
        kinds = self.head_kinds
        return dataclasses.replace(self, layers_block_type=kinds, num_hidden_layers=len(kinds))

    def count_heads(self) -> dict[str, Any]:
        """vLLM reads the blocks from the pattern alone."""
        stated = dict(self.fixed_attributes)
        pattern = json.dumps(spell_kinds(self.head_kinds))
        stated |= {"num_nextn_predict_layers": "1", "mtp_hybrid_override_pattern": pattern}
        return {"fixed_attributes": tuple(sorted(stated.items()))}

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        raw = dict(raw)
        kinds = read_kinds(raw)
        if kinds is not None:
            raw["layers_block_type"] = kinds
        if "time_step_limit" in raw:
            raw["time_step_limit"] = read_dt_limit(raw["time_step_limit"])
        values = read_fields(cls, raw)
        types = tuple(KINDS[name] for name in values["layers_block_type"])
        values |= {"layers_block_type": types, "num_hidden_layers": len(types)}
        config = cls(**values)
        config.check()
        return config

    def to_hf(self) -> dict[str, Any]:
        raw = super().to_hf()
        # The one spelling that transformers, vLLM and the code in old folders all read.
        raw["hybrid_override_pattern"] = spell_kinds(raw.pop("layers_block_type"))
        return raw

    def fit(self, tensors: Collection[str]) -> Self:
        """Folders of the Hub say `backbone.`, those of transformers may say `model.`."""
        for prefix in ("backbone.", "model."):
            if f"{prefix}embeddings.weight" in tensors:
                return dataclasses.replace(self, prefix=prefix)
        return self

    def check(self) -> None:
        self.sizes.check()
        if self.tie_word_embeddings:
            raise UserError(
                f"config.json: tie_word_embeddings=true is not known of {self.architecture}, whose"
                " head is a tensor of its own"
            )
        top, count, groups = self.num_experts_per_tok, self.n_routed_experts, self.n_group
        if "moe" in self.layers_block_type:
            if groups < 1 or count % groups or not 1 <= self.topk_group <= groups:
                raise UserError(
                    f"config.json: n_group={groups} must divide the {count} experts"
                    f" (n_routed_experts), and topk_group={self.topk_group} be from 1 to n_group"
                )
            if not 1 <= top <= count // groups * self.topk_group:
                raise UserError(
                    f"config.json: num_experts_per_tok={top} must be from 1 to the"
                    f" {count // groups * self.topk_group} experts of topk_group groups"
                )
        super().check()

    @property
    def sizes(self) -> MambaSizes:
        """Sizes of the Mamba-2 layers."""
        low, high = self.time_step_limit
        return MambaSizes(
            self.mamba_num_heads,
            self.mamba_head_dim,
            self.n_groups,
            self.ssm_state_size,
            self.conv_kernel,
            self.use_conv_bias,
            (low, high),
        )

    def layers(self) -> tuple[LayerSpec, ...]:
        return tuple(LayerSpec(kind, rope="none") for kind in self.layers_block_type)

    def encodings(self) -> dict[str, tuple[np.ndarray, float]]:
        return {}

    @property
    def experts_per_token(self) -> tuple[int, int] | None:
        has_experts = "moe" in self.layers_block_type
        return (self.num_experts_per_tok, self.n_routed_experts) if has_experts else None


def spell_kinds(kinds: Collection[str]) -> str:
    """Return a letter of LETTERS for each layer."""
    letters = {kind: letter for letter, kind in LETTERS.items()}
    return "".join(letters[kind] for kind in kinds)


def read_kinds(raw: dict[str, Any], prefix: str = "") -> list[str] | None:
    """The layers that a config.json names, by a list or by a pattern of letters, which is taken out
    of `raw`; None: by neither. prefix: of both keys."""
    key, list_key = f"{prefix}hybrid_override_pattern", f"{prefix}layers_block_type"
    pattern, listed = raw.pop(key, None), raw.get(list_key)
    if pattern is None and listed is None:
        return None
    if listed is None:
        listed = [LETTERS.get(letter) for letter in pattern] if isinstance(pattern, str) else None
        value, allowed = pattern, " ".join(LETTERS)
    else:
        key, value, allowed = list_key, listed, ", ".join(KINDS)
    if not isinstance(listed, list) or not listed or not all(kind in KINDS for kind in listed):
        raise UserError(
            f"config.json: {key} is {describe(value)}; it must name each layer by one of {allowed}"
        )
    count = raw.get("num_hidden_layers")
    if count is not None and count != len(listed):
        raise UserError(f"config.json: {key} names {len(listed)} layers, num_hidden_layers={count}")
    return listed


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        init = options.layer_init(config, rngs)
        width, eps, act = config.hidden_size, config.rms_norm_eps, config.hidden_act
        if kind == "mamba":
            layer = Mamba2(width, config.sizes, norm_eps=eps, init=init)
        elif kind == "attention":
            layer = Attention(
                width,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_size,
                AttentionOptions(impl=options.attention_impl),
                init=init,
            )
        elif kind == "mlp":
            layer = MLP(width, config.intermediate_size, activation=act, init=init)
        else:
            layer = make_experts(config, init)
        return SingleBlock(config.norm(width, eps=eps, param_dtype=init.param_dtype), layer)


def make_experts(config: Config, init: LayerInit) -> MoE:
    """Experts without gates, chosen as in DeepSeek-V3, and a shared one."""
    routing = RoutingOptions(
        top=config.num_experts_per_tok,
        score="sigmoid",
        normalize=config.norm_topk_prob,
        groups=config.n_group,
        top_groups=config.topk_group,
        scale=config.routed_scaling_factor,
    )
    width, count = config.hidden_size, config.n_routed_experts
    router = Router(width, count, routing, choice_bias=True, wide=True, init=init)
    return MoE(
        router,
        width,
        config.moe_intermediate_size,
        count,
        MoEOptions(
            activation=config.hidden_act,
            gated=False,
            num_latent=config.moe_latent_size,
            num_shared=config.moe_shared_expert_intermediate_size,
        ),
        init=init,
    )


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    entries = [
        ParameterEntry("embed.embedding", TensorRef("model.embeddings.weight")),
        ParameterEntry("norm.scale", TensorRef("model.norm_f.weight")),
        *(ParameterEntry(path, TensorRef(path)) for path in score_paths(config)),
    ]
    if config.score is None:
        entries.append(ParameterEntry("lm_head.embedding", TensorRef(TIED_COPY)))
    for kind, layers in config.layers_by_kind().items():
        entries.append(layer_entry(kind, layers, "norm.scale", "norm.weight"))
        linears = {}
        if kind == "mamba":
            entries += mamba_names(config.sizes, kind, layers, "layer", "mixer")
        elif kind == "attention":
            linears = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj"}
        elif kind == "mlp":
            linears = {"up": "up_proj", "down": "down_proj"}
        else:
            parts = {"up": "up_proj", "down": "down_proj"}
            entries += expert_names(
                kind,
                layers,
                config.n_routed_experts,
                path="layer",
                module="mixer",
                parts=parts,
                choice_bias=CHOICE_BIAS,
                shared="shared_experts",
            )
            linears = {}
            if config.moe_latent_size is not None:
                linears |= {"latent_in": "fc1_latent_proj", "latent_out": "fc2_latent_proj"}
        for part, module in linears.items():
            entries += linear_entries(kind, layers, f"layer.{part}", f"mixer.{module}")
    return with_prefix(entries, config.prefix) + predictor_names(config)
