"""The experts that tokens go to, of all layers together: as a stream of a batch, and by layer.

Shapes: L layers, M of them with experts, R = M k.
"""

import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.layers.router import Router
from jaxtrain.layers.stack import Stack


def find_routers(stack: Stack) -> dict[str, tuple[str, Router]]:
    """{kind of layers: (path within its block, router)}, of shapes or arrays."""
    routers = {}
    for spec, block in zip(stack.specs, stack.blocks(), strict=True):
        if spec.kind not in routers:
            for path, node in nnx.iter_graph(block):
                if isinstance(node, Router):
                    routers[spec.kind] = ".".join(map(str, path)), node
    return routers


def has_routers(stack: Stack) -> bool:
    """Return True if any layer has experts, whatever the model's config says of dense ones."""
    return any(isinstance(node, Router) for _, node in nnx.iter_graph(stack))


def by_layer(stack: Stack, stream_BTR: jax.Array | None) -> jax.Array | None:
    """int32 [L, B, T, k] of the stream `batch.ROUTED`, -1 where routers choose; what layers without
    experts get means nothing."""
    if stream_BTR is None:
        return None
    kinds = find_routers(stack)
    counts = list(itertools.accumulate(int(spec.kind in kinds) for spec in stack.specs))
    missing = jnp.iinfo(stream_BTR.dtype).max
    replayed_BTR = jnp.where(stream_BTR == missing, -1, stream_BTR.astype(jnp.int32))
    replayed_BTMk = replayed_BTR.reshape(*stream_BTR.shape[:-1], counts[-1], -1)
    index_L = jnp.array([max(count - 1, 0) for count in counts], jnp.int32)
    return jnp.moveaxis(replayed_BTMk, 2, 0)[index_L]


def flatten_routes(routed_MBTk: jax.Array | None) -> jax.Array | None:
    """Concatenate the choices of M layers to [B, T, R]."""
    if routed_MBTk is None:
        return None
    M, B, T, k = routed_MBTk.shape
    return jnp.moveaxis(routed_MBTk, 0, 2).reshape(B, T, M * k)
