"""The MoE layer against transformers' own module."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain.layers.moe import MoE
from jaxtrain.layers.router import Router, Routing

torch = pytest.importorskip("torch", reason="parity needs torch, which this environment has not")

T, D, F, E, TOP = 50, 16, 12, 8, 3


def deepseek(groups, top_groups, normalise, shared=1):
    from transformers.models.deepseek_v3 import configuration_deepseek_v3, modeling_deepseek_v3

    config = configuration_deepseek_v3.DeepseekV3Config(
        hidden_size=D,
        moe_intermediate_size=F,
        n_routed_experts=E,
        num_experts_per_tok=TOP,
        n_group=groups,
        topk_group=top_groups,
        norm_topk_prob=normalise,
        routed_scaling_factor=2.5,
        n_shared_experts=shared,
    )
    torch.manual_seed(0)
    layer = modeling_deepseek_v3.DeepseekV3MoE(config).float()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.5)
        # Large enough to change the choice, and so to be missed if it reached the gates.
        layer.gate.e_score_correction_bias.normal_(0, 0.3)
    return layer


def our_layer(theirs, groups, top_groups, normalise):
    rngs = nnx.Rngs(0)
    routing = Routing(
        top=TOP,
        score="sigmoid",
        normalise=normalise,
        groups=groups,
        top_groups=top_groups,
        scale=2.5,
    )
    router = Router(D, E, routing, choice_bias=True, wide=True, rngs=rngs)
    layer = MoE(router, D, F, E, num_shared=F, rngs=rngs)

    def put(variable, tensor):
        variable[...] = jnp.asarray(tensor.detach().numpy())

    put(router.kernel, theirs.gate.weight.T)
    put(router.choice_bias, theirs.gate.e_score_correction_bias)
    gate_up = theirs.experts.gate_up_proj.transpose(1, 2)
    put(layer.experts.gate.kernel, gate_up[..., :F])
    put(layer.experts.up.kernel, gate_up[..., F:])
    put(layer.experts.down.kernel, theirs.experts.down_proj.transpose(1, 2))
    for name in ("gate", "up", "down"):
        weight = getattr(theirs.shared_experts, f"{name}_proj").weight
        put(getattr(layer.shared, name).kernel, weight.T)
    return layer


@pytest.mark.parametrize(
    ("groups", "top_groups", "normalise"), [(1, 1, True), (4, 2, True), (2, 1, False)]
)
def test_deepseek_layer_equals_transformers(groups, top_groups, normalise):
    """Sigmoid scores, correction bias, groups, shared experts: output and gradients."""
    theirs = deepseek(groups, top_groups, normalise)
    ours = our_layer(theirs, groups, top_groups, normalise)
    x = np.random.default_rng(1).standard_normal((1, T, D)).astype(np.float32)
    probe = np.random.default_rng(2).standard_normal((1, T, D)).astype(np.float32)
    given = torch.from_numpy(x).requires_grad_()
    expected = theirs(given)
    (expected * torch.from_numpy(probe)).sum().backward()
    graphdef, state = nnx.split(ours)

    def loss(state, x):
        out, _ = nnx.merge(graphdef, state)(x, jnp.ones((1, T), bool))
        return (out * probe).sum(), out

    grads, out = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(state, jnp.asarray(x))

    def assert_same(ours, tensor):
        theirs = tensor.detach().numpy()
        # float32 sums in another order
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())

    assert_same(out, expected)
    assert_same(grads[1], given.grad)
    assert_same(grads[0]["router"]["kernel"][...], theirs.gate.weight.grad.T)
    down = theirs.experts.down_proj.grad.transpose(1, 2)
    assert_same(grads[0]["experts"]["down"]["kernel"][...], down)
    assert not np.asarray(grads[0]["router"]["choice_bias"][...]).any(), (
        "the bias only moves the choice"
    )
