"""logp_of_logits against float64 numpy: values, gradient, edges; the Hopper kernel interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import logp_of_logits, testing
from jaxtrain_kernels.logp_of_logits import gpu, mosaic_gpu
from jaxtrain_kernels.logp_of_logits.cases import CASES, Case
from mosaic_interpreter import interpreted, require

NAMES = ("logp", "entropy", "lse", "d_logits")


def numpy_logp_of_logits(logits, targets, g, temperature=None):
    """(logp, entropy, lse, d_logits) in float64, by the Jacobian of the softmax."""
    tau = np.ones(len(logits)) if temperature is None else np.asarray(temperature, np.float64)
    z = np.asarray(logits, np.float64) / tau[:, None]
    top = z.max(1, keepdims=True)
    lse = top[:, 0] + np.log(np.exp(z - top).sum(1))
    logp = z - lse[:, None]
    p = np.exp(logp)
    surprise = np.where(p > 0, logp, 0.0)
    entropy = -(p * surprise).sum(1)
    dz = np.zeros_like(z)
    for t in range(len(z)):
        dz[t] += g[0, t] * (np.eye(z.shape[1])[targets[t]] - p[t])
        dz[t] -= g[1, t] * (p[t] * (surprise[t] + 1) - p[t] * (p[t] @ (surprise[t] + 1)))
        dz[t] += g[2, t] * p[t]
    return logp[np.arange(len(z)), targets], entropy, lse, dz / tau[:, None]


def check(case, dtype, function, mask=()):
    """`function(logits, targets, temperature)` on a case, by the 2x rule."""
    inputs = case.inputs()
    logits = jnp.asarray(inputs["logits"], dtype)
    for row, columns in mask:
        logits = logits.at[row, columns].set(-jnp.inf)
    targets = jnp.asarray(inputs["targets"])
    temperature = inputs.get("temperature")
    tau = None if temperature is None else jnp.asarray(temperature)

    def run(function):
        out, pull = jax.vjp(lambda logits: function(logits, targets, tau), logits)
        return *out[:3], *pull(type(out)(*(jnp.asarray(g) for g in inputs["g"])))

    exact = numpy_logp_of_logits(
        np.asarray(logits.astype(jnp.float32)), inputs["targets"], inputs["g"], temperature
    )
    plain = run(lambda x, y, tau: logp_of_logits(x, y, temperature=tau, impl="reference"))
    for name, a, e, p in zip(NAMES, run(function), exact, plain, strict=True):
        assert a.dtype == (logits.dtype if name == "d_logits" else jnp.float32)
        if name == "d_logits":
            # p comes from the saved log-sum-exp: an ulp of that is a relative error of p.
            p = p + np.abs(e).max() * np.abs(exact[2]).max() * 2**-24
        testing.assert_accurate(a, e, p, a.dtype, name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [c for c in CASES if "ci" in c.tags], ids=lambda c: c.name)
def test_cases_match_numpy(case, dtype):
    check(case, dtype, lambda x, y, tau: logp_of_logits(x, y, temperature=tau, impl="xla"))


@pytest.mark.parametrize("impl", ["reference", "xla"])
def test_float64_is_float64_throughout(impl):
    inputs = next(case for case in CASES if case.name == "temperature").inputs()
    exact = numpy_logp_of_logits(*(inputs[n] for n in ("logits", "targets", "g", "temperature")))
    with jax.enable_x64(True):
        logits, g = (jnp.asarray(inputs[n], jnp.float64) for n in ("logits", "g"))
        targets, tau = (jnp.asarray(inputs[n]) for n in ("targets", "temperature"))
        out, pull = jax.vjp(
            lambda x: logp_of_logits(x, targets, temperature=tau, impl=impl), logits
        )
        for name, a, e in zip(NAMES, (*out[:3], *pull(type(out)(*g))), exact, strict=True):
            assert a.dtype == jnp.float64
            # Sums of 384 terms of order 1 in another order: about 1e3 eps.
            np.testing.assert_allclose(np.asarray(a), e, rtol=0, atol=1e-12, err_msg=name)


def test_masked_logits_have_no_weight():
    """-inf outside the target: p = 0, nothing is NaN, the rest is as if they were not there."""
    case = Case("masked", 8, 128, frozenset())
    inputs = case.inputs()
    keep = inputs["targets"][3]
    columns = np.setdiff1d(np.arange(128), [keep, 5])
    check(case, "float32", lambda x, y, tau: logp_of_logits(x, y), mask=[(3, columns)])


@pytest.mark.parametrize(
    "case, config",
    [
        (Case("overlaps", 72, 448, frozenset()), gpu.Config(columns=128, warpgroups=2, stages=2)),
        (
            Case("temperature", 128, 512, frozenset(), per_token_temperature=True, spread=20.0),
            gpu.Config(columns=64, warpgroups=3, stages=2),
        ),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_interpreted_kernel(monkeypatch, case, config):
    """Rows and columns that do not divide; -inf; no data race (but where two write the same)."""
    monkeypatch.setattr(gpu, "num_cores", lambda: 2)
    with interpreted(detect_races=case.tokens % 64 == 0):
        check(
            case,
            "bfloat16",
            lambda x, y, tau: mosaic_gpu.logp_of_logits_with(config, x, y, tau),
            mask=[(1, np.setdiff1d(np.arange(300), case.inputs()["targets"][1]))],
        )


def test_parts_fill_the_device():
    config = gpu.Config()
    parts = gpu.choose_parts(4096, 151936, config, 132)
    chunks = 151936 // config.columns + 1
    stretch = -(-chunks // parts)
    rounds = -(-64 * parts // 396)
    assert rounds * stretch <= 1.05 * 64 * chunks / 396  # within 5% of a perfect split


def test_lowers_for_a_hopper_gpu():
    require()
    from jax._src.mesh import AbstractDevice

    device = AbstractDevice("NVIDIA H200", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    logits = jax.ShapeDtypeStruct((4096, 151936), jnp.bfloat16)
    targets = jax.ShapeDtypeStruct((4096,), jnp.int32)
    with jax.sharding.use_abstract_mesh(mesh):
        step = jax.jit(lambda x, y: logp_of_logits(x, y, impl="mosaic_gpu"))
        text = step.trace(logits, targets).lower(lowering_platforms=("cuda",)).as_text()
    assert "logp_of_logits" in text


@pytest.mark.parametrize(
    "shape, dtype, reason",
    [
        ((64, 512), jnp.float32, "takes bfloat16 logits"),
        ((65, 512), jnp.bfloat16, "65 rows must be a multiple of 8"),
        ((64, 500), jnp.bfloat16, "the vocabulary, 500"),
    ],
)
def test_declines(monkeypatch, shape, dtype, reason):
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda: None)
    logits, targets = jnp.zeros(shape, dtype), jnp.zeros(shape[:1], jnp.int32)
    with pytest.raises(NotImplementedError, match=reason):
        logp_of_logits(logits, targets, impl="mosaic_gpu")
    assert logp_of_logits(logits, targets).logp.shape == shape[:1]  # the next backend takes it


def test_arguments_that_do_not_fit():
    logits = jnp.zeros((4, 8))
    with pytest.raises(ValueError, match="want .T, V., .T."):
        logp_of_logits(logits, jnp.zeros((5,), jnp.int32))
    with pytest.raises(ValueError, match="want a scalar or"):
        logp_of_logits(logits, jnp.zeros((4,), jnp.int32), temperature=jnp.ones((5,)))
