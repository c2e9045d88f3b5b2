"""The vocabulary ops on meshes of fake devices equal the plain op on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import logp_gather
from jaxtrain_kernels.logp_gather.reference import LogProbs

from jaxtrain.core.losses.vocabulary import gather_logp, sum_logp
from jaxtrain.distributed.mesh import make_mesh

B, T, D, V = 4, 6, 16, 96


def inputs(vocabulary=V):
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((B, T, D), np.float32)
    head = rng.standard_normal((vocabulary, D), np.float32)
    targets = rng.integers(0, vocabulary, (B, T), np.int32)
    g = LogProbs(*rng.standard_normal((4, B, T), np.float32))
    return hidden, head, targets, g


MESHES = [
    {"tensor": 4},
    {"fsdp": 2, "tensor": 2},
    {"data": 2, "context": 2},
    pytest.param({"context": 2, "tensor": 2}, marks=pytest.mark.slow),
    pytest.param({"data": 2, "fsdp": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("temperature", [pytest.param(None, marks=pytest.mark.slow), 0.7])
@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "_".join(sizes))
def test_meshes_equal_one_device(sizes, temperature):
    """Values and every gradient; float32, so only the order of sums differs: 1e-5."""
    hidden, head, targets, g = inputs()

    def results(function):
        def both(hidden, head, g):
            out, pull = jax.vjp(function, hidden, head)
            return out, pull(g)

        return jax.tree.leaves(jax.jit(both)(hidden, head, g))

    def one(hidden, head):
        flat = logp_gather(
            hidden.reshape(-1, D),
            head,
            jnp.asarray(targets.reshape(-1)),
            temperature=temperature,
            impl="reference",
        )
        return LogProbs(*(x.reshape(B, T) for x in flat))

    expected = results(one)
    with jax.set_mesh(make_mesh(**sizes)):
        actual = results(
            lambda hidden, head: gather_logp(
                hidden, head, jnp.asarray(targets), temperature=temperature
            )
        )
    for name, a, e in zip(
        ("logp", "entropy", "lse", "top", "dx", "dw"), actual, expected, strict=True
    ):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "_".join(sizes))
def test_the_weighted_sum_on_meshes_equals_one_device(sizes):
    """Value, scores, and the gradients of all three arguments; 1e-5 as above."""
    hidden, head, targets, g = inputs()

    def results(function, scale):
        def loss(hidden, head, weights):
            total, scores = function(hidden, head, weights)
            return total * scale, scores

        grad = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
        return jax.tree.leaves(jax.jit(grad)(hidden, head, g.logp))

    def one(hidden, head, weights):
        out = logp_gather(
            hidden.reshape(-1, D), head, jnp.asarray(targets.reshape(-1)), impl="reference"
        )
        out = LogProbs(*(x.reshape(B, T) for x in out))
        return (weights * out.logp).sum(), out

    expected = results(one, 0.3)
    with jax.set_mesh(make_mesh(**sizes)):
        actual = results(lambda x, w, g: sum_logp(x, w, jnp.asarray(targets), g), 0.3)
    names = ("sum", "logp", "entropy", "lse", "top", "dx", "dw", "dg")
    for name, a, e in zip(names, actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_vocabulary_that_does_not_divide_stays_whole():
    hidden, head, targets, _ = inputs(vocabulary=97)
    expected = logp_gather(hidden.reshape(-1, D), head, jnp.asarray(targets.reshape(-1)))
    with jax.set_mesh(make_mesh(fsdp=2, tensor=2)):
        actual = jax.jit(gather_logp)(hidden, head, jnp.asarray(targets))
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a.reshape(-1), e, rtol=1e-5, atol=1e-6)


def test_a_slice_without_weight_keeps_the_entropy_exact():
    """Logits of 1e4 in one slice of the vocabulary: entropy 0 and no overflow in the others."""
    head = np.zeros((V, D), np.float32)
    head[7, 0] = 1e4
    hidden = np.zeros((B, T, D), np.float32)
    hidden[0, 0, 0] = 1.0
    targets = np.full((B, T), 7, np.int32)
    with jax.set_mesh(make_mesh(tensor=4)):
        out = jax.jit(gather_logp)(hidden, head, jnp.asarray(targets))
    np.testing.assert_allclose(out.logp[0, :2], [0.0, -np.log(V)], atol=1e-5)
    np.testing.assert_allclose(out.entropy[0, :2], [0.0, np.log(V)], atol=1e-5)


def test_the_kernel_is_called_with_local_arrays(monkeypatch):
    """Under a mesh every axis is manual where the kernel is called, so that it does not decline."""
    from jaxtrain.core.losses import vocabulary

    seen = []

    def spy(hidden, head, targets, **options):
        mesh = jax.sharding.get_abstract_mesh()
        seen.append((hidden.shape, head.shape, set(mesh.axis_types)))
        return logp_gather(hidden, head, targets, **options)

    monkeypatch.setattr(vocabulary, "logp_gather", spy)
    hidden, head, targets, _ = inputs()
    with jax.set_mesh(make_mesh(fsdp=2, tensor=2)):
        jax.jit(gather_logp)(hidden, head, jnp.asarray(targets))
    shapes = (B // 2 * T, D), (V // 2, D)
    assert seen[0] == (*shapes, {jax.sharding.AxisType.Manual})
