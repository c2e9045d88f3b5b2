"""Stack: L blocks of one shape, stored stacked on a leading axis, run scanned or unrolled.

The storage is the same either way, so a checkpoint does not know how the model was run. Layers
that differ in a static number (their window) form runs; each run is one scan.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.layers.attention import LayerCache, Sight
from jaxtrain.layers.rope import Angles
from jaxtrain.parallel.rules import constrain

REMAT: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "save_attention": jax.checkpoint_policies.save_only_these_names(
        "attention_out", "attention_lse"
    ),
}
"""What the backward pass finds in memory: everything; the input of each block; also the results of
matmuls with weights; or also what attention put out, so that it is not run again."""


class Stack(nnx.Module):
    """Blocks (x_BTD, angles, sight, window=, cache=) -> (x_BTD, cache), one after the other.

    `windows` has one entry per layer; `make_block(rngs)` makes one block.
    """

    def __init__(
        self,
        make_block: Callable[[nnx.Rngs], nnx.Module],
        windows: Sequence[int | None],
        *,
        remat: str = "none",
        scan: bool = True,
        rngs: nnx.Rngs,
    ):
        if remat not in REMAT:
            raise UserError(f"remat={remat!r} is unknown; choose one of {sorted(REMAT)}")
        self.windows = tuple(windows)
        self.remat = remat
        self.scan = scan
        keys = jax.random.split(rngs.params(), len(self.windows))
        graphdef, _ = nnx.split(nnx.eval_shape(lambda: make_block(nnx.Rngs(0))))
        stacked = jax.vmap(lambda key: nnx.state(make_block(nnx.Rngs(params=key))))(keys)
        self.block = nnx.merge(graphdef, stacked)
        for _, variable in nnx.iter_graph(self.block):
            if isinstance(variable, nnx.Variable):
                variable.set_metadata(axes=("layers", *variable.get_metadata()["axes"]))

    def __call__(
        self,
        x_BTD: jax.Array,
        angles: Angles,
        sight: Sight,
        *,
        cache: LayerCache | None = None,
        capture: Sequence[int] = (),
    ) -> tuple[jax.Array, LayerCache | None, dict[int, jax.Array]]:
        """(output [B, T, D], cache, {layer: output of that layer} for the layers of `capture`)."""
        num_layers = len(self.windows)
        assert all(0 <= layer < num_layers for layer in capture), f"{capture} of {num_layers}"
        graphdef, state = nnx.split(self.block)
        bounds = self._bounds(capture)
        runs = _split(state, [stop - start for start, stop in bounds])
        kv = None if cache is None else (cache.k, cache.v)
        captured = {}
        for (start, stop), run in zip(bounds, runs, strict=True):
            step = self._step(graphdef, angles, sight, self.windows[start], cache)
            layers = jnp.arange(start, stop, dtype=jnp.int32)
            if self.scan and stop - start > 1:
                (x_BTD, kv), _ = jax.lax.scan(step, (x_BTD, kv), (run, layers))
            else:
                for layer, one in enumerate(_split(run, [1] * (stop - start)), start):
                    one = jax.tree.map(lambda leaf: leaf[0], one)
                    (x_BTD, kv), _ = step((x_BTD, kv), (one, layer))
            if stop - 1 in capture:
                captured[stop - 1] = x_BTD
        if cache is not None:
            cache = cache._replace(k=kv[0], v=kv[1])
        return x_BTD, cache, captured

    def _bounds(self, capture: Sequence[int]) -> list[tuple[int, int]]:
        """Runs [start, stop): a new one where the window changes and after a captured layer."""
        starts = [
            layer
            for layer in range(len(self.windows))
            if layer == 0 or self.windows[layer] != self.windows[layer - 1] or layer - 1 in capture
        ]
        return list(zip(starts, [*starts[1:], len(self.windows)], strict=True))

    def _step(self, graphdef, angles, sight, window, cache):
        def step(carry, layer_input):
            (x_BTD, kv), (state, layer) = carry, layer_input
            here = None if kv is None else LayerCache(*kv, layer=layer, start=cache.start)
            x_BTD = constrain(x_BTD, "rows", "sequence", "features")
            block = nnx.merge(graphdef, state)
            x_BTD, here = block(x_BTD, angles, sight, window=window, cache=here)
            return (x_BTD, None if here is None else (here.k, here.v)), None

        if self.remat == "none":
            return step
        # Inside a scan the loop already keeps XLA from undoing the rematerialisation.
        return jax.checkpoint(step, policy=REMAT[self.remat], prevent_cse=not self.scan)


def _split(state: nnx.State, sizes: Sequence[int]) -> list[nnx.State]:
    """Pieces along the layer axis. lax.split, because its gradient is one concatenation, while
    that of L slices is a sum of L arrays as large as the whole."""
    if len(sizes) == 1:
        return [state]
    leaves, treedef = jax.tree.flatten(state)
    pieces = [jax.lax.split(leaf, tuple(sizes)) for leaf in leaves]
    return [jax.tree.unflatten(treedef, piece) for piece in zip(*pieces, strict=True)]
