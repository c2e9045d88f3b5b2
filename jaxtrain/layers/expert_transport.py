"""Transport of tokens to the experts of other devices and back: static buffers, no dropped token.

gather    every device of a group gets all tokens of the group, computes what its experts add to
          them, and the shares are summed where the tokens came from: all-gather, reduce-scatter
exchange  each token goes once to every device that owns one of its experts, in buckets of equal
          size, and the partial sums come back: two all-to-alls

Buffers hold a little more than an even load. What does not fit waits for another round, in a loop
whose length depends on the routing: overflow costs time, never a token. A token's choices on one
device go through in one round, so its result does not depend on the number of rounds. Both are a
custom_vjp around transport and experts: such loops have no gradient of their own, and what the
backward pass keeps are the local inputs only; it moves the tokens again, and computes the experts
again.

Shapes: T local tokens, N tokens that a device gets, D model, E experts in all, k experts a token,
n devices of a group, C places of a bucket. Everything here runs inside of a shard_map.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtrain_kernels.precision import accumulator

EXCHANGE_BELOW = 0.6
"""Share of the gather's bytes under which "auto" exchanges; an estimate, not measured."""


class Transport(NamedTuple):
    """Options of the transport; they change results only by the order of sums."""

    kind: str = "auto"
    """auto | gather | exchange; auto: the one that sends fewer bytes, by a margin."""
    buffer: float = 1.25
    """Rows of the buffers, as a multiple of an even load."""
    chunks: int = 1
    """Pieces of the local tokens, sent and computed one after the other."""
    wide_sums: bool = False
    """Sum the devices' shares in a fixed order and at least float32, rounded once: all-to-all and a
    local sum in the place of the reduce-scatter."""


class ExpertGroup(NamedTuple):
    """Devices that share the work of their tokens."""

    owners: tuple[str, ...]
    """Mesh axes that the experts are cut over."""
    shared: tuple[str, ...]
    """Mesh axes of the group that its tokens are cut over."""
    num_experts: int
    """E."""
    exchanged: bool
    """Exchange tokens over the owners instead of gathering them."""


class TransportPlan(NamedTuple):
    """Static parameters of a transport; hashable."""

    compute: Callable
    """(x [N, D], ids [N, k], gates [N, k], trained, fixed, rows) -> [N, D]: what the local experts
    add; ids that are none of theirs add nothing, and at most `rows` choices are theirs."""
    owners: tuple[str, ...]
    shared: tuple[str, ...]
    """As in `ExpertGroup`."""
    num_local: int
    """Experts of a device."""
    rows: int | None
    """Choices that a round has room for; None: enough for all possible ones."""
    bucket: int | None
    """C; None: tokens are gathered."""
    wide_sums: bool

    def first(self) -> jax.Array:
        """The first local expert."""
        return lax.axis_index(self.owners) * self.num_local


def share_of_devices(num_experts: int, top: int, n: int) -> float:
    """Probability that a token has an expert on a given one of n devices, at even routing."""
    remote_experts = num_experts - num_experts // n
    return 1 - math.comb(remote_experts, top) / math.comb(num_experts, top)


def exchanges(options: Transport, num_experts: int, top: int, n: int) -> bool:
    """Return True if tokens are exchanged rather than gathered."""
    if n == 1:
        return False
    if options.kind == "auto":
        return options.buffer * share_of_devices(num_experts, top, n) < EXCHANGE_BELOW
    return options.kind == "exchange"


