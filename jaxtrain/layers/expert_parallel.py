"""The shard_map around the experts' kernels: who computes what of a mixture of experts.

A device computes what its experts (mesh axis of "experts") and its columns of them ("mlp") add for
all tokens of its rows, and the shares are summed.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtrain_kernels import Adapters, Biases, Clamped, moe_ffn

from jaxtrain.layers.linear import kernel_specs
from jaxtrain.layers.router import Choice
from jaxtrain.parallel.rules import partition_spec

AXES = {
    "gate": (("experts", None, "mlp"), ("experts", None, None), ("experts", None, "mlp")),
    "up": (("experts", None, "mlp"), ("experts", None, None), ("experts", None, "mlp")),
    "down": (("experts", "mlp", None), ("experts", "mlp", None), ("experts", None, None)),
}
"""Inside the shard_map: kernel, and the two factors of its adapter. Whole in the model dim. A bias
lies as the outer dims of its kernel do."""


def through_experts(
    x_BTD: jax.Array,
    choice: Choice,
    experts: nnx.Module,
    *,
    activation: str | Clamped,
    impl: str,
) -> jax.Array:
    """sum over k of gate_k * expert_k(x), each device on its tokens, its experts, its columns.

    x [B, T, D]; experts: a module whose matrices are called as in AXES, each an ExpertLinear.
    """
    kernels, factors, biases = {}, {}, {}
    matrices = {name: getattr(experts, name) for name in AXES if hasattr(experts, name)}
    for name, matrix in matrices.items():
        kernels[name], factors[name] = matrix.weights()
        biases[name] = None if matrix.bias is None else matrix.bias[...]
    frozen = any(pair is not None for pair in factors.values())
    op = functools.partial(moe_ffn, activation=activation, freeze_experts=frozen, impl=impl)

    def compute(x_BTD, experts_BTK, gates_BTK, kernels, factors, biases):
        D, k = x_BTD.shape[-1], experts_BTK.shape[-1]
        y = op(
            x_BTD.reshape(-1, D),
            experts_BTK.reshape(-1, k),
            gates_BTK.reshape(-1, k),
            *(kernels.get(name) for name in AXES),
            adapters=Adapters(**factors),
            biases=Biases(**biases),
        )
        return y.reshape(x_BTD.shape)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return compute(x_BTD, choice.experts, choice.gates, kernels, factors, biases)
    place = functools.partial(partition_spec, mesh=mesh)
    specs = {name: kernel_specs(kernel, AXES[name][0], place) for name, kernel in kernels.items()}
    factor_specs = {
        name: pair and tuple(place(a, p.shape) for a, p in zip(AXES[name][1:], pair, strict=True))
        for name, pair in factors.items()
    }
    bias_specs = {
        name: None if bias is None else place(AXES[name][0][::2], bias.shape)
        for name, bias in biases.items()
    }
    owners, _, columns = place(AXES["up"][0], kernels["up"].shape)
    shares = (*_axes(owners), *_axes(columns))
    # Devices that share the work of the same tokens all hold these tokens.
    rows, length, _ = place(("rows", "length", None), x_BTD.shape)
    x_spec = PartitionSpec(
        *(tuple(axis for axis in _axes(dim) if axis not in shares) for dim in (rows, length))
    )

    def local(x_BTD, experts_BTK, gates_BTK, kernels, factors, biases):
        if owners is not None:  # the others' experts get numbers that no local expert has
            first = jax.lax.axis_index(owners) * kernels["up"].shape[0]
            experts_BTK = experts_BTK - first
        if columns is not None and biases["down"] is not None:  # one of those that share adds it
            first = jax.lax.axis_index(columns) == 0
            biases = {**biases, "down": jnp.where(first, biases["down"], 0)}
        y_BTD = compute(x_BTD, experts_BTK, gates_BTK, kernels, factors, biases)
        return jax.lax.psum(y_BTD, shares) if shares else y_BTD

    return jax.shard_map(
        local,
        in_specs=(x_spec, x_spec, x_spec, specs, factor_specs, bias_specs),
        out_specs=x_spec,
        check_vma=False,
    )(x_BTD, choice.experts, choice.gates, kernels, factors, biases)


def _axes(dim: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of one dim of a PartitionSpec."""
    return (dim,) if isinstance(dim, str) else tuple(dim or ())
