"""MoE: a dropless mixture of experts in place of a dense MLP.

Every token reaches all experts that its router chose, however many others chose them, so a token's
result does not depend on its neighbors and a packed tree equals its branches.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtrain_kernels import Clamped, Context

from jaxtrain.distributed.sharding import constrain
from jaxtrain.layers.expert_parallel import find_travelers, through_experts
from jaxtrain.layers.expert_transport import Transport
from jaxtrain.layers.linear import ExpertLinear, LayerInit, Linear
from jaxtrain.layers.mlp import MLP, GatedMLP
from jaxtrain.layers.router import ExpertChoice, Router
from jaxtrain.layers.router_notes import note_choice


class Experts(nnx.Module):
    """E MLPs, gated or not, of which a token goes through `top`."""

    preset = "mlp"

    def __init__(
        self,
        num_features: int,
        num_hidden: int,
        num_experts: int,
        top: int,
        gated: bool = True,
        use_bias: bool = False,
        *,
        init: LayerInit,
    ):
        linear = functools.partial(ExpertLinear, num_experts, top, use_bias=use_bias, init=init)
        if gated:
            self.gate = linear(num_features, num_hidden, axes=("expert_embed", "mlp"))
        self.up = linear(num_features, num_hidden, axes=("expert_embed", "mlp"))
        self.down = linear(num_hidden, num_features, axes=("mlp", "expert_embed"))


class SharedGate(nnx.Module):
    """[..., D] -> [..., 1]: how much of the shared expert a token gets, in (0, 1)."""

    token_share = 1.0
    """See `Linear.token_share`."""

    def __init__(self, num_features: int, *, init: LayerInit):
        kernel_D1 = init.normal((num_features, 1))
        self.kernel = nnx.Param(kernel_D1, axes=("embed", None))
        self.dtype = jnp.dtype(init.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.sigmoid(x @ self.kernel[...].astype(self.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEOptions:
    """In which published mixtures of experts differ, apart from their sizes and their router."""

    activation: str | Clamped = "silu"
    """Key of jaxtrain_kernels.grouped_matmul.ffn.ACTIVATIONS; Clamped for experts alone."""
    use_bias: bool = False
    """Biases on all matrices of each expert."""
    gated: bool = True
    """Experts, and shared ones, are GatedMLPs."""
    num_latent: int | None = None
    """Dims that experts read and write, between a matrix before all of them and one behind; the
    router and what is shared read x."""
    num_shared: int | None = None
    """F of an MLP that every token goes through as well."""
    gate_shared: bool = False
    """Each token takes its own share of the shared MLP."""
    scale_inputs: bool = False
    """Gates multiply what experts read, not what they compute (Llama 4)."""
    mean_shared: bool = False
    """The result is the mean of what routed and shared experts compute, not their sum (Cohere)."""


class MoE(nnx.Module):
    """[B, T, D] -> [B, T, D] through k of E experts of F each, plus shared ones."""

    preset = "mlp"

    def __init__(
        self,
        router: Router,
        num_features: int,
        num_hidden: int,
        num_experts: int,
        options: MoEOptions,
        *,
        init: LayerInit,
    ):
        self.router = router
        num_latent, gated, activation = options.num_latent, options.gated, options.activation
        width = num_features if num_latent is None else num_latent
        self.experts = Experts(
            width, num_hidden, num_experts, router.routing.top, gated, options.use_bias, init=init
        )
        latent = num_latent is not None
        self.latent_in = (
            Linear(num_features, width, axes=("embed", None), init=init) if latent else None
        )
        self.latent_out = (
            Linear(width, num_features, axes=(None, "embed"), init=init) if latent else None
        )
        make = functools.partial(GatedMLP if gated else MLP, activation=activation, init=init)
        has_shared = options.num_shared is not None
        self.shared = make(num_features, options.num_shared) if has_shared else None
        self.shared_gate = SharedGate(num_features, init=init) if options.gate_shared else None
        self.scale_inputs = options.scale_inputs
        self.mean_shared = has_shared and options.mean_shared
        self.num_experts = num_experts
        self.activation = activation
        self.impl = "auto"  # see `use_transport`
        self.transport = Transport()

    def __call__(
        self,
        x_BTD: jax.Array,
        context: Context,
        replayed_BTK: jax.Array | None = None,
        routed_BTD: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return (result, notes of `note_choice` and `through_experts`).

        replayed_BTK: experts that replace the router's choice; see `choose`.
        routed_BTD: what the router reads, where that is not x.
        """
        y_BTD, choice, notes = self.mix(x_BTD, context.real(), replayed_BTK, routed_BTD)
        return y_BTD, {**note_choice(choice, context, replayed_BTK), **notes}

    def mix(
        self,
        x_BTD: jax.Array,
        real_BT: jax.Array,
        replayed_BTK: jax.Array | None = None,
        routed_BTD: jax.Array | None = None,
    ) -> tuple[jax.Array, ExpertChoice, dict[str, jax.Array]]:
        """Return (result, the router's choice, notes of `through_experts`); real_BT: bool, False
        in padding."""
        choice = self.router(x_BTD if routed_BTD is None else routed_BTD, replayed_BTK)
        y_BTD = x_BTD if self.latent_in is None else self.latent_in(x_BTD)
        K = choice.gates.shape[-1]
        # Padding takes no place in an expert's share of the tokens.
        read_BTD, sent, travels_BT = y_BTD, choice, find_travelers(real_BT)
        if self.scale_inputs:
            read_BTD, sent = scale_tokens(y_BTD, choice)
            travels_BT = jnp.repeat(travels_BT, K, axis=1)
        y_BTD, notes = through_experts(
            read_BTD,
            sent,
            self.experts,
            travels_BT,
            activation=self.activation,
            impl=self.impl,
            transport=self.transport,
        )
        if self.scale_inputs:
            y_BTD = y_BTD.reshape(*x_BTD.shape[:2], K, -1).sum(axis=2)
        if self.latent_out is not None:
            y_BTD = self.latent_out(y_BTD)
        if self.shared is not None:
            # Reads x and not the latent, and is added behind the matrix that leads out of it.
            shared_BTD = self.shared(x_BTD)
            if self.shared_gate is not None:
                shared_BTD = self.shared_gate(x_BTD) * shared_BTD
            y_BTD = y_BTD + shared_BTD
        if self.mean_shared:
            y_BTD = y_BTD / 2
        y_BTD = constrain(y_BTD, "rows", "sequence", "features")
        return y_BTD, choice, notes


def scale_tokens(x_BTD: jax.Array, choice: ExpertChoice) -> tuple[jax.Array, ExpertChoice]:
    """Return each token [B, T K, D] once for each of its experts, multiplied by its gate, and the
    choice of that expert alone with a gate of 1."""
    B, T, K = choice.gates.shape
    scaled_BTKD = x_BTD[:, :, None] * choice.gates[..., None].astype(x_BTD.dtype)
    experts = choice.experts.reshape(B, T * K, 1)
    sent = choice._replace(experts=experts, gates=jnp.ones_like(experts, choice.gates.dtype))
    return scaled_BTKD.reshape(B, T * K, -1), sent


def use_transport(model: nnx.Module, transport: Transport, impl: str) -> None:
    """Have tokens reach the experts of all mixtures in `model` that way, and `moe_ffn`'s backend
    `impl` compute them."""
    for _, node in nnx.iter_graph(model):
        if isinstance(node, MoE):
            node.transport, node.impl = transport, impl
