"""Distillation: every divergence by its definition, gradients in float64, meshes, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.core.losses.divergence import diverge
from jaxtrain.core.losses.topk import TopK, take_topk
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.methods.distillation.loss import Distillation, sum_divergence

B, T, D, E, V, K = 2, 12, 8, 12, 40, 5


def plain_divergence(student_CV, teacher_CV, beta, temperature=1.0):
    """[C] the definition, by autodiff: from all logits of both."""
    lq_CV = jax.nn.log_softmax(student_CV / temperature)
    lp_CV = jax.nn.log_softmax(teacher_CV / temperature)
    return diverge(lp_CV, lq_CV, beta).sum(-1)


def plain_topk(student_CV, teacher, beta, rest, temperature=1.0):
    """[C] the definition over k tokens, by autodiff; every id is there."""
    lq_CV = jax.nn.log_softmax(student_CV / temperature)
    lq_Ck = jnp.take_along_axis(lq_CV, teacher.ids, axis=-1)
    lp_Ck = teacher.logp / temperature
    if rest == "bucket":
        assert temperature == 1.0, "what the others have at another temperature is not known"
        lp_Ck, lq_Ck = (
            jnp.concatenate([x_Ck, jnp.log1p(-jnp.exp(x_Ck).sum(-1, keepdims=True))], -1)
            for x_Ck in (lp_Ck, lq_Ck)
        )
    else:
        lp_Ck = jax.nn.log_softmax(lp_Ck)
        lq_Ck = jax.nn.log_softmax(lq_Ck) if rest == "renormalize" else lq_Ck
    return diverge(lp_Ck, lq_Ck, beta).sum(-1)


def test_divergences_of_two_coins():
    """Worked by hand: p = (3/4, 1/4), q = (1/2, 1/2), m = (5/8, 3/8) at beta 1/2."""
    p, q = np.log([[0.75, 0.25]]), np.log([[0.5, 0.5]])
    forward = 0.75 * np.log(1.5) + 0.25 * np.log(0.5)
    reverse = 0.5 * np.log(2 / 3) + 0.5 * np.log(2)
    middle = 0.5 * (0.75 * np.log(1.2) + 0.25 * np.log(2 / 3))
    middle += 0.5 * (0.5 * np.log(0.8) + 0.5 * np.log(4 / 3))
    for beta, expected in ((0.0, forward), (1.0, reverse), (0.5, middle)):
        np.testing.assert_allclose(plain_divergence(q, p, beta), [expected], rtol=1e-6)


def test_small_betas_are_beta_times_the_forward_kl():
    """The limit that the docstring states, and TRL's jump at 0."""
    with jax.enable_x64():
        rng = np.random.default_rng(0)
        q, p = jnp.asarray(rng.standard_normal((2, 3, 9)))
        for beta, end in ((1e-6, 0.0), (1 - 1e-6, 1.0)):
            scaled = plain_divergence(q, p, beta) / min(beta, 1 - beta)
            np.testing.assert_allclose(scaled, plain_divergence(q, p, end), rtol=1e-5)


def inputs(dtype=np.float64):
    rng = np.random.default_rng(1)
    hidden = rng.standard_normal((B, T, D)).astype(dtype)
    head = rng.standard_normal((V, D)).astype(dtype)
    states = rng.standard_normal((B, T, E)).astype(dtype) / 2
    second = rng.standard_normal((V, E)).astype(dtype)
    target = rng.integers(0, V, (B, T), np.int32)
    weight = (rng.random((B, T)) < 0.6).astype(dtype) * rng.random((B, T)).astype(dtype)
    ce = np.where(rng.random((B, T)) < 0.5, weight * 0.3, 0.0).astype(dtype)
    return hidden, head, states, second, target, weight, ce


FORMS = [
    (0.1, 2.0, None, "bucket"),
    (0.5, 1.0, K, "bucket"),
    *(
        pytest.param(form, marks=pytest.mark.slow)
        for form in (
            (0.0, 2.0, None, "bucket"),
            (1.0, 1.0, None, "bucket"),
            (0.0, 1.0, K, "bucket"),
            (1.0, 1.0, K, "bucket"),
            (0.0, 2.0, K, "renormalize"),
            (1.0, 1.0, K, "renormalize"),
            (0.0, 1.0, K, "teacher"),
        )
    ),
]


SOFTCAPS = (1.5, 2.5)


