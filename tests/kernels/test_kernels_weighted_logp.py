"""weighted_logp against float64 numpy: value, gradients, frozen heads; the Hopper kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import testing, weighted_logp
from jaxtrain_kernels.logp_gather import gpu
from jaxtrain_kernels.logp_gather.by_kernels import NEAR
from jaxtrain_kernels.logp_gather.cases import CASES, Case
from jaxtrain_kernels.weighted_logp import by_kernels, xla
from jaxtrain_kernels.weighted_logp.gradient import weighted
from mosaic_interpreter import interpreted, require
from test_kernels_logp_gather import numpy_logp_gather, options_of

NAMES = ("logp", "entropy", "lse", "top", "sum", "d_hidden", "d_head", "d_weights")
SCALE = 0.3  # the cotangent of the sum


def check(case, dtype, function, bar="reference", near=1e-5):
    """`function(hidden, head, targets, weights, **options)` on a case, by the 2x rule.

    `bar`: the backend that does the same maths plainly. Autodiff of the reference keeps the
    logits' gradient in float32, "xla" rounds it once, as kernels must that read it from memory.
    """
    inputs = case.inputs()
    for name in ("hidden", "head"):  # what both sides see is already rounded
        inputs[name] = np.asarray(jnp.asarray(inputs[name], dtype), np.float64)
    weights = np.abs(inputs["g"][0])
    g = np.stack([SCALE * weights, 0 * weights, 0 * weights])
    options = options_of(case, inputs)
    logp, entropy, lse, top, d_hidden, d_head = numpy_logp_gather(
        *(inputs[n] for n in ("hidden", "head", "targets")),
        g,
        inputs.get("temperature"),
        case.softcap,
        case.freeze_head,
    )
    total = (weights * logp).sum()
    exact = logp, entropy, lse, top, total, d_hidden, d_head, SCALE * logp

    def run(function):
        def call(hidden, head, weights):
            return function(hidden, head, jnp.asarray(inputs["targets"]), weights, **options)

        arrays = (*(jnp.asarray(inputs[n], dtype) for n in ("hidden", "head")), weights)
        (total, scores), pull = jax.vjp(call, *arrays)
        zeros = jax.tree.map(jnp.zeros_like, scores)
        return *scores, total, *pull((jnp.asarray(SCALE, total.dtype), zeros))

    def plain(*args, **options):
        return weighted_logp(*args, **options, impl=bar)

    for name, a, e, p in zip(NAMES, run(function), exact, run(plain), strict=True):
        if name == "top":  # from exponentials in bfloat16, or the target's own log-prob if as good
            np.testing.assert_allclose(a, e, rtol=0, atol=near)
        else:
            if name == "sum":  # of many terms in another order: an ulp more
                p = p + np.abs(e) * 2**-24
            testing.assert_accurate(a, e, p, a.dtype, name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [c for c in CASES if "ci" in c.tags], ids=lambda c: c.name)
def test_cases_match_numpy(case, dtype):
    check(case, dtype, lambda *args, **options: weighted_logp(*args, **options, impl="xla"))


@pytest.mark.slow
def test_many_logits_walk_the_vocabulary(monkeypatch):
    """Match the path that materializes all logits."""
    monkeypatch.setattr(xla.gather, "MAX_LOGITS", 1)
    case = next(case for case in CASES if case.name == "everything")
    check(case, "float32", lambda *args, **options: weighted_logp(*args, **options, impl="xla"))


def arrays_of(case):
    inputs = case.inputs()
    return [jnp.asarray(inputs[n]) for n in ("hidden", "head", "targets")]


def test_gradients_are_made_in_the_forward_pass_and_only_if_asked_for():
    """Matmuls: one for the value, three with gradients, two with a frozen head."""
    hidden, head, targets = arrays_of(CASES[0])
    weights = jnp.ones(targets.shape)

    def loss(hidden, head, freeze):
        return weighted_logp(hidden, head, targets, weights, freeze_head=freeze, impl="xla")[0]

    def matmuls(function):
        text = jax.jit(function).lower(hidden, head).as_text()
        return text.count("dot_general")

    assert matmuls(lambda x, w: loss(x, w, False)) == 1
    assert matmuls(jax.grad(lambda x, w: loss(x, w, False), (0, 1))) == 3
    assert matmuls(jax.grad(lambda x, w: loss(x, w, True), (0, 1))) == 2


def test_a_head_that_is_not_differentiated_costs_nothing():
    hidden, head, targets = arrays_of(CASES[0])
    weights = jnp.ones(targets.shape)

    def loss(hidden):
        return weighted_logp(hidden, head, targets, weights, impl="xla")[0]

    text = jax.jit(jax.grad(loss)).lower(hidden).compile().as_text()
    assert f"{head.shape[0]},{head.shape[1]}]" in text  # it is read
    assert f"= f32[{head.shape[0]},{head.shape[1]}]{{1,0}} dot" not in text


def test_scores_carry_no_gradient():
    hidden, head, targets = arrays_of(CASES[0])
    weights = jnp.ones(targets.shape)
    for impl in ("reference", "xla"):

        def entropy(hidden, impl=impl):
            return weighted_logp(hidden, head, targets, weights, impl=impl)[1].entropy.sum()

        assert not np.asarray(jax.grad(entropy)(hidden)).any()


GPU_CASES = [
    (Case("one_chunk", 100, 64, 512, frozenset()), 128, 1),
    (
        Case("everything", 100, 128, 832, frozenset(), softcap=3.0, per_token_temperature=True),
        128,
        2,
    ),
    (Case("chunks", 330, 64, 512, frozenset()), 256, 1),
    (Case("frozen", 100, 64, 832, frozenset(), freeze_head=True), 128, 1),
]


@pytest.mark.parametrize(
    "case, rows, splits",
    [
        pytest.param(*c, marks=[] if c[0].name == "one_chunk" else [pytest.mark.slow], id=c[0].name)
        for c in GPU_CASES
    ],
)
def test_interpreted_kernels(monkeypatch, case, rows, splits):
    """The 2x rule; chunks of rows that overlap; no data race.

    Where a vocabulary is no whole number of tiles two of them write the same numbers, which the
    detector calls a race.
    """

    monkeypatch.setattr(gpu, "num_cores", lambda: 4)

    def kernels(hidden, head, targets, weights, *, temperature, softcap, freeze_head):
        if freeze_head:
            head = jax.lax.stop_gradient(head)
        backend = by_kernels.KernelBackend(
            softcap, freeze_head, None, rows, splits, gpu.Config(stages=2), gpu
        )
        return weighted(backend, hidden, head, targets, weights, temperature)

    with interpreted(detect_races=case.vocabulary % 256 == 0):
        check(case, "bfloat16", kernels, bar="xla", near=2 * NEAR)


@pytest.mark.slow
def test_a_failed_guess_is_repaired(monkeypatch):
    """Put one logit 600 above all others in a row of the head outside the sample."""
    monkeypatch.setattr(gpu, "num_cores", lambda: 4)
    T, D, V = 128, 64, 1024
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((T, D), np.float32)
    head = rng.standard_normal((V, D), np.float32) * 0.1
    hidden[::2, 0], hidden[1::2, 0] = 30.0, 0.0
    head[257], head[:, 0] = 0.0, 0.0
    head[257, 0] = 20.0
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (hidden, head)]
    targets, weights = jnp.full((T,), 3, jnp.int32), jnp.ones((T,))

    def run(function):
        total, pull = jax.vjp(lambda *a: function(*a, targets, weights)[0], *arrays)
        return total, *pull(jnp.ones(()))

    expected = run(lambda *a: weighted_logp(*a, impl="reference"))
    with interpreted():
        backend = by_kernels.KernelBackend(None, False, None, 128, 1, gpu.Config(stages=2), gpu)
        actual = run(lambda *a: weighted(backend, *a, None))
    for a, e in zip(actual, expected, strict=True):
        # Both round p to bfloat16: 2^-8 of the largest.
        a, e = np.asarray(a, np.float32), np.asarray(e, np.float32)
        np.testing.assert_allclose(a, e, rtol=0, atol=2**-7 * np.abs(e).max())


@pytest.mark.parametrize(
    "tokens, width, vocabulary, rows",
    [(8192, 1024, 151936, 1664), (16384, 4096, 151936, 3328), (100, 1024, 151936, 128)],
)
def test_rows_of_a_chunk(tokens, width, vocabulary, rows):
    assert by_kernels.choose_rows(tokens, width, vocabulary, gpu.TILE_T) == rows


def test_lowers_for_a_hopper_gpu():
    require()
    from jax._src.mesh import AbstractDevice

    device = AbstractDevice("NVIDIA H200", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)

    def loss(hidden, head, targets, weights):
        return weighted_logp(hidden, head, targets, weights, softcap=30.0, impl="mosaic_gpu")[0]

    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1000, 256), (32064, 256))]
    arrays += [jax.ShapeDtypeStruct((1000,), t) for t in (jnp.int32, jnp.float32)]
    with jax.sharding.use_abstract_mesh(mesh):
        step = jax.jit(jax.grad(loss, (0, 1))).trace(*arrays)
        text = step.lower(lowering_platforms=("cuda",)).as_text()
    assert "logp_exponentials" in text and "logp_d_logits" not in text


def test_shapes_that_do_not_fit():
    hidden, head, targets = arrays_of(CASES[0])
    with pytest.raises(ValueError, match="weights .3,.; want"):
        weighted_logp(hidden, head, targets, jnp.ones((3,)))
