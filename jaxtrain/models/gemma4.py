"""Gemma 4 (Gemma Team 2026) but for 12B: dense (31B), with experts beside the dense MLP
(26B-A4B), and with inputs of each layer's own (E2B, E4B).

Gemma 3's four norms and its sliding windows, and of its own:

- full layers have wider heads, fewer keys, and values that are these keys; values are normed
- the last layers of the small models look at keys and values of the last one before them of their
  kind (`num_kv_shared_layers`)
- each layer's output is multiplied with a number of its own

Folders of the Hub are multimodal. The tower for images is a part of the model (gemma4_vision); the
one for sound is carried along."""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from typing_extensions import override

from jaxtrain.errors import UserError
from jaxtrain.huggingface.config import read_fields
from jaxtrain.huggingface.files import describe
from jaxtrain.huggingface.ops import ParameterEntry, TensorRef, Transpose
from jaxtrain.layers.attention import Attention, AttentionOptions
from jaxtrain.layers.block import Block
from jaxtrain.layers.linear import LayerInit
from jaxtrain.layers.mixer import IMAGES, LayerSpec
from jaxtrain.layers.mlp import GatedMLP
from jaxtrain.layers.moe import MoE, MoEOptions
from jaxtrain.layers.norm import PreciseRMSNorm, RMSNorm
from jaxtrain.layers.parallel_mlp import ParallelMLP
from jaxtrain.layers.per_layer import PerLayerGate, PerLayerInputs
from jaxtrain.layers.rope import frequencies
from jaxtrain.layers.router import Router, RoutingOptions
from jaxtrain.models.blocks import DenseSpec
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.gemma4_vision import TowerConfig, tower_names
from jaxtrain.models.multimodal import ImageTextConfig
from jaxtrain.models.naming import (
    SANDWICH_NORMS,
    fused_expert_names,
    layer_entry,
    linear_entries,
    norm_names,
    outer_names,
    with_prefix,
)
from jaxtrain.models.windows import FULL, SLIDING, windowed_layers