@pytest.fixture(scope="module")
def plain():
    """(value, gradients by hidden and head) of the definition, from all logits at once."""

    def loss(hidden, head, states, second, target, weight, ce, form):
        beta, temperature, k, rest = form
        z, v = hidden @ head.T, states @ second.T
        if temperature != 1.0:
            z, v = (cap * jnp.tanh(x / cap) for x, cap in zip((z, v), SOFTCAPS, strict=True))
        if k is None:
            actual = plain_divergence(z, v, beta, temperature)
        else:
            top = take_topk(v.reshape(-1, V), k)
            top = TopK(top.ids.reshape(B, T, k), top.logp.reshape(B, T, k))
            actual = plain_topk(z, top, beta, rest, temperature)
        nll = -jnp.take_along_axis(jax.nn.log_softmax(z), target[..., None], -1)[..., 0]
        return jnp.sum(weight * 3.0 * actual + ce * nll)

    return jax.value_and_grad(loss, argnums=(0, 1))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_chunks_equal_the_definition_in_float64(form, plain):
    """Value, gradients by hidden states and head; chunks of 5 of 24 tokens; 1e-10. Where there is a
    temperature, logits have a softcap, too."""
    beta, temperature, k, rest = form
    caps = SOFTCAPS if temperature != 1.0 else (None, None)
    numbers = Distillation(beta, temperature, k, rest, scale=3.0, ce_weight=1.0, chunk=5)
    with jax.enable_x64():
        hidden, head, states, second, target, weight, ce = map(jnp.asarray, inputs())

        @jax.jit
        def both(hidden, head):
            def chunked(hidden, head, recorded=(states, second)):
                return sum_divergence(hidden, head, recorded, target, weight, ce, numbers, caps)

            actual = jax.value_and_grad(chunked, (0, 1), has_aux=True)(hidden, head)
            again = actual[0][0]
            if k is not None and temperature == 1.0:  # the same from log-probs that were stored
                top = take_topk((states @ second.T).reshape(-1, V), k)
                again, _ = chunked(hidden, head, TopK(*(x.reshape(B, T, k) for x in top)))
            expected = plain(hidden, head, states, second, target, weight, ce, form)
            return actual, again, expected

        ((total, actual), grads), again, expected = both(hidden, head)
        np.testing.assert_allclose(total, expected[0], rtol=1e-10)
        np.testing.assert_allclose(again, expected[0], rtol=1e-10)
        for a, e in zip(grads, expected[1], strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-8, atol=1e-10)
        assert (np.asarray(actual.divergence)[np.asarray(weight) == 0] == 0).all()


def test_tokens_with_fewer_likeliest_ones():
    """Empty places (id -1) of a stored top-k count for nothing, whatever stands beside them."""
    with jax.enable_x64():
        hidden, head, states, second, target, weight, ce = map(jnp.asarray, inputs())
        top = take_topk((states @ second.T).reshape(-1, V), K)
        ids, logp = (x.reshape(B, T, K) for x in top)
        short = TopK(ids[..., :3], logp[..., :3])
        filled = TopK(ids.at[..., 3:].set(-1), logp.at[..., 3:].set(0.0))

        @jax.jit
        def run(recorded):
            return sum_divergence(hidden, head, recorded, target, weight, ce, Distillation())

        for a, e in zip(jax.tree.leaves(run(filled)), jax.tree.leaves(run(short)), strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-12)


MESHES = [
    pytest.param({"fsdp": 2, "tensor": 2}, None, marks=pytest.mark.slow),
    pytest.param({"context": 2, "tensor": 2}, K, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("sizes,k", MESHES, ids=str)
def test_meshes_equal_one_device(sizes, k):
    """Sum, numbers and both gradients where tokens, vocabulary and features are split; float32, so
    only the order of sums differs: 1e-5."""
    hidden, head, states, second, target, weight, ce = map(jnp.asarray, inputs(np.float32))
    numbers = Distillation(0.5, 1.0, k, ce_weight=1.0, chunk=5)

    def run(hidden, head, states, second):
        def total(hidden, head):
            recorded = (states, second)
            result = sum_divergence(hidden, head, recorded, target, weight, ce, numbers)
            return result[0], result[1]

        return jax.value_and_grad(total, (0, 1), has_aux=True)(hidden, head)

    expected = jax.tree.leaves(jax.jit(run)(hidden, head, states, second))
    with jax.set_mesh(make_mesh(**sizes)):
        actual = jax.tree.leaves(jax.jit(run)(hidden, head, states, second))
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


def test_never_all_logits_at_once():
    """Temporaries of the compiled gradients stay below those of one [T, V] in float32, though a
    plain program needs several; a frozen head's gradient is not even made."""
    tokens, vocabulary, width = 4096, 4096, 16
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)  # noqa: E731
    numbers = Distillation(0.5, ce_weight=0.5, chunk=256)
    rows = (1, tokens)

    def total(hidden, head, states, second, target, weight):
        recorded = (states, second)
        return sum_divergence(hidden, head, recorded, target, weight, weight, numbers)[0]

    arguments = [
        shape(*rows, width),
        shape(vocabulary, width),
        shape(*rows, width),
        shape(vocabulary, width),
        jax.ShapeDtypeStruct(rows, jnp.int32),
        shape(*rows),
    ]
    lowered = jax.jit(jax.grad(total, (0, 1))).lower(*arguments)
    compiled = lowered.compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.75 * tokens * vocabulary * 4
    assert f"f32[{tokens},{vocabulary}]" not in compiled.as_text()
    products = "stablehlo.dot_general"
    frozen = jax.jit(jax.grad(total, 0)).lower(*arguments)
    assert frozen.as_text().count(products) == lowered.as_text().count(products) - 1
