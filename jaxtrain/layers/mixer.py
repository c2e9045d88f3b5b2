"""Mixer: a layer that passes information between tokens, and the properties it declares.

In training a `Context` defines the mask. In decoding each layer has a state that is opaque to
others: keys and values, a recurrent matrix, the tail of a convolution. Stack, decoder and sampler
carry states along and call the methods here for everything else.
"""

import dataclasses
from abc import abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtrain_kernels import Context
from typing_extensions import override

from jaxtrain.distributed.sharding import constrain
from jaxtrain.layers.linear import Dtype
from jaxtrain.layers.rope import Angles

State = Any
"""A pytree of arrays [B, ...]."""


IMAGES = "images"
"""The mask of layers in which the tokens of an image see all of it, later ones too."""


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """Static properties in which a layer differs from the others of its stack."""

    kind: str = "block"
    """Layers of a kind have the same parameters, stored together under this name."""
    window: int | None = None
    """Positions that attention looks back, its own included; None: all."""
    chunked: bool = False
    """Attention looks back to the last multiple of `window`, and so no further."""
    rope: str = "default"
    """Name of the position encoding that the layer reads."""
    exports: str | None = None
    """Name, unique among layers, under which the mixer's keys and values are exported."""
    imports: str | None = None
    """Name of the keys and values, exported by an earlier layer, that this layer reads."""
    adds: int | None = None
    """Index among `ImageContext.deep` of the features that are added behind the layer."""
    mask: str = ""
    """Name of the layer's mask among `StackInputs.masks`; a layer whose mask is not there has
    `StackInputs.context`."""


class ImageContext(NamedTuple):
    """Features of images for some layers, a `side_context` of the stack (DeepStack: Meng et al.
    2024, arXiv:2406.04334)."""

    slot: jax.Array
    """int32 [B, T]: the feature at a token; -1: none."""
    deep: tuple[jax.Array, ...]
    """[B, F, D] of each layer that adds some."""


class SharedSlots(NamedTuple):
    """Rows of a state with a common prefix: answers to one prompt."""

    leader: jax.Array
    """int32 [B]: the row whose slots are read for the prefix."""
    until: jax.Array
    """int32 [B]: length of the prefix that the row shares with its leader; 0: none."""


class Decoding(NamedTuple):
    """Positions of the T new tokens of each row. The first `end - start` of a row count; later ones
    leave no trace in its state."""

    start: jax.Array
    """int32 [B]: tokens that the state has read before."""
    end: jax.Array
    """int32 [B]: tokens that it has read afterwards."""
    horizon: jax.Array | None = None
    """int32 [B]: the new tokens see all tokens before it, later ones too, of which those from `end`
    on were read before. None: a token sees those up to itself."""
    shared: SharedSlots | None = None
    """Prefix shared between rows, ending before `start`; None if unknown."""


def place_new(start_B: jax.Array, end_B: jax.Array, T: int) -> tuple[Context, Decoding]:
    """Return the context and slots of T new tokens of each row, of which those up to `end`
    count."""
    positions_BT = start_B[:, None] + jnp.arange(T, dtype=jnp.int32)
    # An `until` of 0 hides a token from all others, itself included: padding leaves no trace.
    until_BT = jnp.where(positions_BT < end_B[:, None], T, 0).astype(jnp.int32)
    return Context(until_BT, None, positions_BT, positions_BT), Decoding(start_B, end_B)


class LayerInputs(NamedTuple):
    """Inputs of a block besides the hidden states."""

    context: Context
    """Mask of the T tokens; in decoding, of the new ones."""
    spec: LayerSpec
    angles: Angles | None = None
    """Rotations of the position encoding that `spec` names."""
    decoding: Decoding | None = None
    extra: Any = None
    """This layer's slice of the stack's per-layer inputs."""
    experts: Any = None
    """int32 [B, T, k] experts of this layer's tokens; None: its router chooses."""
    side_context: Any = None
    """A pytree that all layers read alike, with gradients: a draft's context."""
    shared: Any = None
    """Arrays derived from the context once for all layers of a kind: see `Mixer.find_shared`."""
    imported: Any = None
    """`SharedKV.exported` of the layer that exports under the name `spec.imports`."""
    trial: bool = False
    """True if some of the new tokens may be rejected: a layer with `trials` "own" then returns a
    state for its `commit_state`."""


class SharedKV(NamedTuple):
    """State and exported keys and values, returned by a mixer in place of its state if
    `spec.exports` is set."""

    state: State
    exported: Any
    """A pytree of arrays, for `LayerInputs.imported` of later layers; with gradients."""


