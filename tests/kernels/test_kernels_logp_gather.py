"""logp_gather against float64 numpy: values, every gradient, chunks, edges."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import logp_gather, testing
from jaxtrain_kernels.logp_gather import xla
from jaxtrain_kernels.logp_gather.cases import CASES

CI_CASES = [case for case in CASES if "ci" in case.tags]


def numpy_logp_gather(hidden, head, targets, g, temperature=None, softcap=None, freeze_head=False):
    """(logp, entropy, lse, top, d_hidden, d_head) in float64, by the Jacobian of each result."""
    hidden, head, g = (np.asarray(x, np.float64) for x in (hidden, head, g))
    raw = hidden @ head.T
    capped = raw if softcap is None else softcap * np.tanh(raw / softcap)
    tau = np.ones(len(hidden)) if temperature is None else np.asarray(temperature, np.float64)
    z = capped / tau[:, None]
    top = z.max(1, keepdims=True)
    lse = top[:, 0] + np.log(np.exp(z - top).sum(1))
    logp = z - lse[:, None]
    p = np.exp(logp)
    entropy = -(p * logp).sum(1)
    one_hot = np.eye(len(head))[targets]
    dp = logp + 1  # of the negative entropy; softmax's Jacobian is diag(p) - p p'
    dz = g[0, :, None] * (one_hot - p) + g[2, :, None] * p
    dz -= g[1, :, None] * p * (dp - (p * dp).sum(1, keepdims=True))
    dz /= tau[:, None]
    if softcap is not None:
        dz *= 1 - np.tanh(raw / softcap) ** 2
    d_head = np.zeros_like(head) if freeze_head else dz.T @ hidden
    values = logp[np.arange(len(targets)), targets], entropy, lse, logp.max(1)
    return *values, dz @ head, d_head


def run(inputs, dtype, function):
    hidden, head = (jnp.asarray(inputs[n], dtype) for n in ("hidden", "head"))
    out, pull = jax.vjp(jax.jit(function), hidden, head)
    return (*out, *pull(cotangents(out, inputs["g"])))


def cotangents(out, g):
    """g of the first three results; the fourth carries none, whatever its cotangent is."""
    return type(out)(*(jnp.asarray(x, out.logp.dtype) for x in g), jnp.ones_like(out.top))


def options_of(case, inputs):
    temperature = inputs.get("temperature")
    return {
        "temperature": None if temperature is None else jnp.asarray(temperature),
        "softcap": case.softcap,
        "freeze_head": case.freeze_head,
    }


NAMES = ("logp", "entropy", "lse", "top", "d_hidden", "d_head")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CI_CASES, ids=lambda case: case.name)
def test_cases_match_numpy(case, dtype):
    """The public op, and chunks that divide the tokens and that do not, in one program."""
    inputs = case.inputs()
    dtype = jnp.dtype(dtype)
    for name in ("hidden", "head"):  # what both sides see is already rounded
        inputs[name] = np.asarray(jnp.asarray(inputs[name], dtype), np.float64)
    targets = jnp.asarray(inputs["targets"])
    options = options_of(case, inputs)
    exact = numpy_logp_gather(
        *(inputs[n] for n in ("hidden", "head", "targets", "g")),
        inputs.get("temperature"),
        case.softcap,
        case.freeze_head,
    )

    @jax.jit
    def outputs(*arrays):
        def with_gradients(function, **how):
            call = functools.partial(function, targets=targets, **how, **options)
            out, pull = jax.vjp(call, *arrays)
            return (*out, *pull(cotangents(out, inputs["g"])))

        ops = {impl: with_gradients(logp_gather, impl=impl) for impl in ("reference", "xla")}
        return ops | {f"chunk {n}": with_gradients(xla.logp_gather, chunk=n) for n in (128, 100)}

    actual = outputs(*(jnp.asarray(inputs[n], dtype) for n in ("hidden", "head")))
    plain = actual.pop("reference")
    for label, arrays in actual.items():
        # The public op has stopped the gradient of a frozen head.
        names = NAMES[:5] if case.freeze_head and label != "xla" else NAMES
        for name, a, e, b in zip(names, arrays, exact, plain, strict=False):
            assert a.dtype == (jnp.float32 if name in NAMES[:4] else dtype)
            testing.assert_accurate(a, e, b, a.dtype, f"{label}: {name}")


@pytest.mark.parametrize("impl", ["reference", "xla"])
def test_float64_is_float64_throughout(impl):
    case = next(case for case in CASES if case.name == "everything")
    inputs = case.inputs()
    exact = numpy_logp_gather(
        *(inputs[n] for n in ("hidden", "head", "targets", "g", "temperature")), case.softcap
    )
    with jax.enable_x64(True):
        actual = run(
            inputs,
            jnp.float64,
            lambda hidden, head: logp_gather(
                hidden,
                head,
                jnp.asarray(inputs["targets"]),
                temperature=jnp.asarray(inputs["temperature"]),
                softcap=case.softcap,
                impl=impl,
            ),
        )
        for name, a, e in zip(NAMES, actual, exact, strict=True):
            assert a.dtype == jnp.float64
            # Sums of 500 terms of order 1 in another order: about 1e3 eps.
            np.testing.assert_allclose(np.asarray(a), e, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("impl", ["reference", "xla"])
def test_peaked_and_flat_distributions(impl):
    """Logits of 1e4: entropy 0, no overflow; a zero head: entropy log V exactly."""
    D, V = 8, 300
    head = np.zeros((V, D), np.float32)
    head[7, 0] = 1e4
    hidden = np.zeros((2, D), np.float32)
    hidden[0, 0] = 1.0
    out = logp_gather(
        jnp.asarray(hidden), jnp.asarray(head), jnp.asarray([7, 3], jnp.int32), impl=impl
    )
    np.testing.assert_allclose(out.logp, [0.0, -np.log(V)], atol=1e-6)
    np.testing.assert_allclose(out.entropy, [0.0, np.log(V)], atol=2e-6)
    np.testing.assert_allclose(out.lse, [1e4, np.log(V)], rtol=1e-6)


def test_temperature_may_be_a_number():
    case = CASES[0]
    inputs = case.inputs()
    arrays = [jnp.asarray(inputs[n]) for n in ("hidden", "head", "targets")]
    by_number = logp_gather(*arrays, temperature=0.7)
    by_token = logp_gather(*arrays, temperature=jnp.full((case.tokens,), 0.7))
    np.testing.assert_array_equal(by_number.logp, by_token.logp)


def test_a_float32_head_serves_bfloat16_states():
    """Its gradient keeps the head's dtype, and the matmul runs in the dtype of the states."""
    inputs = CASES[0].inputs()
    hidden = jnp.asarray(inputs["hidden"], jnp.bfloat16)
    head, targets = jnp.asarray(inputs["head"]), jnp.asarray(inputs["targets"])

    def loss(head):
        return logp_gather(hidden, head, targets, impl="xla").logp.sum()

    gradient = jax.grad(loss)(head)
    assert gradient.dtype == jnp.float32
    rounded = head.astype(jnp.bfloat16).astype(jnp.float32)
    exact = numpy_logp_gather(
        hidden, rounded, targets, np.stack([np.ones(len(targets)), *np.zeros((2, len(targets)))])
    )
    # dz is rounded to bfloat16 (2**-9 of values up to 1), 40 terms: 1e-2 absolute is 3 sigma.
    np.testing.assert_allclose(gradient, exact[5], rtol=0, atol=1e-2)


