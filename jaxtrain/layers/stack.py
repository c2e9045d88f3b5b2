"""Stack: L blocks of one shape, stored stacked on a leading axis, run scanned or unrolled.

The storage is the same either way, so a checkpoint does not know how the model was run. Layers
that differ in a static number (their window) or in kind (dense, experts) form runs; each run is one
scan.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtrain_kernels import Context

from jaxtrain.errors import UserError
from jaxtrain.layers.attention import LayerCache
from jaxtrain.layers.linear import Linear
from jaxtrain.layers.rope import Angles
from jaxtrain.parallel.rules import constrain

SAVE_DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
SAVE_ATTENTION = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")
REMAT: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "elementwise": jax.checkpoint_policies.save_from_both_policies(SAVE_DOTS, SAVE_ATTENTION),
    "dots": SAVE_DOTS,
    "save_attention": SAVE_ATTENTION,
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""What the backward pass finds in memory: everything; the input of each block with the results of
its matmuls and what attention put out; without the latter; without the former; or the input alone.
Everything else is computed again. Attention's backends name their results as the policies do."""


class Stack(nnx.Module):
    """Blocks (x_BTD, angles, context, window=, cache=) -> (x_BTD, cache, noted), in their order.

    `windows` has one entry per layer; `make_block(rngs)` makes one block. Where layers differ in
    their parameters, `kinds` names the kind of each, "block" or one that `others` makes; the
    layers of a kind are stored together under its name. `noted` is {name: array}, {} for most.
    """

    def __init__(
        self,
        make_block: Callable[[nnx.Rngs], nnx.Module],
        windows: Sequence[int | None],
        *,
        others: Mapping[str, Callable[[nnx.Rngs], nnx.Module]] | None = None,
        kinds: Sequence[str] | None = None,
        remat: str = "none",
        scan: bool = True,
        rngs: nnx.Rngs,
    ):
        if remat not in REMAT:
            raise UserError(f"remat={remat!r} is unknown; choose one of {sorted(REMAT)}")
        self.windows = tuple(windows)
        self.remat = remat
        self.scan = scan
        self.layers = nnx.data(None)
        self.kinds = ("block",) * len(self.windows) if kinds is None else tuple(kinds)
        assert len(self.kinds) == len(self.windows), f"{self.kinds} for {self.windows}"
        keys = jax.random.split(rngs.params(), len(self.windows))
        for kind, make in {"block": make_block, **(others or {})}.items():
            mine = [layer for layer, name in enumerate(self.kinds) if name == kind]
            if mine:
                setattr(self, kind, _stacked(make, keys[jnp.array(mine)]))

    def __call__(
        self,
        x_BTD: jax.Array,
        angles: Angles,
        context: Context,
        *,
        cache: LayerCache | None = None,
        capture: Sequence[int] = (),
    ) -> tuple[jax.Array, LayerCache | None, dict[int, jax.Array], dict[str, jax.Array]]:
        """(output [B, T, D], cache, {layer: output of that layer} for the layers of `capture`,
        {name: [layers that note it, ...]})."""
        if self.layers is not None:
            assert not capture, "a stack that was taken apart captures nothing"
            return self._run_apart(x_BTD, angles, context, cache)
        num_layers = len(self.windows)
        assert all(0 <= layer < num_layers for layer in capture), f"{capture} of {num_layers}"
        bounds = self._bounds(capture)
        graphdefs, runs = {}, {}
        for kind in set(self.kinds):
            block = getattr(self, kind)
            graphdefs[kind], state = nnx.split(block)
            state = _round_kernels(block, state)
            sizes = [stop - start for start, stop in bounds if self.kinds[start] == kind]
            runs[kind] = iter(_split(state, sizes))
        kv = None if cache is None else (cache.k, cache.v)
        captured, notes = {}, {}
        for start, stop in bounds:
            kind = self.kinds[start]
            run = next(runs[kind])
            step = self._step(graphdefs[kind], angles, context, self.windows[start], cache)
            layers = jnp.arange(start, stop, dtype=jnp.int32)
            if self.scan and stop - start > 1:
                (x_BTD, kv), noted = jax.lax.scan(step, (x_BTD, kv), (run, layers))
                _append(notes, noted)
            else:
                # Traced, differentiated and lowered once; kernels are compiled once.
                step = jax.jit(step)
                for layer, one in enumerate(_split(run, [1] * (stop - start)), start):
                    one = jax.tree.map(lambda leaf: leaf[0], one)
                    (x_BTD, kv), noted = step((x_BTD, kv), (one, layer))
                    _append(notes, jax.tree.map(lambda leaf: leaf[None], noted))
            if stop - 1 in capture:
                captured[stop - 1] = x_BTD
        if cache is not None:
            cache = cache._replace(k=kv[0], v=kv[1])
        notes = {name: jnp.concatenate(parts) for name, parts in notes.items()}
        return x_BTD, cache, captured, notes

    def unstack(self) -> None:
        """Store every layer by itself from now on, and run them unrolled.

        For programs that run the layers in a loop of their own, as decoding does: there a slice of
        the stack is a copy every time. To be called inside of jit; nothing of the stack remains.
        """
        layers: list[Any] = [None] * len(self.kinds)
        for kind in dict.fromkeys(self.kinds):
            block = getattr(self, kind)
            graphdef, state = nnx.split(block)
            mine = [layer for layer, name in enumerate(self.kinds) if name == kind]
            for layer, piece in zip(mine, _split(state, [1] * len(mine)), strict=True):
                layers[layer] = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[0], piece))
            delattr(self, kind)
        for _, variable in nnx.iter_graph(layers):
            if isinstance(variable, nnx.Variable):
                axes = variable.get_metadata()["axes"][1:]
                variable.set_metadata(axes=axes)
                variable.set_value(constrain(variable.get_value(), *axes))
        self.layers = nnx.List(layers)

    def _run_apart(self, x_BTD, angles, context, cache):
        kv = None if cache is None else (cache.k, cache.v)
        steps, notes = {}, {}
        for layer, block in enumerate(self.layers):
            graphdef, state = nnx.split(block)
            key = (graphdef, self.windows[layer])
            if key not in steps:  # traced once
                steps[key] = jax.jit(self._step(graphdef, angles, context, key[1], cache))
            index = jnp.asarray(layer, jnp.int32)
            (x_BTD, kv), noted = steps[key]((x_BTD, kv), (state, index))
            _append(notes, jax.tree.map(lambda leaf: leaf[None], noted))
        if cache is not None:
            cache = cache._replace(k=kv[0], v=kv[1])
        notes = {name: jnp.concatenate(parts) for name, parts in notes.items()}
        return x_BTD, cache, {}, notes

    def _bounds(self, capture: Sequence[int]) -> list[tuple[int, int]]:
        """Runs [start, stop): a new one where window or kind change and after a captured layer."""
        looks = list(zip(self.windows, self.kinds, strict=True))
        starts = [
            layer
            for layer in range(len(looks))
            if layer == 0 or looks[layer] != looks[layer - 1] or layer - 1 in capture
        ]
        return list(zip(starts, [*starts[1:], len(looks)], strict=True))

    def _step(self, graphdef, angles, context, window, cache):
        def step(carry, layer_input):
            (x_BTD, kv), (state, layer) = carry, layer_input
            here = None if kv is None else cache._replace(k=kv[0], v=kv[1], layer=layer)
            x_BTD = constrain(x_BTD, "rows", "sequence", "features")
            block = nnx.merge(graphdef, state)
            x_BTD, here, noted = block(x_BTD, angles, context, window=window, cache=here)
            return (x_BTD, None if here is None else (here.k, here.v)), noted

        if self.remat == "none":
            return step
        # Inside a scan the loop already keeps XLA from undoing the rematerialisation.
        return jax.checkpoint(step, policy=REMAT[self.remat], prevent_cse=not self.scan)


