"""ParallelMixer: attention and a recurrent layer side by side (Falcon-H1: arXiv:2507.22448)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from jaxtrain.layers.attention import Attention
from jaxtrain.layers.linear import Dtype
from jaxtrain.layers.mamba2 import Mamba2
from jaxtrain.layers.mixer import Decoding, LayerInputs, LayerSpec, Mixer


class ParallelMixer(Mixer):
    """[B, T, D] -> [B, T, D]: the sum of out * mixer(in * x) of `attention` and `mamba`; its state
    is the pair of theirs. in_scales, out_scales: of attention, then of mamba."""

    follows_trees = True
    trials = "own"

    def __init__(
        self,
        attention: Attention,
        mamba: Mamba2,
        in_scales: tuple[float, float],
        out_scales: tuple[float, float],
    ):
        self.attention, self.mamba = attention, mamba
        self.in_scales, self.out_scales = in_scales, out_scales

    def _mixers(self) -> tuple[Mixer, Mixer]:
        return self.attention, self.mamba

    @override
    def init_state(self, spec: LayerSpec, rows: int, slots: int, dtype: Dtype) -> tuple:
        return tuple(mixer.init_state(spec, rows, slots, dtype) for mixer in self._mixers())

    @override
    def grow_state(self, spec: LayerSpec, state: tuple, rows: int, slots: int) -> tuple:
        pairs = zip(self._mixers(), state, strict=True)
        return tuple(mixer.grow_state(spec, part, rows, slots) for mixer, part in pairs)

    @override
    def commit_state(self, spec: LayerSpec, tried: tuple, decoding: Decoding) -> tuple:
        pairs = zip(self._mixers(), tried, strict=True)
        return tuple(mixer.commit_state(spec, part, decoding) for mixer, part in pairs)

    @override
    def place_state(self, state: tuple | None) -> tuple | None:
        if state is None:
            return None
        pairs = zip(self._mixers(), state, strict=True)
        return tuple(mixer.place_state(part) for mixer, part in pairs)

    @override
    def mixing_flops(self, spec: LayerSpec, spans: np.ndarray) -> float:
        return sum(mixer.mixing_flops(spec, spans) for mixer in self._mixers())

    def __call__(
        self, x_BTD: jax.Array, inputs: LayerInputs, state: tuple | None = None
    ) -> tuple[jax.Array, tuple | None]:
        outputs: list[jax.Array] = []
        states: list[Any] = []
        parts = (None, None) if state is None else state
        scales = zip(self.in_scales, self.out_scales, strict=True)
        for mixer, part, (before, behind) in zip(self._mixers(), parts, scales, strict=True):
            y_BTD, part = mixer(x_BTD * jnp.asarray(before, x_BTD.dtype), inputs, part)
            outputs.append(y_BTD * jnp.asarray(behind, x_BTD.dtype))
            states.append(part)
        return outputs[0] + outputs[1], None if state is None else tuple(states)
