"""Mixer: a layer that passes something between tokens, and what it says of itself.

Training is told who sees whom (`Context`); decoding keeps a state a layer, which only the layer
that made it understands: keys and values, a recurrent matrix, the tail of a convolution. Stack,
decoder and sampler carry states along and ask here for all else.
"""

import dataclasses
from abc import abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtrain_kernels import Context

from jaxtrain.distributed.sharding import constrain
from jaxtrain.layers.linear import Dtype
from jaxtrain.layers.rope import Angles

State = Any
"""A pytree of arrays [B, ...]."""


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What sets a layer apart from the others of its stack, its numbers aside."""

    kind: str = "block"
    """Layers of a kind have the same parameters, stored together under this name."""
    window: int | None = None
    """Positions that attention looks back, its own included; None: all."""
    rope: str = "default"
    """Which of the model's position encodings the layer reads."""
    gives: str | None = None
    """Under which name later layers get what this layer's mixer hands on; no other layer has it."""
    takes: str | None = None
    """The name of what an earlier layer handed on to this one."""


class SharedSlots(NamedTuple):
    """Rows of a state that begin alike: answers to one prompt."""

    leader: jax.Array
    """int32 [B]: the row in which what they share is looked up."""
    until: jax.Array
    """int32 [B]: the tokens of the row that its leader has, too, at the same places; 0: none."""


class Decoding(NamedTuple):
    """Where the T new tokens of each row stand. Of a row the first `end - start` count; those
    behind them leave no trace in its state."""

    start: jax.Array
    """int32 [B]: tokens that the state has seen."""
    end: jax.Array
    """int32 [B]: tokens that it will have seen."""
    both_sides: bool = False
    """Whether the new tokens see all tokens up to `end`, later ones too. What lies behind them was
    read before, so that `end` may be beyond the last of them."""
    shared: SharedSlots | None = None
    """What rows have in common, all of it before `start`; None: nothing that is known of."""


class LayerInputs(NamedTuple):
    """What a block reads beside the hidden states."""

    context: Context
    """Who sees whom among the T tokens; in decoding these are the new ones."""
    spec: LayerSpec
    angles: Angles | None = None
    """Of the encoding that `spec` names."""
    decoding: Decoding | None = None
    extra: Any = None
    """This layer's slice of the stack's per-layer inputs."""
    experts: Any = None
    """int32 [B, T, k]: those that this layer's tokens go to; None: its router chooses."""
    beside: Any = None
    """What all layers read alike beside the hidden states, with gradients: a draft's context."""
    shared: Any = None
    """What the mixers of this kind found in the context, once for all: see `Mixer.find_shared`."""
    given: Any = None
    """What the layer that `spec.takes` names handed on."""
    trial: bool = False
    """Whether some of the new tokens may be taken back: a layer with `trials` "own" then returns a
    state that its `commit_state` understands."""


class SharedKV(NamedTuple):
    """What a mixer returns in the place of its state where `spec.gives` is set."""

    state: State
    given: Any
    """A pytree of arrays, for `LayerInputs.given` of later layers; with gradients."""


class Mixer(nnx.Module):
    """A layer (x_BTD, inputs, state) -> (y_BTD, state); the state is None in training.

    The methods read static attributes alone: in a stack, parameters are those of many layers.
    """

    follows_trees: ClassVar[bool] = False
    """Whether a token depends on its own branch alone (through `until` or `prev` of the Context),
    so that packed documents and branches are what they would be alone."""
    both_sides: ClassVar[bool] = False
    """Whether tokens see later ones where the Context (`since`) or Decoding lets them."""
    keeps_packed: ClassVar[bool] = False
    """Whether any token of packed rows can be gone on from by a state (`init_packed`), as `prev` of
    the Context would have it, without reading the rows again."""
    state_axes: ClassVar[tuple[str | None, ...]] = ("rows",)
    """Logical axes (parallel.rules) of the state's arrays; dims behind the last are whole."""
    trials: ClassVar[Literal["rerun", "own", "none"]] = "rerun"
    """How tokens that were only tried leave the state again. rerun: the block reads those that stay
    once more, from the state before, which is right for every layer that keeps to `Decoding`; own:
    by `commit_state`, for less work; none: they cannot."""

    @abstractmethod
    def init_state(self, spec: LayerSpec, rows: int, slots: int, dtype: Dtype) -> State:
        """The state of rows that have seen nothing, with room for `slots` tokens."""

    @abstractmethod
    def mixing_flops(self, spec: LayerSpec, spans: np.ndarray) -> float:
        """FLOPs of a forward pass beside those of its weights; spans int [n]: how many tokens see
        each token, itself among them."""

    def find_shared(self, context: Context) -> Any:
        """Arrays, of packed rows, that each layer of this kind would otherwise compute alike."""
        return None

    def init_packed(self, spec: LayerSpec, rows: int, slots: int, dtype: Dtype) -> State:
        """A state of packed rows and what goes on from their tokens, with room for `slots`; of
        layers that keep packed rows. New tokens take the slots from `decoding.start` on, alike in
        all rows, and the context of a call has the intervals of all slots."""
        raise NotImplementedError(f"{type(self).__name__} keeps no packed rows")

    def grow_state(self, spec: LayerSpec, state: State, rows: int, slots: int) -> State:
        """`state` with more rows or slots; none may shrink."""

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(new.astype(old.dtype), old, (0,) * old.ndim)

        dtype = jax.tree.leaves(state)[0].dtype
        return jax.tree.map(put, state, self.init_state(spec, rows, slots, dtype))

    def insert_state(
        self, state: State, rows_R: jax.Array, filled: State, source_R: jax.Array
    ) -> State:
        """`state` with rows of a `filled` one, of no more slots, in the place of some of its own;
        rows out of range go nowhere."""

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            part = tuple(slice(size) for size in new.shape[1:])
            return old.at[(rows_R, *part)].set(new[source_R].astype(old.dtype), mode="drop")

        return jax.tree.map(put, state, filled)

    def commit_state(self, spec: LayerSpec, tried: State, decoding: Decoding) -> State:
        """The state after the tokens up to `decoding.end`, from that of a trial which began at
        `decoding.start`; of layers whose `trials` is "own"."""
        raise NotImplementedError(f"{type(self).__name__} takes nothing back")

    def place_state(self, state: State) -> State:
        """`state` on the mesh that is set."""

        def place(x: jax.Array) -> jax.Array:
            names = (*self.state_axes, *(None,) * x.ndim)[: x.ndim]
            return constrain(x, *names)

        return jax.tree.map(place, state)


class Tokenwise(Mixer):
    """What stands for the mixer of a layer that reads each token alone: a state without arrays."""

    follows_trees = True
    trials = "own"

    def init_state(self, spec: LayerSpec, rows: int, slots: int, dtype: Dtype) -> State:
        """See Mixer."""
        return ()

    def grow_state(self, spec: LayerSpec, state: State, rows: int, slots: int) -> State:
        """See Mixer."""
        return ()

    def commit_state(self, spec: LayerSpec, tried: State, decoding: Decoding) -> State:
        """See Mixer."""
        return ()

    def mixing_flops(self, spec: LayerSpec, spans: np.ndarray) -> float:
        """See Mixer."""
        return 0.0
