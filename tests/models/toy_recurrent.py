"""A decoder family from outside: recurrent layers between layers of attention.

A recurrent layer mixes a token with the one before (a convolution of two) and folds the result into
a decaying state. In a tree both come from the token's parent on its branch, `context.prev`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.huggingface.ops import ParameterEntry, StackedOps, TensorRef, Transpose
from jaxtrain.layers.linear import LayerInit, Linear
from jaxtrain.layers.mixer import LayerInputs, LayerSpec, Mixer
from jaxtrain.layers.norm import RMSNorm
from jaxtrain.models.blocks import BlockSpec
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.naming import outer_names


class State(NamedTuple):
    """State that the next token of a row needs."""

    decayed: jax.Array
    """[B, F]."""
    last: jax.Array
    """[B, F]: the convolution's tail."""


class Recurrent(Mixer):
    """h = a h_prev + (1 - a) tanh(u + 0.5 u_prev), with a and u linear in x; out(h)."""

    follows_trees = True
    preset = "recurrent"

    def __init__(self, num_features: int, num_hidden: int, *, init: LayerInit):
        self.gate = Linear(num_features, num_hidden, axes=("embed", "mlp"), init=init)
        self.value = Linear(num_features, num_hidden, axes=("embed", "mlp"), init=init)
        self.out = Linear(num_hidden, num_features, axes=("mlp", "embed"), init=init)
        self.num_hidden = num_hidden

    def init_state(self, spec: LayerSpec, rows: int, slots: int, dtype) -> State:
        zeros = jnp.zeros((rows, self.num_hidden), dtype)
        return State(zeros, zeros)

    def mixing_flops(self, spec: LayerSpec, spans: np.ndarray) -> float:
        return 6.0 * self.num_hidden * len(spans)

    def __call__(self, x_BTD: jax.Array, inputs: LayerInputs, state: State | None = None):
        (B, T), rows_B = x_BTD.shape[:2], jnp.arange(x_BTD.shape[0])
        decay_BTF, u_BTF = jax.nn.sigmoid(self.gate(x_BTD)), self.value(x_BTD)
        first = self.init_state(inputs.spec, B, 0, x_BTD.dtype) if state is None else state
        # Place 0 is what stands before the row, place t + 1 token t.
        prev = inputs.context.prev
        place_BT = jnp.broadcast_to(jnp.arange(T), (B, T)) if prev is None else prev + 1
        us = jnp.concatenate([first.last[:, None], u_BTF], axis=1)
        v_BTF = jnp.tanh(u_BTF + 0.5 * jnp.take_along_axis(us, place_BT[:, :, None], axis=1))

        def step(all_h, current_time):
            t, place_B, decay_BF, v_BF = current_time
            h_BF = decay_BF * all_h[rows_B, place_B] + (1 - decay_BF) * v_BF
            return all_h.at[:, t + 1].set(h_BF), h_BF

        all_h = jnp.zeros_like(us).at[:, 0].set(first.decayed)
        by_token = (jnp.arange(T), place_BT.T, decay_BTF.swapaxes(0, 1), v_BTF.swapaxes(0, 1))
        all_h, h_TBF = jax.lax.scan(step, all_h, by_token)
        if state is not None:
            count_B = inputs.decoding.end - inputs.decoding.start
            state = State(all_h[rows_B, count_B], us[rows_B, count_B])
        return self.out(h_TBF.swapaxes(0, 1)), state


class Block(nnx.Module):
    def __init__(self, config: "Config", options: DecoderOptions, rngs: nnx.Rngs):
        init = options.layer_init(config, rngs)
        width = config.hidden_size
        self.norm = RMSNorm(
            width, eps=config.rms_norm_eps, param_dtype=jnp.dtype(options.param_dtype)
        )
        self.mixer = Recurrent(width, config.intermediate_size, init=init)

    def __call__(self, x_BTD: jax.Array, inputs: LayerInputs, state: State | None = None):
        h_BTD, state = self.mixer(self.norm(x_BTD), inputs, state)
        return x_BTD + h_BTD, state, {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    architecture: ClassVar[str] = "ToyForCausalLM"
    model_type: ClassVar[str] = "toy"

    sliding_window: int | None = None

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "Config":
        fields = {field.name for field in dataclasses.fields(cls)}
        preset = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
        preset["rope"] = (("rope_theta", 1e4), ("rope_type", "default"))
        return cls(**preset | {key: value for key, value in raw.items() if key in fields})

    def layers(self) -> tuple[LayerSpec, ...]:
        """Recurrent, attention, recurrent, attention, ..."""
        pair = (LayerSpec("recurrent"), LayerSpec(window=self.sliding_window))
        return tuple(pair[layer % 2] for layer in range(self.num_hidden_layers))


class Model(Decoder):
    def make_block(self, kind: str, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        make = Block if kind == "recurrent" else BlockSpec().build
        return make(config, options, rngs)


def names(config: Config) -> list[ParameterEntry]:
    kinds = config.layers_by_kind()
    parts = {f"mixer.{name}.kernel": Transpose for name in ("gate", "value", "out")}
    parts["norm.scale"] = lambda tensor: tensor
    recurrent = [
        ParameterEntry(
            f"stack.recurrent.{part}",
            StackedOps(tuple(op(TensorRef(f"layers.{n}.{part}")) for n in kinds["recurrent"])),
        )
        for part, op in parts.items()
    ]
    attention = BlockSpec().names(config, "block", kinds["block"])
    return [*outer_names(config), *recurrent, *attention]
