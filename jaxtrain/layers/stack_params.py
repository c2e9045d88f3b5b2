"""Parameters of stacked layers: how they are created, cut into pieces, rounded and fused.

A stack keeps layers of a kind as one module whose parameters have a leading axis of layers. All
functions here are differentiated through, so each chooses the form with the cheapest transpose.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.layers.linear import Linear


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerSlice:
    """`stacked[index]`, sliced by the block that reads it rather than by its caller."""

    stacked: jax.Array
    index: jax.Array

    def take(self) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(self.stacked, self.index, keepdims=False)


def create_stacked(make: Callable[[nnx.Rngs], nnx.Module], keys: jax.Array) -> nnx.Module:
    """Build one module whose parameters are those of `make` for each key, on a leading axis."""

    def draw(key: jax.Array) -> tuple[Any, nnx.State]:
        return nnx.split(make(nnx.Rngs(params=key)))

    if isinstance(keys, jax.core.Tracer):
        graphdef, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
        state = jax.vmap(lambda key: draw(key)[1])(keys)
    else:
        (graphdef, *_), layers = zip(*map(draw, keys), strict=True)
        state = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
    block = nnx.merge(graphdef, state)
    for _, variable in nnx.iter_graph(block):
        if isinstance(variable, nnx.Variable):
            variable.set_metadata(axes=("layers", *variable.get_metadata()["axes"]))
    return block


def split_leading(tree: Any, sizes: Sequence[int]) -> list[Any]:
    """Split every leaf along its leading axis into pieces of `sizes`."""
    if len(sizes) == 1:
        return [tree]
    leaves, treedef = jax.tree.flatten(tree)
    # lax.split, because its gradient is one concatenation, while that of L slices is a sum of L
    # arrays as large as the whole.
    pieces = [jax.lax.split(leaf, tuple(sizes)) for leaf in leaves]
    return [jax.tree.unflatten(treedef, [piece[i] for piece in pieces]) for i in range(len(sizes))]


def fold(tree: Any, count: int) -> Any:
    """Reshape the leading axis R * count to (R, count); unchanged for a count of 1."""
    if count == 1:
        return tree
    return jax.tree.map(lambda leaf: leaf.reshape(-1, count, *leaf.shape[1:]), tree)


def unfold(tree: Any, count: int) -> list[Any]:
    """Return the `count` pieces of one step of a scan over folded arrays."""
    if count == 1:
        return [tree]
    pieces = split_leading(tree, [1] * count)
    return [jax.tree.map(lambda leaf: leaf[0], piece) for piece in pieces]


def unfold_params(params: Any, count: int) -> list[Any]:
    """Return the `count` pieces of a step's parameters, matrices as `LayerSlice`s.

    jax.checkpoint keeps its inputs. If it were given slices, it would keep a copy of each matrix,
    although the stack is an input of the scan and stays in memory anyway. Vectors are split: for
    them the concatenation of gradients is cheaper than a sum (see `split_leading`).
    """
    if count == 1:
        return [params]
    leaves, treedef = jax.tree.flatten(params)
    pieces = [
        [LayerSlice(leaf, jnp.int32(index)) for index in range(count)]
        if leaf.ndim > 2
        else unfold(leaf, count)
        for leaf in leaves
    ]
    return [jax.tree.unflatten(treedef, layer) for layer in zip(*pieces, strict=True)]


def take_slices(params: Any) -> Any:
    """Replace the `LayerSlice`s of `unfold_params` by their arrays."""
    is_slice = lambda leaf: isinstance(leaf, LayerSlice)  # noqa: E731
    return jax.tree.map(
        lambda leaf: leaf.take() if is_slice(leaf) else leaf, params, is_leaf=is_slice
    )


def fuse_all(node: Any) -> None:
    """Call `fuse_kernels` of every layer in a module or a list of modules, in place."""
    for _, part in list(nnx.iter_graph(node)):
        if hasattr(part, "fuse_kernels"):
            part.fuse_kernels()


def round_kernels(
    graphdef: Any, state: nnx.State, fuse: bool = True, output_barrier: bool = False
) -> tuple[Any, nnx.State]:
    """Return (graphdef, state) with kernels in the dtype that their Linear computes in.

    A scan rounds all its layers at once: a kernel is read in float32 once per pass, and its
    gradient leaves the loop over layers in the dtype in which the matmul computed it. On one
    device, kernels that multiply the same input are fused if their master weights are wider,
    because rounding copies them anyway (see `fused_linear.fuse_kernels`), unless `fuse` is False.
    output_barrier: value of `Linear.output_barrier`.
    """
    block, mesh = nnx.merge(graphdef, state), jax.sharding.get_abstract_mesh()
    linears = [node for _, node in nnx.iter_graph(block) if isinstance(node, Linear)]
    rounded = [
        linear for linear in linears if linear.rounds_kernel and linear.kernel.dtype != linear.dtype
    ]
    has_masters = any(linear.kernel.dtype.itemsize > linear.dtype.itemsize for linear in rounded)
    for linear in rounded:
        # A new Variable: the merged one is the model's, and this may run inside an inner trace.
        # Writing to it would leak a tracer into the model.
        linear.kernel = linear.kernel.replace(linear.kernel[...].astype(linear.dtype))
    single_device = mesh.empty or mesh.size == 1
    if fuse and has_masters and single_device and all(linear.adapter is None for linear in linears):
        fuse_all(block)
    for _, node in nnx.iter_graph(block) if output_barrier else ():
        if hasattr(node, "output_barrier"):
            node.output_barrier = True
    return nnx.split(block)