EXPERT_NORMS = {
    "mlp.norm": "pre_feedforward_layernorm",
    "mlp.out_norm": "post_feedforward_layernorm_1",
    "mlp.experts_norm": "pre_feedforward_layernorm_2",
    "mlp.experts_out_norm": "post_feedforward_layernorm_2",
}
"""Those inside of a ParallelMLP, in the place of the block's `mlp_norm`."""
PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")
SOUND = ("model.audio_tower.", "model.embed_audio.")
DEFAULT_WIDE = 512
"""transformers' head_dim of full layers where nothing says it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ImageTextConfig):
    architecture: ClassVar[str] = "Gemma4ForCausalLM"
    also: ClassVar[tuple[str, ...]] = ("Gemma4ForConditionalGeneration",)
    model_type: ClassVar[str] = "gemma4"
    text_type: ClassVar[str] = "gemma4_text"
    renamed: ClassVar[Mapping[str, str]] = {"hidden_act": "hidden_activation"}
    norm: ClassVar[type[RMSNorm]] = PreciseRMSNorm
    rope_by_kind: ClassVar[bool] = True
    rope_keys: ClassVar[tuple[str, ...]] = ("partial_rotary_factor",)
    tower_type: ClassVar[type[TowerConfig]] = TowerConfig
    tower_tensors: ClassVar[tuple[str, ...]] = ("model.vision_tower.", "model.embed_vision.")
    # Pictures see both ways in some sizes; text never does.
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "use_bidirectional_attention": (None, "vision")
    }
    media: ClassVar[tuple[str, ...]] = (*PLACEHOLDERS, "boa_token_id", "eoa_token_index")
    """Not what stands before and behind an image: those are read like text."""

    attention_bias: bool = False
    """On all four projections."""
    layer_types: tuple[str, ...]
    sliding_window: int
    global_head_dim: int
    """H of full layers; head_dim is that of the others."""
    num_global_key_value_heads: int | None
    """K of full layers, where `attention_k_eq_v`; None: num_key_value_heads."""
    attention_k_eq_v: bool
    """Whether values of full layers are their keys."""
    num_kv_shared_layers: int
    """The last so many layers have no keys of their own."""
    use_double_wide_mlp: bool
    """Whether their MLPs are twice as wide."""
    hidden_size_per_layer_input: int | None
    """P; none or 0: layers have no inputs of their own."""
    vocab_size_per_layer_input: int
    enable_moe_block: bool
    num_experts: int | None
    top_k_experts: int | None
    moe_intermediate_size: int | None
    final_logit_softcapping: float | None

    @classmethod
    def read_text(cls, text: dict[str, Any]) -> dict[str, Any]:
        by_layer = text.pop("per_layer_config", None)
        wide = text.pop("global_head_dim", None)
        few = text.pop("num_global_key_value_heads", None)
        values = read_fields(cls, text)
        if by_layer is not None:
            wide, few = read_overrides(by_layer, values)
        values["global_head_dim"] = DEFAULT_WIDE if wide is None else wide
        values["num_global_key_value_heads"] = few
        for name in ("global_head_dim", "num_global_key_value_heads"):
            value = values[name]
            if not (type(value) is int and 1 <= value <= 2**14) and (value, name) != (None, OWN_K):
                raise UserError(
                    f"config.json: {name} is {describe(value)}; it must be a number from 1"
                )
        return values

    def to_hf(self) -> dict[str, Any]:
        raw = super().to_hf()
        text = raw.get("text_config", raw)
        for key in ("rope_theta", "rope_scaling", "partial_rotary_factor"):
            text.pop(key, None)  # each kind of layers has its own; no version reads others
        return raw

    def check(self) -> None:
        shared, count = self.num_kv_shared_layers, self.num_hidden_layers
        if not 0 <= shared < count:
            raise UserError(
                f"config.json: num_kv_shared_layers={shared} must be below the {count} layers"
            )
        owners, sharers = self.layer_types[: count - shared], self.layer_types[count - shared :]
        if missing := sorted({*sharers} - {*owners}):
            raise UserError(
                f"config.json: num_kv_shared_layers={shared} leaves no layer of type"
                f" {missing[0]!r} whose keys the last layers could share"
            )
        if self.enable_moe_block:
            top, experts = self.top_k_experts, self.num_experts
            width = self.moe_intermediate_size
            if not width or not top or not experts or top > experts:
                raise UserError(
                    f"config.json: enable_moe_block needs moe_intermediate_size ({width}) and"
                    f" top_k_experts={top} from 1 to num_experts={experts}"
                )
        if self.score is not None:
            raise UserError(
                f"{self.architecture}: transformers has no class of Gemma 4 that scores, so that no"
                " folder of one could be read; choose another family for a model that scores"
            )
        if self.grown and self.hidden_size_per_layer_input:
            raise UserError(
                f"{self.architecture}: the vocabulary of a model whose layers have inputs of their"
                " own cannot grow; choose tokens that are in the vocabulary"
            )
        super().check()

    def check_heads(self) -> None:
        super().check_heads()
        heads, (size, kv_heads) = self.num_attention_heads, self.heads(FULL)
        if heads % kv_heads or size % 2:
            raise UserError(
                f"config.json: full layers have num_global_key_value_heads={kv_heads} of the"
                f" {heads} heads, and global_head_dim={size}; the first must divide the heads, the"
                " second be even"
            )

    def heads(self, layer_type: str) -> tuple[int, int]:
        """(H, K) of a layer."""
        if layer_type != FULL:
            return self.head_size, self.num_key_value_heads
        full_heads = self.num_global_key_value_heads if self.attention_k_eq_v else None
        return self.global_head_dim, full_heads or self.num_key_value_heads

    def layers(self) -> tuple[LayerSpec, ...]:
        types, first = self.layer_types, self.num_hidden_layers - self.num_kv_shared_layers
        specs = []
        plain = windowed_layers(self.num_hidden_layers, types, self.sliding_window, {*types})
        for layer, (name, spec) in enumerate(zip(types, plain, strict=True)):
            kind = KINDS[name]
            if layer >= first:
                spec = dataclasses.replace(spec, kind=f"{kind}_shared", imports=name)
            elif name in types[first:] and name not in types[layer + 1 : first]:
                spec = dataclasses.replace(spec, kind=kind, exports=name)
            else:
                spec = dataclasses.replace(spec, kind=kind)
            # In layers that see all, the tokens of an image see earlier ones alone.
            both_ways = self._both_ways and name == SLIDING
            specs.append(dataclasses.replace(spec, mask=IMAGES) if both_ways else spec)
        return tuple(specs)

    @property
    def _both_ways(self) -> bool:
        """True if the tokens of an image see all of it in some layers."""
        choice = dict(self.fixed_attributes).get("use_bidirectional_attention", "null")
        return self.vision is not None and json.loads(choice) == "vision"

    @property
    @override
    def merge(self) -> int:
        return self.vision.pooling_kernel_size

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Tokens whose inputs of the layers are those of `pad_token`."""
        return tuple(sorted(t for t, key in self.media_tokens.items() if key in PLACEHOLDERS))

    @property
    def pad_token(self) -> int:
        """Id of the token that stands in the place of an image's for inputs of layers."""
        token = json.loads(dict(self.carried_attributes).get("pad_token_id", "0"))
        if type(token) is not int or not 0 <= token < self.vocab_size_per_layer_input:
            raise UserError(
                f"config.json: pad_token_id is {describe(token)}; layers with inputs of their own"
                " need the id of a token, which stands in the place of an image's"
            )
        return token

    def encodings(self) -> dict[str, tuple[np.ndarray, float]]:
        return {
            name: frequencies(self.heads(name)[0], dict(rope), self.rope_keys)
            for name, rope in self.rope
        }

    @property
    def carries(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Towers, and what folders may hold of layers that share keys and have no use for any."""
        shared = range(self.num_hidden_layers - self.num_kv_shared_layers, self.num_hidden_layers)
        unused = (
            f"{self.prefix}layers.{layer}.self_attn.{name}."
            for layer in shared
            for name in ("k_proj", "v_proj", "k_norm", "v_norm")
        )
        return (*super().carries, *SOUND, *unused)

    @property
    def embedding_scale(self) -> float:
        return self.hidden_size**0.5

    @property
    def logit_softcap(self) -> float | None:
        return self.final_logit_softcapping

    @property
    def experts_per_token(self) -> tuple[int, int] | None:
        if not self.enable_moe_block:
            return None
        assert self.top_k_experts and self.num_experts, "checked"
        return self.top_k_experts, self.num_experts


OWN_K = "num_global_key_value_heads"
KINDS = {SLIDING: "sliding", FULL: "full"}
"""Under which names layers are stored; "_shared" behind it: without keys of their own."""


def read_overrides(by_layer: Any, values: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """(head_dim, num_key_value_heads or None) of all full layers, from what newer files say of each
    layer that differs; UserError where others do, or in other attributes."""
    types, k_eq_v = values["layer_types"], values["attention_k_eq_v"]
    full = {str(layer) for layer, name in enumerate(types) if name == FULL}
    allowed = {"head_dim", "num_key_value_heads"} if k_eq_v else {"head_dim"}
    overrides = by_layer if isinstance(by_layer, Mapping) else {}
    # transformers pads the numbers of layers to one width: "05", "11".
    overrides = {str(key).lstrip("0") or "0": value for key, value in overrides.items()}
    full_overrides = [overrides.get(layer, {}) for layer in sorted(full)]
    fits = isinstance(by_layer, Mapping) and {*overrides} <= full
    fits = fits and all(
        isinstance(override, Mapping) and override == full_overrides[0]
        for override in full_overrides
    )
    if not fits or not {*full_overrides[0]} <= allowed:
        raise UserError(
            f"config.json: per_layer_config is {describe(by_layer)}; all layers of type {FULL!r}"
            f" must have the same {' and '.join(sorted(allowed))} there, and nothing else"
        )
    return full_overrides[0].get("head_dim", values["head_dim"]), full_overrides[0].get(
        "num_key_value_heads"
    )


class Model(Decoder):
    def __init__(self, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        super().__init__(config, options, rngs)
        init = options.layer_init(config, rngs)
        self.per_layer = (
            make_per_layer(config, init) if config.hidden_size_per_layer_input else None
        )
        self.placeholders = () if config.vision is None else config.placeholders
        self.pad_token = config.pad_token if self.placeholders and self.per_layer else 0

    def layer_inputs(self, tokens_BT: jax.Array, x_BTD: jax.Array) -> jax.Array | None:
        if self.per_layer is None:
            return None
        if not self.placeholders:
            return self.per_layer(tokens_BT, x_BTD)
        # As in transformers, where the row of padding is a constant.
        image_BT = jnp.isin(tokens_BT, jnp.array(self.placeholders))
        return self.per_layer(jnp.where(image_BT, self.pad_token, tokens_BT), x_BTD, image_BT)

    def make_block(
        self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs
    ) -> Block:
        init = options.layer_init(config, rngs)
        width, eps, act = config.hidden_size, config.rms_norm_eps, config.hidden_act
        make_norm = functools.partial(config.norm, width, eps=eps, param_dtype=init.param_dtype)
        full, shared = kind.startswith("full"), kind.endswith("_shared")
        size, kv_heads = config.heads(FULL if full else SLIDING)
        attention = Attention(
            width,
            config.num_attention_heads,
            kv_heads,
            size,
            AttentionOptions(
                qkv_bias=config.attention_bias,
                out_bias=config.attention_bias,
                qk_norm="head",
                v_norm=True,
                values="keys" if full and config.attention_k_eq_v else "own",
                imports=shared,
                norm=config.norm,
                eps=eps,
                scale=1.0,
                impl=options.attention_impl,
            ),
            init=init,
        )
        hidden = config.intermediate_size * (2 if shared and config.use_double_wide_mlp else 1)
        mlp, norms = GatedMLP(width, hidden, activation=act, init=init), [*SANDWICH_NORMS]
        if config.enable_moe_block:
            experts = make_experts(config, init)
            inner = {name.removeprefix("mlp."): make_norm() for name in EXPERT_NORMS}
            mlp = ParallelMLP(mlp, experts, **inner)
            norms.remove("mlp_norm")
        per_layer_width = config.hidden_size_per_layer_input
        per_layer = None
        if per_layer_width:
            per_layer = PerLayerGate(
                width, per_layer_width, activation=act, norm=config.norm, eps=eps, init=init
            )
        norm_layers = {name: make_norm() for name in norms}
        return Block(attention, mlp, per_layer=per_layer, scalar=True, **norm_layers)


def make_per_layer(config: Config, init: LayerInit) -> PerLayerInputs:
    """Build the module that computes per-layer inputs."""
    assert config.hidden_size_per_layer_input, "asked before"
    return PerLayerInputs(
        config.vocab_size_per_layer_input,
        config.hidden_size,
        config.num_hidden_layers,
        config.hidden_size_per_layer_input,
        norm=config.norm,
        eps=config.rms_norm_eps,
        init=init,
    )


def make_experts(config: Config, init: LayerInit) -> MoE:
    """Experts whose router reads the residual through a norm of its own."""
    width, eps = config.hidden_size, config.rms_norm_eps
    assert config.experts_per_token and config.moe_intermediate_size, "checked"
    top, count = config.experts_per_token
    router = Router(
        width,
        count,
        RoutingOptions(top=top, normalize=True),
        expert_scale=True,
        norm=RMSNorm(width, eps=eps, param_dtype=init.param_dtype),
        input_scale=width**-0.5,
        init=init,
    )
    hidden, act = config.moe_intermediate_size, config.hidden_act
    return MoE(router, width, hidden, count, MoEOptions(activation=act), init=init)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    entries = outer_names(config)
    if config.hidden_size_per_layer_input:
        projection = TensorRef("model.per_layer_model_projection.weight")
        entries += [
            ParameterEntry(
                "per_layer.embed.embedding", TensorRef("model.embed_tokens_per_layer.weight")
            ),
            ParameterEntry("per_layer.projection.kernel", Transpose(projection)),
            ParameterEntry(
                "per_layer.norm.scale", TensorRef("model.per_layer_projection_norm.weight")
            ),
        ]
    for kind, layers in config.layers_by_kind().items():
        entries += layer_names(config, kind, layers)
    tower = [] if config.vision is None else tower_names(config.vision)
    return [*with_prefix(entries, config.prefix), *tower]


def layer_names(config: Config, kind: str, layers: Sequence[int]) -> list[ParameterEntry]:
    """List the parameters of the layers of a kind, and their tensors."""
    kernels, scales = {"q": "q_proj", "out": "o_proj"}, ["q_norm"]
    if not kind.endswith("_shared"):
        kernels["k"] = "k_proj"
        scales.append("k_norm")
        if not (kind == "full" and config.attention_k_eq_v):
            kernels["v"] = "v_proj"
    linear = functools.partial(linear_entries, kind, layers)
    entries = [layer_entry(kind, layers, "layer_scalar", "layer_scalar")]
    for path, tensor in kernels.items():
        bias = config.attention_bias
        entries += linear(f"attention.{path}", f"self_attn.{tensor}", bias=bias)
    norms = {f"attention.{name}": f"self_attn.{name}" for name in scales} | SANDWICH_NORMS
    if config.enable_moe_block:
        del norms["mlp_norm"]
        assert config.moe_intermediate_size, "checked"
        entries += [
            *fused_expert_names(
                kind,
                layers,
                config.moe_intermediate_size,
                path="mlp.experts",
                module="",
                router="router.proj",
            ),
            layer_entry(kind, layers, "mlp.experts.router.norm.scale", "router.scale"),
            layer_entry(kind, layers, "mlp.experts.router.expert_scale", "router.per_expert_scale"),
        ]
        norms |= EXPERT_NORMS
        for part in ("gate", "up", "down"):
            entries += linear(f"mlp.dense.{part}", f"mlp.{part}_proj")
    else:
        entries += DenseSpec().names(config, kind, layers)
    if config.hidden_size_per_layer_input:
        norms["per_layer.norm"] = "post_per_layer_input_norm"
        entries += linear("per_layer.gate", "per_layer_input_gate")
        entries += linear("per_layer.out", "per_layer_projection")
    return entries + norm_names(kind, layers, norms)
