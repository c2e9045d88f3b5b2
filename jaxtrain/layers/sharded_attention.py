"""The shard_map around attention's kernels: each device has its rows, heads and queries.

Keys and values of a row are gathered over the context axis; the tree mask stays exact, because
every key carries the interval of queries that see it and intervals are shifted, not cut. A causal
row gives its last queries far more work than its first, so the queries of a layer are dealt anew:

    tokens lie in 2n chunks    0 1 | 2 3 | 4 5 | 6 7       of n = 4 devices
    queries are attended as    0 7 | 2 5 | 4 3 | 6 1       each device an early and a late chunk

Chunk c goes to device c of the first half, to device 2n - 1 - c of the second: two permutations of
the devices, one for even and one for odd chunks, and back again after the kernel.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtrain_kernels import Context, decode_attention, rotate_heads
from jaxtrain_kernels import attention as attention_op
from jaxtrain_kernels.mosaic import on_hopper

from jaxtrain.distributed.sharding import count_ways, mesh_axes, partition_spec
from jaxtrain.layers.mixer import SharedSlots
from jaxtrain.layers.rope import Angles


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    context: Context,
    *,
    sinks: jax.Array | None = None,
    impl: str = "auto",
    **options,
) -> jax.Array:
    """`jaxtrain_kernels.attention` on the current mesh; options (window, softcap, scale) are
    the kernel's; sinks [N]. Returns [B, T, N, H], placed as q."""
    op, context = functools.partial(attention_op, impl=impl, **options), context._replace(prev=None)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return op(q_BTNH, k_BSKH, v_BSKH, context, sinks=sinks)
    k_BSKH, v_BSKH = (share_heads(x, q_BTNH.shape[2], mesh) for x in (k_BSKH, v_BSKH))
    q_spec = partition_spec(("rows", "length", "act_heads", None), q_BTNH.shape, mesh)
    k_spec = partition_spec(("rows", "length", "act_heads", None), k_BSKH.shape, mesh)
    if q_spec[2] != k_spec[2]:  # heads that do not divide: every device takes all of them
        q_spec, k_spec = PartitionSpec(*q_spec[:2]), PartitionSpec(*k_spec[:2])
    rows, length = q_spec[0], q_spec[1]
    axis = next(iter(mesh_axes("length", mesh)), None)
    since = context.since
    if since is None:
        since = jnp.broadcast_to(jnp.arange(k_BSKH.shape[1], dtype=jnp.int32), context.until.shape)

    def local(q_BTNH, k_BSKH, v_BSKH, sinks, until, since, positions, key_positions):
        if k_spec[1] is not None:
            # Gathered here and not by the partitioner: its transpose is a reduce-scatter.
            k_BSKH, v_BSKH = (
                jax.lax.all_gather(x, axis, axis=1, tiled=True) for x in (k_BSKH, v_BSKH)
            )

        def run(q_BTNH, positions, first):
            shifted = Context(until - first, since - first, positions, key_positions)
            return op(q_BTNH, k_BSKH, v_BSKH, shifted, sinks=sinks)

        if length is None:
            return run(q_BTNH, positions, 0)
        return zigzag(run, q_BTNH, positions, axis, mesh.shape[axis])

    by_key, by_query = PartitionSpec(rows), PartitionSpec(rows, length)
    masks = (context.until, since, context.positions, context.key_positions)
    return jax.shard_map(
        local,
        in_specs=(q_spec, k_spec, k_spec, heads_of(q_spec), by_key, by_key, by_query, by_key),
        out_specs=q_spec,
        check_vma=False,
    )(q_BTNH, k_BSKH, v_BSKH, sinks, *masks)


