"""Exact: passes whose numbers do not depend on what else is computed beside a token.

Training and sampling are different programs: other batches, other packing, keys in a row or in a
cache. Sums of floats depend on the order in which a program adds, so the two differ in the last
bits. Here both run the same small programs, so that the log-prob that the sampler hands out is the
one that training computes, bit for bit:

    tokens of a batch ── tiles of `rows` tokens ──> norm, projections, rotation ─┐ q, k, v
    queries of a path ── tiles of `queries`, blocks of `keys` by position ───────┤ heads' outputs
    tokens of a batch ── tiles of `rows` tokens ──> projection, norm, MLP <──────┘

A tile has a fixed shape, and nothing is fused across its border, so that it is compiled alike
wherever it is. On a CPU the border is that of a loop whose length XLA does not know, as XLA:CPU
drops barriers before it fuses; on a GPU, where such a loop waits for the host every turn, it is a
barrier. A block of keys that a query does not see adds exact zeros, and keys are taken by position
along the query's own path, so that a branch of a tree computes what its path alone would.

Only forward passes are exact. Gradients are those of the usual programs at the same values, as fast
as without.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtrain_kernels import Context, LogProbs, logp_gather
from jaxtrain_kernels.precision import accumulator

from jaxtrain.layers.attention import Attention
from jaxtrain.layers.block import Block
from jaxtrain.layers.kv_cache import KV, RoundedKV, add_to_cache
from jaxtrain.layers.mixer import LayerInputs, State
from jaxtrain.layers.moe import MoE
from jaxtrain.layers.rope import Angles, angles
from jaxtrain.layers.router import ExpertChoice
from jaxtrain.layers.router_notes import note_choice
from jaxtrain.layers.sharded_attention import attend


class TileSizes(NamedTuple):
    """Sizes of what is computed at a time. With other sizes the numbers are rounded otherwise."""

    rows: int
    """Tokens of a tile."""
    queries: int
    """Queries of a tile of attention, of one path."""
    keys: int
    """Keys of a block, neighbors on a path; the first has a multiple of it as its position."""
    group: int
    """Tiles of attention side by side."""
    barriers: bool = False
    """Keep borders by barriers instead of loops of hidden length."""


CPU = TileSizes(rows=32, queries=8, keys=64, group=1)
GPU = TileSizes(rows=256, queries=8, keys=256, group=128, barriers=True)
"""Large, as a turn of a loop costs a GPU tens of microseconds, whatever it computes."""


@dataclasses.dataclass(frozen=True)
class ExactOps:
    """Operations of a model whose passes are exact (`DecoderOptions.exact`)."""

    sizes: TileSizes = CPU

    def attach(self, model: Any) -> None:
        """Have the model run with these operations, in place."""
        model.exact = model.stack.exact = self
        for _, node in nnx.iter_graph(model.stack):
            if isinstance(node, Attention):
                # Blocks of keys begin at multiples of their size, which slots of a ring leave.
                node.rings = False

    def tokenwise(
        self,
        fn: Callable[..., Any],
        params: Any,
        inputs: Any,
        aux: Any = None,
        pin: Callable[[Any, Any], Any] | None = None,
    ) -> Any:
        """Return fn(params, inputs, aux), a pytree of arrays [B, T, ...], tile by tile.

        inputs, aux: pytrees of arrays [B, T, ...], of which fn gets [1, rows, ...]; aux has no
        gradients. pin(outputs, aux) -> the aux of the backward pass.
        """

        @jax.custom_vjp
        def run(params, inputs, aux):
            return _run_tiles(self.sizes, fn, params, inputs, aux)

        def forward(params, inputs, aux):
            outputs = run(params, inputs, aux)
            return outputs, (params, inputs, aux if pin is None else pin(outputs, aux))

        def backward(residuals, cotangents):
            params, inputs, aux = residuals
            pull = jax.vjp(lambda params, inputs: fn(params, inputs, aux), params, inputs)[1]
            return *pull(cotangents), None

        run.defvjp(forward, backward)
        return run(params, inputs, aux)

    def module(
        self, fn: Callable[[Any, jax.Array], jax.Array], module: nnx.Module, x_BTD: jax.Array
    ) -> jax.Array:
        """Return fn(module, x_BTD), tile by tile."""
        graphdef, params = nnx.split(module)
        run = lambda params, x_BTD, _: fn(nnx.merge(graphdef, params), x_BTD)  # noqa: E731
        return self.tokenwise(run, params, x_BTD)

    def angles(
        self, positions_BT: jax.Array, frequency: Any, factor: float, dtype: jnp.dtype
    ) -> Angles:
        """Return `rope.angles`, tile by tile."""
        turn = lambda _, __, positions_BT: angles(positions_BT, frequency, factor, dtype)  # noqa: E731
        return self.tokenwise(turn, (), (), positions_BT)

    def block(
        self, block: Block, x_BTD: jax.Array, inputs: LayerInputs, state: State
    ) -> tuple[jax.Array, State, dict[str, jax.Array]]:
        """Return what a Block with plain Attention returns; see `find_inexact_layers`."""
        graphdef, params = nnx.split(block)

        def read(params, x_BTD, aux):
            layer = nnx.merge(graphdef, params)
            return layer.attention.read(layer.read(x_BTD), *aux)

        def write(params, arrays, experts_BTK):
            x_BTD, out_BTNH, gate_BTNH = arrays
            layer, choices = nnx.merge(graphdef, params), []

            def feed(mlp, x_BTD, _):
                if not isinstance(mlp, MoE):
                    return mlp(x_BTD), {}
                y_BTD, choice, _ = mlp.mix(x_BTD, jnp.ones(x_BTD.shape[:2], bool), experts_BTK)
                choices.append(choice)
                return y_BTD, {}

            h_BTD = layer.attention.write(out_BTNH, gate_BTNH)
            read_BTD = layer.read(x_BTD) if layer.parallel else None
            return layer.write(x_BTD, read_BTD, h_BTD, inputs, feed)[0], tuple(choices)

        def pin(outputs, experts_BTK):
            # Another rounding could send a token elsewhere in the backward pass.
            return outputs[1][0].experts if outputs[1] else experts_BTK

        aux = inputs.angles, inputs.context.positions
        q_BTNH, k_BTKH, v_BTKH, gate_BTNH = self.tokenwise(read, params, x_BTD, aux)
        attention: Attention = block.attention
        rounded = add_to_cache(k_BTKH, v_BTKH, inputs, state)
        out_BTNH = self._attend(attention, q_BTNH, rounded, inputs)
        arrays = (x_BTD, out_BTNH, gate_BTNH)
        x_BTD, choices = self.tokenwise(write, params, arrays, inputs.experts, pin)
        noted: dict[str, jax.Array] = {}
        for choice in choices:
            noted = note_choice(ExpertChoice(*choice), inputs.context, inputs.experts)
        return x_BTD, rounded.after, noted

    def logp(
        self,
        head_VD: jax.Array,
        hidden_BTD: jax.Array,
        target_BT: jax.Array,
        temperature: jax.Array | float | None,
        softcap: float | None,
    ) -> LogProbs:
        """Return the fields of `gather_logp`, float32 [B, T]."""
        # A runtime array in the trainer, too: XLA would divide by a constant in another way.
        value = jnp.asarray(1.0 if temperature is None else temperature, jnp.float32)
        temperature_BT = jnp.where(target_BT >= 0, value, 1.0)

        def score(head_VD, hidden_BTD, aux):
            target_BT, temperature_BT = aux
            # The sampler's copy is rounded already. Reductions that read another dtype may add in
            # another order.
            head_VD = keep_border(self.sizes, head_VD.astype(hidden_BTD.dtype))
            fields = logp_gather(
                hidden_BTD.reshape(-1, hidden_BTD.shape[-1]),
                head_VD,
                target_BT.reshape(-1),
                temperature=temperature_BT.reshape(-1),
                softcap=softcap,
            )
            # One array, so that no program drops the fields that it does not read.
            return jnp.stack(fields, axis=-1).reshape(*target_BT.shape, len(fields))

        fields_BTX = self.tokenwise(score, head_VD, hidden_BTD, (target_BT, temperature_BT))
        return LogProbs(*jnp.moveaxis(fields_BTX, -1, 0))

    def _attend(
        self, attention: Attention, q_BTNH: jax.Array, rounded: RoundedKV, inputs: LayerInputs
    ) -> jax.Array:
        """Return the heads' outputs [B, T, N, H]."""
        context, score = inputs.context, attention.score()
        sinks = score.pop("sinks")
        usual_options = {"window": inputs.spec.window, **score}
        options = AttendOptions(self.sizes, **usual_options)
        if rounded.after is not None:
            assert isinstance(rounded.after, KV), "the config refuses other storage"
            count_B = inputs.decoding.end - inputs.decoding.start
            tiles = tile_new(context.positions, count_B, self.sizes.queries)
            return attend_tiles(options, q_BTNH, *rounded.after, sinks, tiles, None)

        @jax.custom_vjp
        def run(q_BTNH, k_BTKH, v_BTKH, sinks, context):
            tiles = tile_paths(context, self.sizes.queries)
            return attend_tiles(options, q_BTNH, k_BTKH, v_BTKH, sinks, tiles, context)

        def forward(*arrays):
            return run(*arrays), arrays

        def backward(residuals, d_out):
            *arrays, context = residuals

            def usual(q_BTNH, k_BTKH, v_BTKH, sinks):
                how = {**usual_options, "impl": attention.impl, "sinks": sinks}
                return attend(q_BTNH, k_BTKH, v_BTKH, context, **how)

            return *jax.vjp(usual, *arrays)[1](d_out), None

        run.defvjp(forward, backward)
        return run(q_BTNH, rounded.k, rounded.v, sinks, context)