def test_frozen_head_costs_one_matmul_less():
    T, D, V = 64, 32, 4096

    def flops(freeze_head):
        def loss(hidden, head, targets):
            return logp_gather(hidden, head, targets, freeze_head=freeze_head).logp.sum()

        shapes = [(T, D), (V, D)]
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        targets = jax.ShapeDtypeStruct((T,), jnp.int32)
        lowered = jax.jit(jax.grad(loss, (0, 1))).lower(*arrays, targets)
        return lowered.as_text().count("dot_general")

    assert flops(False) - flops(True) == 1


def test_chunks():
    assert xla.choose_chunk(256, 1000) == 1000
    assert xla.choose_chunk(8192, 151936) == 151936 // 16
    for T, V in [(8192, 151936), (65536, 248320), (1, 50257), (4096, 50257), (100, 128256)]:
        chunk = xla.choose_chunk(T, V)
        assert 1 <= chunk <= V
        assert T * chunk <= max(xla.ONE_CHUNK, xla.MAX_LOGITS)


def test_memory_is_bounded_by_the_chunk():
    T, D, V = 2048, 64, 65536
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(T, D), (V, D)]]
    targets = jax.ShapeDtypeStruct((T,), jnp.int32)

    def loss(hidden, head, targets):
        return logp_gather(hidden, head, targets, impl="xla").logp.sum()

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*arrays, targets).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < T * V * 4 / 2


@pytest.mark.parametrize(
    "shapes, message",
    [
        (((4, 8), (16, 9), (4,)), "want .T, D., .V, D., .T."),
        (((4, 8), (16, 8), (5,)), "want .T, D., .V, D., .T."),
    ],
)
def test_shapes_that_do_not_fit(shapes, message):
    hidden, head, targets = (jnp.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        logp_gather(hidden, head, targets.astype(jnp.int32))


def test_temperature_that_does_not_fit():
    with pytest.raises(ValueError, match="want a scalar or"):
        logp_gather(
            jnp.zeros((4, 8)),
            jnp.zeros((16, 8)),
            jnp.zeros((4,), jnp.int32),
            temperature=jnp.ones((5,)),
        )
