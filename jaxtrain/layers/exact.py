"""Exact: passes whose numbers do not depend on what else is computed beside a token.

Training and sampling are different programs: other batches, other packing, keys in a row or in a
cache. Sums of floats depend on the order in which a program adds, so the two differ in the last
bits. Here both run the same small programs, so that the log-prob that the sampler hands out is the
one that training computes, bit for bit:

    tokens of a batch ── tiles of ROWS tokens ──> norm, projections, rotation ─┐ q, k, v
    queries of a path ── tiles of QUERIES, blocks of KEYS by position ─────────┤ heads' outputs
    tokens of a batch ── tiles of ROWS tokens ──> projection, norm, MLP <──────┘

A tile has a fixed shape and is the body of a loop whose length XLA does not know, so that nothing
is fused across its border: one body is compiled alike wherever it is. A block of keys that a query
does not see adds exact zeros, and keys are taken by position along the query's own path, so that a
branch of a tree computes what its path alone would.

Only forward passes are so. Gradients are those of the usual programs at the same values, as fast as
without.
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

ROWS = 32
"""Tokens of a tile."""
QUERIES = 8
"""Queries of a tile of attention, of one path."""
KEYS = 64
"""Keys of a block, neighbors on a path; the first has a multiple of it as its position."""


@dataclasses.dataclass(frozen=True)
class ExactOps:
    """Operations of a model whose passes are exact (`DecoderOptions.exact`)."""

    def attach(self, model: Any) -> None:
        """Have the model run with these operations, in place."""
        model.exact = model.stack.exact = self
        for _, node in nnx.iter_graph(model.stack):
            if isinstance(node, Attention):
                # Blocks of keys begin at multiples of KEYS, which slots of a ring do not stay at.
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

        inputs, aux: pytrees of arrays [B, T, ...], of which fn gets [1, ROWS, ...]; aux has no
        gradients. pin(outputs, aux) -> the aux of the backward pass.
        """

        @jax.custom_vjp
        def run(params, inputs, aux):
            return _run_tiles(fn, params, inputs, aux)

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
        options = AttendOptions(inputs.spec.window, **score)
        if rounded.after is not None:
            assert isinstance(rounded.after, KV), "the config refuses other storage"
            tiles = tile_new(context.positions, inputs.decoding.end - inputs.decoding.start)
            return attend_tiles(options, q_BTNH, *rounded.after, sinks, tiles, None)

        @jax.custom_vjp
        def run(q_BTNH, k_BTKH, v_BTKH, sinks, context):
            tiles = tile_paths(context)
            return attend_tiles(options, q_BTNH, k_BTKH, v_BTKH, sinks, tiles, context)

        def forward(*arrays):
            return run(*arrays), arrays

        def backward(residuals, d_out):
            *arrays, context = residuals

            def usual(q_BTNH, k_BTKH, v_BTKH, sinks):
                how = {**options._asdict(), "impl": attention.impl, "sinks": sinks}
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
        elif spec.exports or spec.imports or block.attention.imports:
            reasons["attention that shares keys and values between layers"] = None
        elif type(block.mlp).__name__ == "ParallelMLP" or block.per_layer is not None:
            reasons["layers with inputs of their own or experts beside an MLP"] = None
    return list(reasons)


def _run_tiles(fn: Callable[..., Any], params: Any, inputs: Any, aux: Any) -> Any:
    """Return fn's outputs [B, T, ...], computed in tiles [1, ROWS, ...]."""
    arrays = (inputs, aux)
    first = jax.tree.leaves(arrays)[0]
    B, T = first.shape[:2]
    tiles = -(-B * T // ROWS)

    def split(x: jax.Array) -> jax.Array:
        flat = x.reshape(B * T, *x.shape[2:])
        padding = [(0, tiles * ROWS - B * T), *[(0, 0)] * (flat.ndim - 1)]
        return jnp.pad(flat, padding).reshape(tiles, 1, ROWS, *x.shape[2:])

    tiled = jax.tree.map(split, arrays)
    of_tile = jax.eval_shape(
        lambda params, tiled: fn(params, *jax.tree.map(lambda x: x[0], tiled)), params, tiled
    )
    empty = jax.tree.map(lambda x: jnp.zeros((tiles, *x.shape), x.dtype), of_tile)
    # XLA does not see that this adds 0. A loop of known length may be unrolled, and then fused
    # with what is around it.
    count = tiles + hidden_zero(first)

    def body(index, outputs):
        tile = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tiled)
        new = fn(params, *tile)
        return jax.tree.map(
            lambda all_, x: jax.lax.dynamic_update_index_in_dim(all_, x, index, 0), outputs, new
        )

    outputs = jax.lax.fori_loop(0, count, body, empty)
    return jax.tree.map(
        lambda x: x.reshape(tiles * ROWS, *x.shape[3:])[: B * T].reshape(B, T, *x.shape[3:]),
        outputs,
    )


def hidden_zero(x: jax.Array) -> jax.Array:
    """Return int32 0, computed from an element of x."""
    element = x.reshape(-1)[0]
    if jnp.issubdtype(element.dtype, jnp.floating):
        return (element > jnp.inf).astype(jnp.int32)
    return (element == jnp.iinfo(element.dtype).min).astype(jnp.int32)


class AttendOptions(NamedTuple):
    """Static parameters of attention."""

    window: int | None
    softcap: float | None
    scale: float | None


class QueryTiles(NamedTuple):
    """Tiles of up to QUERIES consecutive queries, each a token and its successors on a path."""

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