def send_through(
    options: Transport, group: ExpertGroup, compute: Callable, x, ids, gates, trained, fixed
) -> tuple[jax.Array, jax.Array]:
    """Return ([T, D] sums over each token's experts, wherever in the group they are; float32 []
    rounds that the slowest device needed, mean over chunks).

    x [T, D]; ids int32 [T, k] of E, a negative one goes nowhere; gates [T, k]; trained and fixed:
    pytrees of the local experts, see `TransportPlan.compute`. Gradients to x, gates and trained.
    """
    T, chunks = len(x), max(1, min(options.chunks, len(x)))
    sizes = [T * (c + 1) // chunks - T * c // chunks for c in range(chunks)]
    ys, rounds = [], []
    for chunk in zip(*(lax.split(a, sizes) for a in (x, ids, gates)), strict=True):
        plan = _plan(options, group, compute, *chunk[1].shape)
        run = _gather if plan.bucket is None else _exchange
        ys.append(run(plan, *chunk, trained, fixed))
        rounds.append(count_rounds(plan, chunk[1]))
    return jnp.concatenate(ys), sum(rounds) / chunks


def _plan(
    options: Transport, group: ExpertGroup, compute: Callable, T: int, k: int
) -> TransportPlan:
    owners, shared, num_experts, exchanged = group
    n, ways = lax.axis_size(owners), lax.axis_size(shared) if shared else 1
    most, bucket = T * ways * k, None
    if exchanged:
        even = T * share_of_devices(num_experts, k, n)
        bucket = min(T, _room_for(even, options.buffer))
        most = bucket * n * k
    rows = max(k, _room_for(T * ways * k / n, options.buffer))
    return TransportPlan(
        compute,
        owners,
        shared,
        num_experts // n,
        None if rows >= most else rows,
        bucket,
        options.wide_sums,
    )


def _room_for(even: float, buffer: float) -> int:
    """Buffer size if even routing fills `even` places on average. Small counts vary relatively
    more: four standard deviations are added."""
    return math.ceil(buffer * even + 4 * math.sqrt(even))


def count_rounds(plan: TransportPlan, ids: jax.Array) -> jax.Array:
    """float32 []: rounds that the slowest device of the group needs for these local tokens."""
    n = lax.axis_size(plan.owners)
    owner = jnp.where(ids >= 0, ids // plan.num_local, n)
    counts_n = jnp.zeros((n,), jnp.int32).at[owner.reshape(-1)].add(1, mode="drop")
    rounds = jnp.int32(1)
    if plan.rows is not None:
        total_n = lax.psum(counts_n, plan.shared) if plan.shared else counts_n
        room = plan.rows - ids.shape[1] + 1
        rounds = jnp.maximum(rounds, -(-total_n.max() // room))
    if plan.bucket is not None:
        rounds = jnp.maximum(rounds, find_buckets(plan, ids).rounds)
    return rounds.astype(jnp.float32)


# Computation on the tokens that a device received.


def _local(plan: TransportPlan, x, ids, gates, trained, fixed):
    def run_round(ids):
        return plan.compute(x, ids, gates, trained, fixed, plan.rows)

    return _in_rounds(plan, ids, run_round)


def _local_pull(plan: TransportPlan, x, ids, gates, trained, fixed, dy):
    """Gradients of x, gates and trained."""

    def run_round(ids):
        def run(x, gates, trained):
            return plan.compute(x, ids, gates, trained, fixed, plan.rows)

        return jax.vjp(run, x, gates, trained)[1](dy)

    return _in_rounds(plan, ids, run_round)


def _in_rounds(plan: TransportPlan, ids, run_round: Callable):
    """The sum of one(ids of a round), over as many rounds as this device needs."""
    if plan.rows is None:
        return run_round(ids)
    # Jitted, so that it is lowered once although it is called before and inside of the loop.
    run_round = jax.jit(run_round)  # lowered once
    local_counts = ((ids >= 0) & (ids < plan.num_local)).sum(1, dtype=jnp.int32)
    before = jnp.cumsum(local_counts, dtype=jnp.int32) - local_counts
    room = plan.rows - ids.shape[1] + 1
    turn = (before // room)[:, None]
    rounds = (before[-1] + local_counts[-1] + room - 1) // room
    return _repeat(rounds, lambda r: run_round(jnp.where(turn == r, ids, -1)))


def _repeat(rounds, run_round: Callable):
    """one(0) + one(1) + ...; the first is always run."""

    def body(carry):
        r, total = carry
        return r + 1, jax.tree.map(jnp.add, total, run_round(r))

    # Before the loop: its result has the shapes and dtypes that the carry needs.
    start = (jnp.int32(1), run_round(jnp.int32(0)))
    return lax.while_loop(lambda carry: carry[0] < rounds, body, start)[1]


# Gather.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(plan: TransportPlan, x, ids, gates, trained, fixed):
    x, ids, gates = _all(plan, (x, ids, gates))
    y = _local(plan, x, ids - plan.first(), gates, trained, fixed)
    return _sum_shares(plan, y)


def _gather_fwd(plan, *arrays):
    return _gather(plan, *arrays), arrays


def _gather_bwd(plan, arrays, dy):
    x, ids, gates, trained, fixed = arrays
    # Gathered again, so that no gathered array is kept between the passes.
    x, ids, gates, dy = _all(plan, (x, ids, gates, dy))
    ids = ids - plan.first()
    dx, dgates, dtrained = _local_pull(plan, x, ids, gates, trained, fixed, dy)
    return _sum_shares(plan, dx), None, _sum_shares(plan, dgates), dtrained, None


_gather.defvjp(_gather_fwd, _gather_bwd)


def _all(plan: TransportPlan, arrays):
    """Arrays [T, ...] of the group's devices, one behind the other."""
    if not plan.shared:
        return arrays
    return jax.tree.map(lambda a: lax.all_gather(a, plan.shared, axis=0, tiled=True), arrays)


def _sum_shares(plan: TransportPlan, y):
    """[T, ...] the sum over the group of its devices' y [N, ...], each device its own tokens."""
    if not plan.shared:
        return y
    if not plan.wide_sums:
        return lax.psum_scatter(y, plan.shared, scatter_dimension=0, tiled=True)
    shares = lax.all_to_all(y, plan.shared, 0, 0, tiled=True)
    shares = shares.reshape(lax.axis_size(plan.shared), -1, *y.shape[1:])
    # A sum over a fixed axis: the same order on every device, and one rounding at the end.
    return shares.astype(accumulator(y.dtype)).sum(0).astype(y.dtype)


# Exchange.


class Buckets(NamedTuple):
    """Which tokens go to which device."""

    token: jax.Array
    """int32 [n, whole rounds of C] tokens for each device; T where there is none."""
    slot: jax.Array
    """int32 [T, n] index of each token among those for a device; -1 where it does not go."""
    rounds: jax.Array
    """int32 []: until the fullest bucket of the group is sent."""


def find_buckets(plan: TransportPlan, ids: jax.Array) -> Buckets:
    """The buckets of local tokens with experts `ids` int32 [T, k] of E."""
    T, n, C = ids.shape[0], lax.axis_size(plan.owners), plan.bucket
    devices = jnp.arange(n, dtype=jnp.int32)
    owner = jnp.where(ids >= 0, ids // plan.num_local, -1)
    goes_Tn = (owner[:, :, None] == devices).any(1)
    slot_Tn = jnp.where(goes_Tn, jnp.cumsum(goes_Tn, 0, dtype=jnp.int32) - 1, -1)
    size = -(-T // C) * C
    flat_slot = jnp.where(goes_Tn, devices * size + slot_Tn, n * size)
    tokens = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[:, None], flat_slot.shape)
    token = jnp.full((n * size,), T, jnp.int32)
    # Slots are distinct; those of tokens that do not travel are out of range and dropped.
    token = token.at[flat_slot.reshape(-1)].set(tokens.reshape(-1), mode="drop").reshape(n, size)
    fullest = goes_Tn.sum(0, dtype=jnp.int32).max()
    return Buckets(token, slot_Tn, lax.pmax(-(-fullest // C), plan.owners))


def _send(plan: TransportPlan, buckets: Buckets, r, array, fill=0):
    """Return [n, C, ...]: the rows of `array` that the other devices send to this one in round
    r."""
    C = plan.bucket
    token = lax.dynamic_slice_in_dim(buckets.token, r * C, C, 1)
    packed = array.at[token].get(mode="fill", fill_value=fill)
    return lax.all_to_all(packed, plan.owners, 0, 0, tiled=True)


def _return(plan: TransportPlan, buckets: Buckets, r, array):
    """Return [T, ...] sums over devices of their results [n, C, ...] for round r's tokens."""
    n, C = array.shape[:2]
    back = lax.all_to_all(array, plan.owners, 0, 0, tiled=True).reshape(n * C, *array.shape[2:])
    slot_Tn = buckets.slot - r * C
    sent = (slot_Tn >= 0) & (slot_Tn < C) & (buckets.slot >= 0)
    flat_slot = jnp.where(sent, jnp.arange(n, dtype=jnp.int32) * C + slot_Tn, n * C)
    partial_sums = back.at[flat_slot].get(mode="fill", fill_value=0)
    # A device has already summed a token's experts; at most n partial sums per token come back.
    return partial_sums.astype(accumulator(array.dtype)).sum(1).astype(array.dtype)


def _flat(array):
    return array.reshape(-1, *array.shape[2:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange(plan: TransportPlan, x, ids, gates, trained, fixed):
    buckets = find_buckets(plan, ids)

    def run_round(r):
        far = (_send(plan, buckets, r, a, fill) for a, fill in ((x, 0), (ids, -1), (gates, 0)))
        far_x, far_ids, far_gates = map(_flat, far)
        y = _local(plan, far_x, far_ids - plan.first(), far_gates, trained, fixed)
        return _return(plan, buckets, r, y.reshape(-1, plan.bucket, y.shape[1]))

    return _all_rounds(plan, buckets, x, run_round)


def _exchange_fwd(plan, *arrays):
    return _exchange(plan, *arrays), arrays


def _exchange_bwd(plan, arrays, dy):
    x, ids, gates, trained, fixed = arrays
    buckets = find_buckets(plan, ids)

    def run_round(r):
        sent = ((x, 0), (ids, -1), (gates, 0), (dy, 0))
        far = (_send(plan, buckets, r, array, fill) for array, fill in sent)
        far_x, far_ids, far_gates, far_dy = map(_flat, far)
        far_ids = far_ids - plan.first()
        pulled = _local_pull(plan, far_x, far_ids, far_gates, trained, fixed, far_dy)
        *back, dtrained = pulled
        back = (a.reshape(-1, plan.bucket, a.shape[1]) for a in back)
        return *(_return(plan, buckets, r, a) for a in back), dtrained

    dx, dgates, dtrained = _all_rounds(plan, buckets, x, run_round)
    return dx, None, dgates, dtrained, None


_exchange.defvjp(_exchange_fwd, _exchange_bwd)


def _all_rounds(plan: TransportPlan, buckets: Buckets, x, run_round: Callable):
    if plan.bucket >= x.shape[0]:
        return run_round(jnp.int32(0))
    return _repeat(buckets.rounds, jax.jit(run_round))
