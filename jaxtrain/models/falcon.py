"""Falcon (Almazrouei et al. 2023, arXiv:2311.16867): LayerNorm, an MLP without a gate, few keys for
many queries, and attention and MLP side by side behind one norm or behind a norm each."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.norm import LayerNorm, RMSNorm
from jaxtrain.models.blocks import BlockSpec, DenseSpec, SpecDecoder, spec_names
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.joint_heads import PARTS, JointHeadsSpec
from jaxtrain.models.naming import PRE_NORMS, rename_tensors

SEPARATE_NORMS = {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "FalconForCausalLM"
    model_type: ClassVar[str] = "falcon"
    final_norm_name: ClassVar[str] = "ln_f"
    renamed: ClassVar[Mapping[str, str]] = {
        "hidden_act": "activation",
        "intermediate_size": "ffn_hidden_size",
        "num_key_value_heads": "num_kv_heads",
        "rms_norm_eps": "layer_norm_epsilon",
    }
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "alibi": (False,),
        "apply_residual_connection_post_layernorm": (False,),
    }
    norm: ClassVar[type[RMSNorm]] = LayerNorm

    bias: bool = False
    """On all matrices of a layer."""
    multi_query: bool = True
    """Without new_decoder_architecture: one key head, whatever num_kv_heads says."""
    new_decoder_architecture: bool = False
    num_ln_in_parallel_attn: int | None = None
    """2: attention and MLP read x behind a norm each."""
    parallel_attn: bool = True
    """Attention and MLP read the same hidden states; else the MLP reads what attention wrote."""

    def check(self) -> None:
        if self.new_decoder_architecture and not self.parallel_attn:
            raise UserError(
                "config.json: new_decoder_architecture=true with parallel_attn=false is not"
                " supported; set one of them to the other's value"
            )
        if self.num_ln_in_parallel_attn == 2 and not self.new_decoder_architecture:
            raise UserError(
                "config.json: num_ln_in_parallel_attn=2 needs new_decoder_architecture=true"
            )
        super().check()

    @property
    def key_heads(self) -> int:
        """Number of key heads."""
        if self.new_decoder_architecture:
            return self.num_key_value_heads
        return 1 if self.multi_query else self.num_attention_heads

    @property
    def block_norms(self) -> dict[str, str]:
        """The norms of a block and what they are called there."""
        if not self.parallel_attn:
            return PRE_NORMS
        if self.new_decoder_architecture and self.num_ln_in_parallel_attn in (None, 2):
            return SEPARATE_NORMS
        return {"attention_norm": PRE_NORMS["attention_norm"]}

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.bias
        attention = JointHeadsSpec(kv_heads=self.key_heads, qkv_bias=bias, out_bias=bias)
        mlp = DenseSpec(bias=bias, parts=PARTS)
        return BlockSpec(attention, mlp, norms=self.block_norms, parallel=self.parallel_attn)


Model = SpecDecoder


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    return rename_tensors(spec_names(config), rename)


def rename(name: str) -> str:
    """Return the family's name of a tensor that other families call `name`."""
    name = name.replace("model.layers.", "transformer.h.").replace("model.", "transformer.", 1)
    name = name.replace(".self_attn.", ".self_attention.")
    return name.replace(".embed_tokens.", ".word_embeddings.")
