"""GPT-2 (Radford et al. 2019): LayerNorm, learned positions, an MLP without a gate, biases, and
matrices that have their inputs first in folders."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jaxtrain.huggingface.ops import ParameterEntry, PermutedRows, StackedOps
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, DenseSpec, SpecDecoder
from jaxtrain.models.joint_heads import GPTConfig, gpt_names
from jaxtrain.models.naming import linear_entries, row_names

PARTS = {"up": "c_fc", "down": "c_proj"}
NORMS = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionedConfig(GPTConfig):
    """A GPTConfig with learned positions."""

    def layers(self) -> tuple[LayerSpec, ...]:
        return (LayerSpec(rope="none"),) * self.num_hidden_layers

    def encodings(self) -> dict[str, Any]:
        return {}

    @property
    def first_position(self) -> int | None:
        return 0


class GPT2AttentionSpec(AttentionSpec):
    """Attention whose queries, keys and values are one tensor, one behind the other."""

    def projection_names(
        self, config: Any, kind: str, layers: Sequence[int]
    ) -> list[ParameterEntry]:
        D = config.hidden_size
        runs = {f"attention.{part}": ((n * D, D),) for n, part in enumerate("qkv")}
        return [
            *row_names(kind, layers, "self_attn.c_attn", runs, bias=True),
            *linear_entries(kind, layers, "attention.out", "self_attn.c_proj", bias=True),
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PositionedConfig):
    architecture: ClassVar[str] = "GPT2LMHeadModel"
    model_type: ClassVar[str] = "gpt2"
    inputs_first: ClassVar[bool] = True
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_cross_attention": (False,),
        "n_ctx": (),
        "reorder_and_upcast_attn": (),
        "scale_attn_by_inverse_layer_idx": (False,),
        "summary_type": (),
        "summary_use_proj": (),
        "summary_activation": (),
        "summary_proj_to_labels": (),
    }

    scale_attn_weights: bool = True
    """Divide scores by the root of a head's dims."""

    def block_spec(self, kind: str) -> BlockSpec:
        scale = None if self.scale_attn_weights else 1.0
        attention = GPT2AttentionSpec(qkv_bias=True, out_bias=True, scale=scale)
        return BlockSpec(attention, DenseSpec(bias=True, parts=PARTS), norms=NORMS)


Model = SpecDecoder


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    return [turn_kernel(entry) for entry in gpt_names(config)]


def turn_kernel(entry: ParameterEntry) -> ParameterEntry:
    """Return the entry of a parameter whose tensors, if it is a kernel, are [in, out]."""
    if not entry.param.endswith(".kernel"):
        return entry
    assert isinstance(entry.op, StackedOps)
    ops: list[Any] = [getattr(layer, "op", layer) for layer in entry.op.ops]
    split = [dataclasses.replace(op, axis=1) if isinstance(op, PermutedRows) else op for op in ops]
    return ParameterEntry(entry.param, StackedOps(tuple(split)))