def attend_cached(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    until_BT: jax.Array,
    since_BT: jax.Array,
    *,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    shared: SharedSlots | None = None,
    **options,
) -> jax.Array:
    """`jaxtrain_kernels.decode_attention` on the current mesh: a few queries a row, each of
    which sees the slots from `since` to `until`; k_scale, v_scale [B, S, K] of a cache of 8 bits;
    shared: of rows that lie on one device (else each reads its own).
    Returns [B, T, N, H], placed as q; 0 where one sees none."""
    op, mesh = functools.partial(decode_attention, **options), jax.sharding.get_abstract_mesh()
    if shared is not None and (mesh.empty or mesh.size == 1):
        op = functools.partial(op, leader=shared.leader, shared=shared.until)

    def local(q_BTNH, k_BSKH, v_BSKH, k_scale, v_scale, sinks, until_BT, since_BT):
        k, v, k_scale, v_scale = (
            None if x is None else x[None] for x in (k_BSKH, v_BSKH, k_scale, v_scale)
        )
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        return op(q_BTNH, k, v, 0, until_BT, since_BT, sinks=sinks, **scales)

    inputs = (q_BTNH, k_BSKH, v_BSKH, k_scale, v_scale, sinks, until_BT, since_BT)
    if mesh.empty or mesh.size == 1:
        return local(*inputs)
    names = ("rows", None, "act_heads", None)
    q_spec, k_spec = (partition_spec(names, x.shape, mesh) for x in (q_BTNH, k_BSKH))
    if q_spec[2] != k_spec[2]:  # heads that do not divide: every device takes all of them
        q_spec, k_spec = PartitionSpec(q_spec[0]), PartitionSpec(k_spec[0])
    row = PartitionSpec(q_spec[0], None)
    of_scale = PartitionSpec(*k_spec[:3])
    specs = (q_spec, k_spec, k_spec, of_scale, of_scale, heads_of(q_spec), row, row)
    return jax.shard_map(local, in_specs=specs, out_specs=q_spec, check_vma=False)(*inputs)


def rotate_shards(
    x_BTNH: jax.Array, angles: Angles, scale: jax.Array | None, eps: float
) -> jax.Array | None:
    """`jaxtrain_kernels.rotate_heads` of heads that lie on several Hopper GPUs, placed as x; scale
    [H] or None. None on one device, where the op reads what heads are cut from, and on others,
    where the partitioner knows as much."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or not on_hopper():
        return None
    spec = partition_spec(("rows", "length", "act_heads", None), x_BTNH.shape, mesh)

    def local(x_BTNH, cos, sin, scale):
        flat_BTF, (*_, N, H) = x_BTNH.reshape(*x_BTNH.shape[:2], -1), x_BTNH.shape
        scales = None if scale is None else [scale]
        return rotate_heads(flat_BTF, cos, sin, (N,), H, scales, eps=eps)[0]

    by_token = PartitionSpec(*spec[:2])
    return jax.shard_map(
        local, in_specs=(spec, by_token, by_token, PartitionSpec()), out_specs=spec, check_vma=False
    )(x_BTNH, *angles, scale)


def heads_of(q_spec: PartitionSpec) -> PartitionSpec:
    """Return the spec of an array [N] from that of [B, T, N, H] (or shorter: heads are not
    split)."""
    return PartitionSpec(*q_spec[2:3])


def share_heads(x_BSKH: jax.Array, num_heads: int, mesh) -> jax.Array:
    """Key heads repeated where the tensor axis has more devices than there are, so that each
    device gets the one head that its queries read."""
    ways, K = count_ways(mesh_axes("act_heads", mesh), mesh), x_BSKH.shape[2]
    if K < ways and ways % K == 0 and num_heads % ways == 0:
        return jnp.repeat(x_BSKH, ways // K, axis=2)
    return x_BSKH


def zigzag(run: Callable, q_BTNH: jax.Array, positions_BT: jax.Array, axis: str, n: int):
    """`run(q, positions, first query's index)` on an early and a late chunk of the row.

    Everything here is local to a device of the mesh axis `axis` of n devices; a length of odd
    chunks is run where it lies.
    """
    device = jax.lax.axis_index(axis)
    T = q_BTNH.shape[1]
    if T % 2:
        return run(q_BTNH, positions_BT, device * T)
    half = T // 2
    routes = [[(i, home(2 * i + odd, n)) for i in range(n)] for odd in (0, 1)]
    outs = []
    for odd, route in enumerate(routes):
        q, positions = (
            jax.lax.ppermute(x[:, odd * half : (odd + 1) * half], axis, route)
            for x in (q_BTNH, positions_BT)
        )
        # Of the chunks here and 2n - 1 - here, the one with that parity.
        chunk = jnp.where(device % 2 == odd, device, 2 * n - 1 - device)
        out = run(q, positions, chunk * half)
        outs.append(jax.lax.ppermute(out, axis, [(target, i) for i, target in route]))
    return jnp.concatenate(outs, axis=1)


def home(chunk: int, n: int) -> int:
    """The device that attends chunk `chunk` of 2n."""
    return chunk if chunk < n else 2 * n - 1 - chunk
