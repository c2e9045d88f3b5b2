"""Shared parts of the families with latent attention (layers.mla): sizes, block, tensor names.

Experts are routed as in DeepSeek-V3 unless a family overrides it. The layers behind the last
one that predict further tokens (`num_nextn_predict_layers`) are not part of the model unless they
are trained; every export copies them byte by byte.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.linear import LayerInit
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.mla import LatentAttention, LatentOptions
from jaxtrain.layers.rope import PositionScale, frequencies
from jaxtrain.models.blocks import BlockSpec
from jaxtrain.models.decoder import DecoderOptions
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.experts import GroupedExpertsConfig, list_experts
from jaxtrain.models.naming import layer_entry, linear_entries

LATENT_EPS = 1e-6
"""Of the norms of latents in every family, whatever rms_norm_eps says."""
ROUTER_KEYS = ("scoring_func", "topk_method")


class LatentSpec:
    """Latent attention of the config's sizes."""

    def build(
        self, config: "LatentAttentionConfig", options: DecoderOptions, init: LayerInit
    ) -> LatentAttention:
        return LatentAttention(
            config.hidden_size,
            config.num_attention_heads,
            LatentOptions(
                plain_dim=config.qk_nope_head_dim,
                rotated_dim=config.qk_rope_head_dim,
                value_dim=config.v_head_dim,
                query_rank=config.q_lora_rank,
                latent_rank=config.kv_lora_rank,
                eps=LATENT_EPS,
                use_bias=config.attention_bias,
                adjacent=config.adjacent,
                scale=config.score_scale,
                position_scale=config.position_scale,
                impl=options.attention_impl,
            ),
            init=init,
        )

    def names(
        self, config: "LatentAttentionConfig", kind: str, layers: Sequence[int]
    ) -> list[ParameterEntry]:
        bias = config.attention_bias
        linears = {
            "kv_a": ("kv_a_proj_with_mqa", bias),
            "kv_b": ("kv_b_proj", False),
            "out": ("o_proj", bias),
        }
        norms = {"kv_norm": "kv_a_layernorm"}
        if config.q_lora_rank is None:
            linears["q"] = ("q_proj", False)
        else:
            linears |= {"q_a": ("q_a_proj", bias), "q": ("q_b_proj", False)}
            norms["q_norm"] = "q_a_layernorm"
        entries = []
        for path, (module, has_bias) in linears.items():
            names = f"attention.{path}", f"self_attn.{module}"
            entries += linear_entries(kind, layers, *names, bias=has_bias)
        for path, module in norms.items():
            names = f"attention.{path}.scale", f"self_attn.{module}.weight"
            entries.append(layer_entry(kind, layers, *names))
        return entries


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig(DecoderConfig):
    """A DecoderConfig with latent attention, dense unless a family has experts."""

    q_lora_rank: int | None = None
    """Features of the latent that queries are made of; None: they are made of x."""
    kv_lora_rank: int
    """Features of the latent that keys and values are made of."""
    qk_nope_head_dim: int
    """Dims of a head's queries and keys that are not rotated."""
    qk_rope_head_dim: int
    """Those that are; all heads share the keys'."""
    qk_head_dim: int | None = None
    """The sum of both."""
    v_head_dim: int
    attention_bias: bool = False
    """On what makes latents of x, and on the output."""

    def check_heads(self) -> None:
        if self.num_key_value_heads != self.num_attention_heads:
            raise UserError(
                f"config.json: num_key_value_heads={self.num_key_value_heads} must be"
                f" num_attention_heads={self.num_attention_heads}: each head makes its own keys"
            )
        plain, turned = self.qk_nope_head_dim, self.qk_rope_head_dim
        if turned % 2 or min(plain, turned, self.v_head_dim, self.kv_lora_rank) < 1:
            raise UserError(
                f"config.json: qk_nope_head_dim={plain}, qk_rope_head_dim={turned},"
                f" v_head_dim={self.v_head_dim} and kv_lora_rank={self.kv_lora_rank} must be at"
                " least 1, the second an even number"
            )
        if self.qk_head_dim not in (None, plain + turned):
            raise UserError(
                f"config.json: qk_head_dim={self.qk_head_dim} must be qk_nope_head_dim={plain} +"
                f" qk_rope_head_dim={turned}"
            )

    @property
    def head_size(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def encodings(self) -> dict[str, tuple[np.ndarray, float]]:
        lengths = self.max_position_embeddings, self.row_tokens
        return {"default": frequencies(self.qk_rope_head_dim, dict(self.rope), (), *lengths)}

    @property
    def score_scale(self) -> float:
        """Factor of attention scores, with YaRN's temperature."""
        rope = dict(self.rope)
        weight = rope.get("mscale_all_dim") if rope.get("rope_type") != "default" else None
        sharper = 1.0
        if weight and rope.get("factor", 1.0) > 1:
            sharper = 0.1 * weight * math.log(rope["factor"]) + 1
        return self.head_size**-0.5 * sharper**2

    @property
    def adjacent(self) -> bool:
        """True if pairs of adjacent dims are rotated."""
        return True

    @property
    def position_scale(self) -> PositionScale | None:
        """Position-dependent scale of queries."""
        return None

    @property
    def residual_scale(self) -> float:
        """Factor on what a layer adds."""
        return 1.0

    def block_spec(self, kind: str) -> BlockSpec:
        return BlockSpec(LatentSpec(), residual_scale=self.residual_scale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig(GroupedExpertsConfig, LatentAttentionConfig):
    """A GroupedExpertsConfig with latent attention."""

    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("aux_loss_alpha", "ep_size", "seq_aux"), ()),
        "moe_layer_freq": (1,),
        "partial_rotary_factor": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    }

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """Read a config.json, with defaults for the router keys that published folders have and
        vLLM requires."""
        fields = {field.name for field in dataclasses.fields(cls)}
        defaults = {k: cls.fixed[k][0] for k in ROUTER_KEYS if k in cls.fixed and k not in fields}
        return super().from_hf({**defaults, **raw})

    def block_spec(self, kind: str) -> BlockSpec:
        return BlockSpec(LatentSpec(), self.mlp_spec(kind))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairedLatentConfig(LatentAttentionConfig):
    """A LatentAttentionConfig that says which dims are rotated as a pair."""

    rope_interleave: bool | None = True
    """Adjacent ones."""

    @property
    def adjacent(self) -> bool:
        return self.rope_interleave is not False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListedLatentConfig(LatentConfig):
    """A LatentConfig that lists which layers have experts."""

    first_k_dense_replace: int | None = None
    """Says nothing beside mlp_layer_types."""
    mlp_layer_types: tuple[str, ...]

    def inner_config(self, tensors: Collection[str]) -> Self:
        return dataclasses.replace(super().inner_config(tensors), mlp_layer_types=("sparse",))

    def layers(self) -> tuple[LayerSpec, ...]:
        return list_experts((LayerSpec(),) * self.num_hidden_layers, self.mlp_layer_types)