class Mixer(nnx.Module):
    """A layer (x_BTD, inputs, state) -> (y_BTD, state); the state is None in training.

    The methods read static attributes only: in a stack, parameters are those of many layers.
    """

    follows_trees: ClassVar[bool] = False
    """A token depends on its own branch alone (through `until` or `prev` of the Context), so that
    packed documents and branches equal separate ones."""
    both_sides: ClassVar[bool] = False
    """Tokens see later ones where the Context (`since`) or Decoding lets them."""
    keeps_packed: ClassVar[bool] = False
    """A state (`init_packed`) can continue from any token of packed rows, as `prev` of the Context
    would, without reading the rows again."""
    state_axes: ClassVar[tuple[str | None, ...]] = ("rows",)
    """Logical axes (distributed.sharding) of the state's arrays; later dims are not split."""
    trials: ClassVar[Literal["rerun", "own", "none"]] = "rerun"
    """How rejected tokens are removed from the state. rerun: the block reads the accepted ones once
    more, from the state before, which is right for every layer that respects `Decoding`; own: by
    `commit_state`, with less work; none: not supported."""

    @abstractmethod
    def init_state(self, spec: LayerSpec, rows: int, slots: int, dtype: Dtype) -> State:
        """Create the empty state of `rows` rows with room for `slots` tokens."""

    @abstractmethod
    def mixing_flops(self, spec: LayerSpec, spans: np.ndarray) -> float:
        """FLOPs of a forward pass besides those of its weights; spans int [n]: the number of tokens
        that see each token, itself included."""

    def find_shared(self, context: Context) -> Any:
        """Compute arrays of packed rows that every layer of this kind would compute alike."""
        return None

    def init_packed(self, spec: LayerSpec, rows: int, slots: int, dtype: Dtype) -> State:
        """Create a state of packed rows and continuations of their tokens, if `keeps_packed`. New
        tokens take the slots from `decoding.start` on, the same in all rows, and the context of a
        call has the intervals of all slots."""
        raise NotImplementedError(f"{type(self).__name__} has no state of packed rows")

    def grow_state(self, spec: LayerSpec, state: State, rows: int, slots: int) -> State:
        """Copy `state` into one with more rows or slots; neither may shrink."""

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(new.astype(old.dtype), old, (0,) * old.ndim)

        dtype = jax.tree.leaves(state)[0].dtype
        return jax.tree.map(put, state, self.init_state(spec, rows, slots, dtype))

    def insert_state(
        self, state: State, rows_R: jax.Array, filled: State, source_R: jax.Array
    ) -> State:
        """Replace rows of `state` by those of a `filled` one with at most as many slots; rows out
        of range are dropped."""
        return jax.tree.map(lambda old, new: put_rows(old, rows_R, new, source_R), state, filled)

    def commit_state(self, spec: LayerSpec, tried: State, decoding: Decoding) -> State:
        """Return the state after the tokens up to `decoding.end`, from that of a trial that began
        at `decoding.start`; for layers whose `trials` is "own"."""
        raise NotImplementedError(f"{type(self).__name__} cannot reject tokens of a trial")

    def place_state(self, state: State) -> State:
        """Constrain `state` to its sharding on the current mesh."""

        def place(x: jax.Array) -> jax.Array:
            names = (*self.state_axes, *(None,) * x.ndim)[: x.ndim]
            return constrain(x, *names)

        return jax.tree.map(place, state)


@jax.jit  # traced and lowered once for all layers: indexing is slow to trace
def put_rows(old: jax.Array, rows_R: jax.Array, new: jax.Array, source_R: jax.Array) -> jax.Array:
    """Replace rows of an array by those of one that is no larger; see `Mixer.insert_state`."""
    part = tuple(slice(size) for size in new.shape[1:])
    return old.at[(rows_R, *part)].set(new[source_R].astype(old.dtype), mode="drop")


class Tokenwise(Mixer):
    """The mixer of a layer that reads each token alone: a state without arrays."""

    follows_trees = True
    trials = "own"

    @override
    def init_state(self, spec: LayerSpec, rows: int, slots: int, dtype: Dtype) -> State:
        return ()

    @override
    def grow_state(self, spec: LayerSpec, state: State, rows: int, slots: int) -> State:
        return ()

    @override
    def commit_state(self, spec: LayerSpec, tried: State, decoding: Decoding) -> State:
        return ()

    @override
    def mixing_flops(self, spec: LayerSpec, spans: np.ndarray) -> float:
        return 0.0
