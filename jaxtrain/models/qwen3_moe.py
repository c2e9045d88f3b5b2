"""Qwen3-MoE (Yang et al. 2025, arXiv:2505.09388): Qwen3 with experts in the place of the MLP in
all layers, or with some dense ones between."""

import dataclasses
from typing import ClassVar

from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.hf.ops import Entry
from jaxtrain.layers.attention import Attention
from jaxtrain.layers.block import PreNormBlock
from jaxtrain.layers.mlp import GatedMLP
from jaxtrain.layers.moe import MoE
from jaxtrain.layers.norm import RMSNorm
from jaxtrain.layers.router import Router
from jaxtrain.models.decoder import Decoder, Options
from jaxtrain.models.experts import ExpertsConfig
from jaxtrain.models.naming import attention_names, expert_names, mlp_names, outer_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ExpertsConfig):
    architecture: ClassVar[str] = "Qwen3MoeForCausalLM"
    model_type: ClassVar[str] = "qwen3_moe"

    moe_intermediate_size: int
    """F of an expert; intermediate_size is that of a dense layer."""
    norm_topk_prob: bool = False
    """Whether the gates of a token sum to 1."""
    decoder_sparse_step: int = 1
    """Every so many-th layer has experts."""
    mlp_only_layers: tuple[int, ...] = ()
    """Layers that are dense nevertheless."""
    attention_bias: bool = False
    """On all four projections."""
    use_sliding_window: bool = False
    sliding_window: int | None = None
    """Of all layers, where use_sliding_window is true."""
    max_window_layers: int | None = None
    """Without effect in this family; carried along."""

    def windows(self) -> tuple[int | None, ...]:
        return (self.sliding_window,) * self.num_hidden_layers

    def kinds(self) -> tuple[str, ...]:
        def kind(layer: int) -> str:
            sparse = (layer + 1) % self.decoder_sparse_step == 0
            return "block" if sparse and layer not in self.mlp_only_layers else "dense"

        return tuple(kind(layer) for layer in range(self.num_hidden_layers))

    def check(self) -> None:
        if self.decoder_sparse_step < 1:
            raise UserError(
                f"config.json: decoder_sparse_step={self.decoder_sparse_step} must be at least 1"
            )
        super().check()

    def layers(self, kind: str) -> list[int]:
        """The layers of a kind."""
        return [layer for layer, name in enumerate(self.kinds()) if name == kind]


class Block(PreNormBlock):
    """A layer with experts or, with `dense`, without."""

    def __init__(self, config: Config, options: Options, rngs: nnx.Rngs, dense: bool = False):
        common = options.layer_options(config, rngs)
        width, eps = config.hidden_size, config.rms_norm_eps
        attention = Attention(
            width,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_size,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            qk_norm_eps=eps,
            impl=options.attention_impl,
            **common,
        )
        act = config.hidden_act
        if dense:
            mlp = GatedMLP(width, config.intermediate_size, activation=act, **common)
        else:
            count = config.num_local_experts
            top, normalise = config.num_experts_per_tok, config.norm_topk_prob
            router = Router(width, count, top=top, normalise=normalise, **common)
            hidden = config.moe_intermediate_size
            mlp = MoE(router, width, hidden, count, activation=act, **common)
        norm = {"eps": eps, "param_dtype": common["param_dtype"]}
        super().__init__(RMSNorm(width, **norm), attention, RMSNorm(width, **norm), mlp)


def dense_block(config: Config, options: Options, rngs: nnx.Rngs) -> Block:
    return Block(config, options, rngs, dense=True)


class Model(Decoder):
    def __init__(self, config: Config, options: Options, rngs: nnx.Rngs):
        super().__init__(config, options, Block, rngs, others={"dense": dense_block})


def names(config: Config) -> list[Entry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    bias = config.attention_bias
    entries = outer_names(config)
    for kind in sorted(set(config.kinds())):
        layers = config.layers(kind)
        entries += attention_names(kind, layers, qkv_bias=bias, out_bias=bias, qk_norm=True)
        if kind == "dense":
            entries += mlp_names(kind, layers)
        else:
            entries += expert_names(kind, layers, config.num_local_experts)
    return entries
