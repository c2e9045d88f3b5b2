"""The Hopper kernels of logp_gather without a GPU: interpreted numerics, lowering, declining."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import logp_gather, testing
from jaxtrain_kernels.logp_gather import by_kernels, gpu, mosaic_gpu
from jaxtrain_kernels.logp_gather.cases import Case
from mosaic_interpreter import interpreted, require
from test_kernels_logp_gather import NAMES, cotangents, numpy_logp_gather, options_of, run

CASES = [
    Case("whole_tiles", 130, 64, 768, frozenset()),
    Case("everything", 100, 128, 832, frozenset(), softcap=3.0, per_token_temperature=True),
    Case("frozen", 100, 64, 832, frozenset(), freeze_head=True),
]


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c.name == "everything" else [pytest.mark.slow]) for c in CASES],
    ids=lambda case: case.name,
)
def test_interpreted_kernels(monkeypatch, case):
    """Values and gradients by the 2x rule; two chunks; no data race.

    With 832 rows the last tile overlaps the one before, and both write the same numbers there,
    which the detector calls a race.
    """
    monkeypatch.setattr(gpu, "num_cores", lambda: 4)
    inputs = case.inputs()
    for name in ("hidden", "head"):  # what both sides see is already rounded
        inputs[name] = np.asarray(jnp.asarray(inputs[name], jnp.bfloat16), np.float64)
    targets = jnp.asarray(inputs["targets"])
    settings = options_of(case, inputs)
    options = by_kernels.Options(case.softcap, case.freeze_head, 512, gpu.Config(stages=2), gpu)

    def plain(hidden, head):
        return logp_gather(hidden, head, targets, impl="reference", **settings)

    exact = numpy_logp_gather(
        *(inputs[n] for n in ("hidden", "head", "targets", "g")),
        inputs.get("temperature"),
        case.softcap,
        case.freeze_head,
    )
    bar = run(inputs, jnp.bfloat16, plain)
    arrays = [jnp.asarray(inputs[n], jnp.bfloat16) for n in ("hidden", "head")]
    with interpreted(detect_races=case.vocabulary % 256 == 0):
        out, pull = jax.vjp(
            lambda hidden, head: by_kernels.run(
                options, hidden, head, targets, settings["temperature"]
            ),
            *arrays,
        )
        actual = (*out, *pull(cotangents(out, inputs["g"])))
    names = NAMES[:5] if case.freeze_head else NAMES
    for name, a, e, b in zip(names, actual, exact, bar, strict=False):
        if name == "top":  # the target's own log-prob where they are as good as equal
            np.testing.assert_allclose(a, e, rtol=0, atol=2 * by_kernels.NEAR)
        else:
            testing.assert_accurate(a, e, b, a.dtype, name)
    if case.freeze_head:
        assert not np.asarray(actual[5], np.float32).any()


@pytest.mark.parametrize(
    "tokens, vocabulary, chunk",
    [
        (8192, 151936, 16384),
        (16384, 151936, 8192),
        (100, 32000, 32000),  # all at once
        (65536, 16448, 2304),  # 2,048 would leave 64 rows
    ],
)
def test_chunks(tokens, vocabulary, chunk):
    assert by_kernels.choose_chunk(tokens, vocabulary, 256) == chunk
    assert vocabulary % chunk == 0 or vocabulary % chunk >= 256


def test_lowers_for_a_hopper_gpu():
    require()
    from jax._src.mesh import AbstractDevice

    device = AbstractDevice("NVIDIA H200", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)

    def loss(hidden, head, targets):
        return logp_gather(hidden, head, targets, softcap=30.0, impl="mosaic_gpu").logp.sum()

    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1000, 256), (32064, 256))]
    targets = jax.ShapeDtypeStruct((1000,), jnp.int32)
    with jax.sharding.use_abstract_mesh(mesh):
        step = jax.jit(jax.grad(loss, (0, 1))).trace(*arrays, targets)
        text = step.lower(lowering_platforms=("cuda",)).as_text()
    assert "logp_statistics" in text and "logp_d_logits" in text


@pytest.mark.parametrize(
    "hidden, head, reason",
    [
        (jnp.zeros((8, 64), jnp.float32), (512, 64), "takes bfloat16 hidden states"),
        (jnp.zeros((8, 40), jnp.bfloat16), (512, 40), "width 40 must be a multiple of 64"),
        (jnp.zeros((8, 64), jnp.bfloat16), (509, 64), "the vocabulary, 509, one of 64"),
    ],
)
def test_declines(monkeypatch, hidden, head, reason):
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda: None)
    head, targets = jnp.zeros(head, hidden.dtype), jnp.zeros((8,), jnp.int32)
    with pytest.raises(NotImplementedError, match=reason):
        logp_gather(hidden, head, targets, impl="mosaic_gpu")
    assert logp_gather(hidden, head, targets).logp.shape == (8,)  # the next backend takes it