def _stacked(make: Callable[[nnx.Rngs], nnx.Module], keys: jax.Array) -> nnx.Module:
    """One module whose parameters are those of `make` for each key, on a leading axis."""
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    state = jax.vmap(lambda key: nnx.state(make(nnx.Rngs(params=key))))(keys)
    block = nnx.merge(graphdef, state)
    for _, variable in nnx.iter_graph(block):
        if isinstance(variable, nnx.Variable):
            variable.set_metadata(axes=("layers", *variable.get_metadata()["axes"]))
    return block


def _append(notes: dict[str, list[jax.Array]], noted: dict[str, jax.Array]) -> None:
    for name, value in noted.items():
        notes.setdefault(name, []).append(value)


def _round_kernels(block: nnx.Module, state: nnx.State) -> nnx.State:
    """`state` with the kernels in the dtype that their Linear computes in.

    All layers at once: a kernel is read in float32 once a pass, and its gradient leaves the loop
    over layers in the dtype in which the matmul computed it.
    """
    flat = dict(nnx.to_flat_state(state))
    for path, node in nnx.iter_graph(block):
        if isinstance(node, Linear) and node.rounds_kernel:
            kernel = flat[*path, "kernel"]
            flat[*path, "kernel"] = kernel.replace(kernel.get_value().astype(node.dtype))
    return nnx.from_flat_state(flat)


def _split(state: nnx.State, sizes: Sequence[int]) -> list[nnx.State]:
    """Pieces along the layer axis. lax.split, because its gradient is one concatenation, while
    that of L slices is a sum of L arrays as large as the whole."""
    if len(sizes) == 1:
        return [state]
    leaves, treedef = jax.tree.flatten(state)
    pieces = [jax.lax.split(leaf, tuple(sizes)) for leaf in leaves]
    return [jax.tree.unflatten(treedef, piece) for piece in zip(*pieces, strict=True)]