def tile_paths(context: Context) -> QueryTiles:
    """Cut packed rows, wherever the next token is not the child of the one before."""
    B, T = context.prev.shape
    index_T = jnp.arange(T, dtype=jnp.int32)
    begins_BT = (context.prev != index_T - 1) | (index_T == 0)
    offset_BT = index_T - jax.lax.cummax(jnp.where(begins_BT, index_T, 0), axis=1)
    next_BT = jnp.pad(jnp.where(begins_BT, index_T, T)[:, 1:], ((0, 0), (0, 1)), constant_values=T)
    left_BT = jax.lax.cummin(next_BT, axis=1, reverse=True) - index_T
    count_BT = jnp.minimum(QUERIES, left_BT)
    return QueryTiles.collect(offset_BT % QUERIES == 0, count_BT, context.positions, B * T)


def tile_new(positions_BT: jax.Array, count_B: jax.Array) -> QueryTiles:
    """Cut the first `count` of each row's T new tokens."""
    B, T = positions_BT.shape
    index_T = jnp.arange(T, dtype=jnp.int32)
    left_BT = count_B[:, None] - index_T
    is_start_BT = (index_T % QUERIES == 0) & (left_BT > 0)
    most = B * -(-T // QUERIES)
    return QueryTiles.collect(is_start_BT, jnp.minimum(QUERIES, left_BT), positions_BT, most)


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
    see; None: the slots of a cache, whose position is their index.
    """
    (B, T, N, H), (S, K) = q_BTNH.shape, k_BSKH.shape[1:3]
    G, wide = N // K, accumulator(q_BTNH.dtype)
    scale = H**-0.5 if options.scale is None else options.scale
    query_Q, key_C = jnp.arange(QUERIES, dtype=jnp.int32), jnp.arange(KEYS, dtype=jnp.int32)
    slot_S = jnp.arange(S, dtype=jnp.int32)
    padding = -S % KEYS

    def by_head(x_QNH: jax.Array) -> jax.Array:
        x_QKGH = x_QNH.reshape(QUERIES, K, G, -1)
        return x_QKGH.transpose(1, 2, 0, 3).reshape(K, G * QUERIES, -1)

    def find_slots(row: jax.Array, last: jax.Array) -> jax.Array:
        """Return the slot of each position of the path that ends with the query `last`."""
        if context is None:
            return jnp.pad(slot_S, (0, padding), constant_values=S - 1)
        seen_S = (slot_S <= last) & (last < context.until[row])
        place_S = jnp.where(seen_S, context.positions[row], S + padding)
        return jnp.zeros(S + padding, jnp.int32).at[place_S].set(slot_S, mode="drop")

    def one_tile(index, out_BTNH):
        row, start, position, count = (x[index] for x in tiles[:4])
        at_Q = start + query_Q
        q_KMH = by_head(q_BTNH[row, jnp.minimum(at_Q, T - 1)]).astype(wide)
        place_M = jnp.tile(position + query_Q, G)
        slots = find_slots(row, start + count - 1)

        def one_block(block, carry):
            top_KM, total_KM, sum_KMH = carry
            at_C = jax.lax.dynamic_slice_in_dim(slots, block * KEYS, KEYS)
            k_CKH, v_CKH = (x[row, at_C].astype(wide) for x in (k_BSKH, v_BSKH))
            z_KMC = jnp.einsum("kmh,ckh->kmc", q_KMH, k_CKH, precision="highest") * scale
            if options.softcap is not None:
                z_KMC = options.softcap * jnp.tanh(z_KMC / options.softcap)
            place_C = block * KEYS + key_C
            seen_MC = place_C <= place_M[:, None]
            if options.window is not None:
                seen_MC &= place_C > place_M[:, None] - options.window
            z_KMC = jnp.where(seen_MC, z_KMC, -jnp.inf)
            new_KM = jnp.maximum(top_KM, z_KMC.max(-1))
            # A query that has seen nothing yet: exp(-inf - 0) is 0.
            safe_KM = jnp.where(new_KM == -jnp.inf, 0.0, new_KM)
            weight_KMC = jnp.exp(z_KMC - safe_KM[..., None])
            decay_KM = jnp.exp(top_KM - safe_KM)
            added_KMH = jnp.einsum("kmc,ckh->kmh", weight_KMC, v_CKH, precision="highest")
            return (
                new_KM,
                total_KM * decay_KM + weight_KMC.sum(-1),
                sum_KMH * decay_KM[..., None] + added_KMH,
            )

        first = 0
        if options.window is not None:
            first = jnp.maximum(position - options.window + 1, 0) // KEYS
        M = G * QUERIES
        carry = (
            jnp.full((K, M), -jnp.inf, wide),
            jnp.zeros((K, M), wide),
            jnp.zeros((K, M, v_BSKH.shape[-1]), wide),
        )
        stop = (position + count - 1) // KEYS + 1
        top_KM, total_KM, sum_KMH = jax.lax.fori_loop(first, stop, one_block, carry)
        if sinks_N is not None:
            sink_KM = jnp.repeat(sinks_N.astype(wide).reshape(K, G), QUERIES, axis=1)
            total_KM = total_KM + jnp.exp(sink_KM - top_KM)
        # Rows of the tile without a query have seen no key, perhaps.
        total_KM = jnp.where(total_KM == 0, 1.0, total_KM)
        out_KGQH = (sum_KMH / total_KM[..., None]).reshape(K, G, QUERIES, -1)
        out_QNH = out_KGQH.transpose(2, 0, 1, 3).reshape(QUERIES, N, -1).astype(q_BTNH.dtype)
        at_Q = jnp.where(query_Q < count, at_Q, T)
        return out_BTNH.at[row, at_Q].set(out_QNH, mode="drop")

    empty_BTNH = jnp.zeros((B, T, N, v_BSKH.shape[-1]), q_BTNH.dtype)
    return jax.lax.fori_loop(0, tiles.total, one_tile, empty_BTNH)
