"""The shard_map around the experts' kernels: division of a mixture of experts among devices.

A device computes what its experts (mesh axis of "experts") and its columns of them ("mlp") add to
tokens, and the shares are summed. Where experts are cut, tokens travel to them and back
(`expert_transport`); where they are not, tokens stay.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtrain_kernels import Adapters, Biases, Clamped, moe_ffn

from jaxtrain.distributed.sharding import count_ways, partition_spec
from jaxtrain.layers.expert_transport import ExpertGroup, Transport, exchanges, send_through
from jaxtrain.layers.linear import SpecOf, kernel_specs
from jaxtrain.layers.router import ExpertChoice

AXES = {
    "gate": (("experts", None, "mlp"), ("experts", None, None), ("experts", None, "mlp")),
    "up": (("experts", None, "mlp"), ("experts", None, None), ("experts", None, "mlp")),
    "down": (("experts", "mlp", None), ("experts", "mlp", None), ("experts", None, None)),
}
"""Inside the shard_map: kernel, and the two factors of its adapter. Whole in the model dim. A bias
lies as the outer dims of its kernel do."""


def through_experts(
    x_BTD: jax.Array,
    choice: ExpertChoice,
    experts: nnx.Module,
    travels_BT: jax.Array,
    *,
    activation: str | Clamped,
    impl: str,
    transport: Transport,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return (sum over k of gate_k * expert_k(x), notes of the transport).

    x [B, T, D]; experts: a module whose matrices are called as in AXES, each an ExpertLinear. Where
    experts are cut, tokens that do not travel (`find_travelers`) go to none of them and get 0, and
    "expert_rounds" [B] is noted: the rounds that the slowest device needed of those that shared the
    row's tokens.
    """
    weights, frozen = _read(experts)
    op = functools.partial(moe_ffn, activation=activation, freeze_experts=frozen, impl=impl)

    def compute(x, ids, gates, trained, fixed, rows=None):
        weights = {**trained, **fixed}
        return op(
            x,
            ids,
            gates,
            *(weights["kernels"].get(name) for name in AXES),
            adapters=Adapters(**weights["factors"]),
            biases=Biases(**weights["biases"]),
            capacity=rows,
        )

    tokens = (x_BTD, choice.experts, choice.gates)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return compute(*map(_flat, tokens), weights, {}).reshape(x_BTD.shape), {}
    spec_of = functools.partial(partition_spec, mesh=mesh)
    num_experts, top = weights["kernels"]["up"].shape[0], choice.experts.shape[-1]
    owners, _, columns = map(_axes, spec_of(AXES["up"][0], weights["kernels"]["up"].shape))
    rows, length, _ = map(_axes, spec_of(("rows", "sequence", None), x_BTD.shape))
    exchanged = exchanges(transport, num_experts, top, count_ways(owners, mesh))
    exchanged = exchanged and set(owners) <= set(rows)
    if exchanged or not owners:  # devices that share the columns hold the same tokens
        length = tuple(axis for axis in length if axis not in columns)
    shares = (*owners, *columns)
    shared = tuple(axis for axis in shares if axis in (*rows, *length))
    summed = tuple(axis for axis in shares if axis not in shared)
    group = ExpertGroup(owners, shared, num_experts, exchanged)
    elsewhere = tuple(axis for axis, size in mesh.shape.items() if size > 1 and axis not in rows)

    def local(tokens, travels_BT, weights):
        if columns and (down := weights["biases"].get("down")) is not None:
            # The devices that share an expert's columns sum their results: only one may add the
            # bias.
            down = jnp.where(jax.lax.axis_index(columns) == 0, down, 0)  # one of them adds it
            weights = {**weights, "biases": {**weights["biases"], "down": down}}
        x, ids, gates = map(_flat, tokens)
        notes = {}
        if owners:
            ids = jnp.where(travels_BT.reshape(-1, 1), ids, -1)
            fixed = {"kernels": weights["kernels"]} if frozen else {}
            trained = {name: part for name, part in weights.items() if name not in fixed}
            y, rounds = send_through(transport, group, compute, x, ids, gates, trained, fixed)
            rounds = jax.lax.pmax(rounds, elsewhere) if elsewhere else rounds
            notes["expert_rounds"] = jnp.broadcast_to(rounds, travels_BT.shape[:1])
        else:
            y = compute(x, ids, gates, weights, {})
        y = jax.lax.psum(y, summed) if summed else y
        return y.reshape(tokens[0].shape), notes

    by_token = PartitionSpec(rows, length)
    y_BTD, notes = jax.shard_map(
        local,
        in_specs=(by_token, by_token, _specs(weights, spec_of)),
        out_specs=(by_token, {"expert_rounds": PartitionSpec(rows)} if owners else {}),
        check_vma=False,
    )(tokens, travels_BT, weights)
    return checkpoint_name(y_BTD, "moe_out") if owners else y_BTD, notes


def find_travelers(real_BT: jax.Array) -> jax.Array:
    """Return bool [B, T], False for a row's padding but for its first token, which may be a
    document of one token (see `Context.real`)."""
    return real_BT | jnp.pad(real_BT, ((0, 0), (1, 0)), constant_values=True)[:, :-1]


def _read(experts: nnx.Module) -> tuple[dict[str, dict[str, Any]], bool]:
    """({"kernels", "factors", "biases": {matrix: its own}}, whether the kernels are frozen)."""
    kernels, factors, biases = {}, {}, {}
    matrices = {name: getattr(experts, name) for name in AXES if hasattr(experts, name)}
    for name, matrix in matrices.items():
        kernels[name], factors[name] = matrix.weights()
        biases[name] = None if matrix.bias is None else matrix.bias[...]
    frozen = any(pair is not None for pair in factors.values())
    frozen = frozen or any(hasattr(kernel, "unpack") for kernel in kernels.values())
    return {"kernels": kernels, "factors": factors, "biases": biases}, frozen


def _specs(weights: dict[str, dict[str, Any]], spec_of: SpecOf) -> dict[str, dict[str, Any]]:
    """A PartitionSpec for each leaf of the result of `_read`."""
    kernels, factors, biases = weights["kernels"], weights["factors"], weights["biases"]
    return {
        "kernels": {name: kernel_specs(k, AXES[name][0], spec_of) for name, k in kernels.items()},
        "factors": {
            name: pair
            and tuple(spec_of(a, p.shape) for a, p in zip(AXES[name][1:], pair, strict=True))
            for name, pair in factors.items()
        },
        "biases": {
            name: None if bias is None else spec_of(AXES[name][0][::2], bias.shape)
            for name, bias in biases.items()
        },
    }


def _flat(array: jax.Array) -> jax.Array:
    return array.reshape(-1, array.shape[-1])


def _axes(dim: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of one dim of a PartitionSpec."""
    return (dim,) if isinstance(dim, str) else tuple(dim or ())