def find_inexact_layers(model: Any) -> list[str]:
    """Name the kinds of layers of a model that have no exact form."""
    reasons = {} if getattr(model, "vision", None) is None else {"images": None}
    for spec, block in zip(model.stack.specs, model.stack.blocks(), strict=True):
        if type(block) is not Block:
            reasons[type(block).__name__] = None
        elif type(block.attention) is not Attention:
            reasons[type(block.attention).__name__] = None
        elif spec.chunked:
            reasons["attention in chunks"] = None
        elif spec.exports or spec.imports or block.attention.imports:
            reasons["attention that shares keys and values between layers"] = None
        elif type(block.mlp).__name__ == "ParallelMLP" or block.per_layer is not None:
            reasons["layers with inputs of their own or experts beside an MLP"] = None
    return list(reasons)


def _run_tiles(sizes: TileSizes, fn: Callable[..., Any], params: Any, inputs: Any, aux: Any) -> Any:
    """Return fn's outputs [B, T, ...], computed in tiles [1, rows, ...]."""
    arrays, rows = (inputs, aux), sizes.rows
    first = jax.tree.leaves(arrays)[0]
    B, T = first.shape[:2]
    tiles = -(-B * T // rows)

    def split(x: jax.Array) -> jax.Array:
        flat = x.reshape(B * T, *x.shape[2:])
        padding = [(0, tiles * rows - B * T), *[(0, 0)] * (flat.ndim - 1)]
        return jnp.pad(flat, padding).reshape(tiles, 1, rows, *x.shape[2:])

    tiled = jax.tree.map(split, arrays)
    of_tile = jax.eval_shape(
        lambda params, tiled: fn(params, *jax.tree.map(lambda x: x[0], tiled)), params, tiled
    )
    empty = jax.tree.map(lambda x: jnp.zeros((tiles, *x.shape), x.dtype), of_tile)
    # XLA does not see that this adds 0. A loop of known length may be unrolled, and then fused
    # with what is around it.
    count = tiles if sizes.barriers else tiles + hidden_zero(first)

    def body(index, outputs):
        tile = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tiled)
        new = keep_border(sizes, fn(params, *keep_border(sizes, tile)))
        return jax.tree.map(
            lambda all_, x: jax.lax.dynamic_update_index_in_dim(all_, x, index, 0), outputs, new
        )

    outputs = jax.lax.fori_loop(0, count, body, empty)
    return jax.tree.map(
        lambda x: x.reshape(tiles * rows, *x.shape[3:])[: B * T].reshape(B, T, *x.shape[3:]),
        outputs,
    )


def keep_border(sizes: TileSizes, values: Any) -> Any:
    """Return the values. With barriers XLA does not fuse the operations before with those after."""
    return jax.lax.optimization_barrier(values) if sizes.barriers else values


def hidden_zero(x: jax.Array) -> jax.Array:
    """Return int32 0, computed from an element of x."""
    element = x.reshape(-1)[0]
    if jnp.issubdtype(element.dtype, jnp.floating):
        return (element > jnp.inf).astype(jnp.int32)
    return (element == jnp.iinfo(element.dtype).min).astype(jnp.int32)


class AttendOptions(NamedTuple):
    """Static parameters of attention."""

    sizes: TileSizes
    window: int | None
    softcap: float | None
    scale: float | None


class QueryTiles(NamedTuple):
    """Tiles of consecutive queries, each a token and its successors on a path."""

    row: jax.Array
    """int32 [n], and `start` (index in the row), `position` and `count` likewise."""
    start: jax.Array
    position: jax.Array
    count: jax.Array
    total: jax.Array
    """int32 []: tiles that there are."""

    @classmethod
    def collect(
        cls, is_start_BT: jax.Array, count_BT: jax.Array, positions_BT: jax.Array, most: int
    ) -> "QueryTiles":
        """Collect the tiles that begin where `is_start` is True, at most `most`."""
        T = is_start_BT.shape[1]
        (index,) = jnp.nonzero(is_start_BT.reshape(-1), size=most, fill_value=0)
        index = index.astype(jnp.int32)
        take = lambda x_BT: x_BT.reshape(-1)[index]  # noqa: E731
        total = is_start_BT.sum(dtype=jnp.int32)
        return cls(index // T, index % T, take(positions_BT), take(count_BT), total)


def tile_paths(context: Context, queries: int) -> QueryTiles:
    """Cut packed rows, wherever the next token is not the child of the one before."""
    B, T = context.prev.shape
    index_T = jnp.arange(T, dtype=jnp.int32)
    begins_BT = (context.prev != index_T - 1) | (index_T == 0)
    offset_BT = index_T - jax.lax.cummax(jnp.where(begins_BT, index_T, 0), axis=1)
    next_BT = jnp.pad(jnp.where(begins_BT, index_T, T)[:, 1:], ((0, 0), (0, 1)), constant_values=T)
    left_BT = jax.lax.cummin(next_BT, axis=1, reverse=True) - index_T
    count_BT = jnp.minimum(queries, left_BT)
    return QueryTiles.collect(offset_BT % queries == 0, count_BT, context.positions, B * T)


def tile_new(positions_BT: jax.Array, count_B: jax.Array, queries: int) -> QueryTiles:
    """Cut the first `count` of each row's T new tokens."""
    B, T = positions_BT.shape
    index_T = jnp.arange(T, dtype=jnp.int32)
    left_BT = count_B[:, None] - index_T
    is_start_BT = (index_T % queries == 0) & (left_BT > 0)
    most = B * -(-T // queries)
    return QueryTiles.collect(is_start_BT, jnp.minimum(queries, left_BT), positions_BT, most)


def attend_tiles(
    options: AttendOptions,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    sinks_N: jax.Array | None,
    tiles: QueryTiles,
    context: Context | None,
) -> jax.Array:
    """Return the heads' outputs [B, T, N, H]; 0 for queries of no tile.

    A query sees the keys of its path up to itself: those that the context of packed rows lets it
    see; None: the slots of a cache, whose position is their index. Of tiles side by side (axis X)
    each visits the blocks of all; those that it does not see add exact zeros.
    """
    (B, T, N, H), (S, K) = q_BTNH.shape, k_BSKH.shape[1:3]
    sizes = options.sizes
    Q, C, X = sizes.queries, sizes.keys, sizes.group
    G, wide = N // K, accumulator(q_BTNH.dtype)
    M = G * Q
    scale = H**-0.5 if options.scale is None else options.scale
    query_Q, key_C = jnp.arange(Q, dtype=jnp.int32), jnp.arange(C, dtype=jnp.int32)
    slot_S = jnp.arange(S, dtype=jnp.int32)
    padding = -S % C

    def find_slots(row: jax.Array, last: jax.Array) -> jax.Array:
        """Return the slot of each position of the path that ends with the query `last`."""
        if context is None:
            return jnp.pad(slot_S, (0, padding), constant_values=S - 1)
        seen_S = (slot_S <= last) & (last < context.until[row])
        place_S = jnp.where(seen_S, context.positions[row], S + padding)
        return jnp.zeros(S + padding, jnp.int32).at[place_S].set(slot_S, mode="drop")

    def one_group(group, out_BTNH):
        index_X = group * X + jnp.arange(X, dtype=jnp.int32)
        row_X, start_X, position_X, count_X = (x.at[index_X].get(mode="clip") for x in tiles[:4])
        count_X = jnp.where(index_X < tiles.total, count_X, 0)
        at_XQ = start_X[:, None] + query_Q
        q_XQKGH = q_BTNH[row_X[:, None], jnp.minimum(at_XQ, T - 1)].reshape(X, Q, K, G, H)
        q_XKMH = q_XQKGH.astype(wide).transpose(0, 2, 3, 1, 4).reshape(X, K, M, H)
        place_XM = position_X[:, None] + jnp.tile(query_Q, G)
        slots_XS = jax.vmap(find_slots)(row_X, start_X + count_X - 1)

        def one_block(block, carry):
            top_XKM, total_XKM, sum_XKMH = keep_border(sizes, carry)
            at_XC = jax.lax.dynamic_slice_in_dim(slots_XS, block * C, C, axis=1)
            k_XCKH, v_XCKH = (x[row_X[:, None], at_XC].astype(wide) for x in (k_BSKH, v_BSKH))
            z_XKMC = jnp.einsum("xkmh,xckh->xkmc", q_XKMH, k_XCKH, precision="highest") * scale
            if options.softcap is not None:
                z_XKMC = options.softcap * jnp.tanh(z_XKMC / options.softcap)
            place_C = block * C + key_C
            seen_XMC = place_C <= place_XM[..., None]
            if options.window is not None:
                seen_XMC &= place_C > place_XM[..., None] - options.window
            z_XKMC = jnp.where(seen_XMC[:, None], z_XKMC, -jnp.inf)
            new_XKM = jnp.maximum(top_XKM, z_XKMC.max(-1))
            # A query that has seen nothing yet: exp(-inf - 0) is 0.
            safe_XKM = jnp.where(new_XKM == -jnp.inf, 0.0, new_XKM)
            weight_XKMC = jnp.exp(z_XKMC - safe_XKM[..., None])
            decay_XKM = jnp.exp(top_XKM - safe_XKM)
            added_XKMH = jnp.einsum("xkmc,xckh->xkmh", weight_XKMC, v_XCKH, precision="highest")
            total_XKM = total_XKM * decay_XKM + weight_XKMC.sum(-1)
            sum_XKMH = sum_XKMH * decay_XKM[..., None] + added_XKMH
            return keep_border(sizes, (new_XKM, total_XKM, sum_XKMH))

        real_X = count_X > 0
        first = 0
        if options.window is not None:
            first_X = jnp.maximum(position_X - options.window + 1, 0) // C
            first = jnp.where(real_X, first_X, S).min()
        carry = (
            jnp.full((X, K, M), -jnp.inf, wide),
            jnp.zeros((X, K, M), wide),
            jnp.zeros((X, K, M, v_BSKH.shape[-1]), wide),
        )
        stop = jnp.where(real_X, (position_X + count_X - 1) // C + 1, 0).max()
        if sizes.barriers and S <= C:
            first, stop = 0, 1
        top_XKM, total_XKM, sum_XKMH = jax.lax.fori_loop(first, stop, one_block, carry)
        if sinks_N is not None:
            sink_KM = jnp.repeat(sinks_N.astype(wide).reshape(K, G), Q, axis=1)
            total_XKM = total_XKM + jnp.exp(sink_KM - top_XKM)
        # Rows of a tile without a query have seen no key, perhaps.
        total_XKM = jnp.where(total_XKM == 0, 1.0, total_XKM)
        out_XKGQH = (sum_XKMH / total_XKM[..., None]).reshape(X, K, G, Q, -1)
        out_XQNH = out_XKGQH.transpose(0, 3, 1, 2, 4).reshape(X, Q, N, -1).astype(q_BTNH.dtype)
        at_XQ = jnp.where(query_Q < count_X[:, None], at_XQ, T)
        return out_BTNH.at[row_X[:, None], at_XQ].set(out_XQNH, mode="drop")

    empty_BTNH = jnp.zeros((B, T, N, v_BSKH.shape[-1]), q_BTNH.dtype)
    groups = 1 if sizes.barriers and tiles.row.size <= X else -(-tiles.total // X)
    return jax.lax.fori_loop(0, groups, one_group, empty_BTNH)
