"""rotate_heads against float64 numpy: values, gradients, edges; the Hopper kernels interpreted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import rotate_heads, testing
from jaxtrain_kernels.rotate_heads import gpu, mosaic_gpu
from jaxtrain_kernels.rotate_heads.cases import CASES
from mosaic_interpreter import interpreted, require

CI = [case for case in CASES if "ci" in case.tags]
EPS = 1e-6


def numpy_rotate_heads(case, x, cos, sin, d_out, scales=None):
    """(the parts side by side, dx, d_scales) in float64, by the derivative of each step."""
    B, T, H, R = case.rows, case.tokens, case.head_dim, 2 * case.half
    x, d_out = (np.asarray(a, np.float64).reshape(B, T, -1, H) for a in (x, d_out))
    cos, sin = (np.asarray(a, np.float64)[:, :, None] for a in (cos, sin))
    out, dx, d_scales, start = x.copy(), d_out.copy(), [], 0

    def turn(z, sin):
        first, second = z[..., : R // 2], z[..., R // 2 : R]
        turned = [first * cos - second * sin, second * cos + first * sin, z[..., R:]]
        return np.concatenate(turned, axis=-1)

    for part, count in enumerate(case.counts):
        local_value = slice(start, start + count)
        start += count
        z, dz = x[:, :, local_value], turn(d_out[:, :, local_value], -sin)
        if scales is not None:
            scale = np.asarray(scales[part], np.float64)
            inverse = 1 / np.sqrt((z * z).mean(-1, keepdims=True) + EPS)
            unit, dz_unit = z * inverse, dz * scale
            d_scales.append((dz * unit).sum((0, 1, 2)))
            dz = inverse * (dz_unit - unit * (dz_unit * unit).mean(-1, keepdims=True))
            z = unit * scale
        out[:, :, local_value], dx[:, :, local_value] = turn(z, sin), dz
    flat = [a.reshape(B, T, -1) for a in (out, dx)]
    return [*flat, *([np.stack(d_scales)] if d_scales else [])]


def check(case, dtype, function):
    """`function(x, cos, sin, scales)` on a case, by the 2x rule."""
    inputs = {n: jnp.asarray(x) for n, x in case.inputs().items()}
    x, d_out = (inputs[n].astype(dtype) for n in ("x", "d_out"))
    cos, sin = inputs["cos"], inputs["sin"]
    trained = [inputs["scales"]] if case.normed else []

    def run(function):
        def flat(x, *scales):
            outs = function(x, cos, sin, scales[0] if scales else None)
            assert [out.shape[2] for out in outs] == [
                *case.counts,
                *([case.passed] if case.passed else []),
            ]
            return jnp.concatenate([out.reshape(*x.shape[:2], -1) for out in outs], axis=-1)

        out, pull = jax.vjp(flat, x, *trained)
        return [out, *pull(d_out)]

    wide = [np.asarray(a.astype(jnp.float32)) for a in (x, cos, sin, d_out)]
    exact = numpy_rotate_heads(case, *wide, inputs.get("scales"))
    plain = run(lambda *arrays: op(case, "reference", *arrays))
    for name, a, e, p in zip(("out", "dx", "d_scales"), run(function), exact, plain, strict=False):
        assert a.dtype == (jnp.float32 if name == "d_scales" else x.dtype)
        testing.assert_accurate(a, e, p, a.dtype, name)


def op(case, impl, x, cos, sin, scales=None):
    scales = None if scales is None else list(scales)
    return rotate_heads(x, cos, sin, case.counts, case.head_dim, scales, eps=EPS, impl=impl)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CI, ids=lambda c: c.name)
def test_cases_match_numpy(case, dtype):
    check(case, dtype, lambda *arrays: op(case, "xla", *arrays))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=case.name, marks=[pytest.mark.thorough] * (case.name in ("llama", "partial"))
        )
        for case in CI
    ],
)
def test_interpreted_kernels(case):
    """Values and gradients by the 2x rule, and no data race."""
    heads = gpu.Heads(case.counts, case.passed, case.head_dim, case.half)

    def kernels(x, cos, sin, scales):
        return mosaic_gpu.rotate_heads_with(gpu.Config(), heads, x, cos, sin, scales, EPS)

    with interpreted(detect_races=True):
        check(case, "bfloat16", kernels)


@pytest.mark.parametrize("impl", ["reference", "xla"])
def test_float64_is_float64_throughout(impl):
    case = next(case for case in CASES if case.name == "partial")
    with jax.enable_x64(True):
        inputs = {n: jnp.asarray(x, jnp.float64) for n, x in case.inputs().items()}
        x, d_out, *rest = (inputs[n] for n in ("x", "d_out", "cos", "sin"))
        exact = numpy_rotate_heads(case, x, *rest, d_out, inputs["scales"])

        def flat(x, scales):
            outs = op(case, impl, x, *rest, scales)
            return jnp.concatenate([out.reshape(*x.shape[:2], -1) for out in outs], axis=-1)

        out, pull = jax.vjp(flat, x, inputs["scales"])
        for a, e in zip((out, *pull(d_out)), exact, strict=True):
            assert a.dtype == jnp.float64
            # Sums of a few hundred terms of order 1 in another order: about 1e3 eps.
            np.testing.assert_allclose(np.asarray(a), e, rtol=0, atol=1e-12)


def test_the_scales_gradient_is_the_same_every_time():
    """Sums over tokens have a fixed order, whatever order blocks run in."""
    case = CI[0]
    heads = gpu.Heads(case.counts, case.passed, case.head_dim, case.half)
    inputs = {n: jnp.asarray(x) for n, x in case.inputs().items()}
    low = {n: inputs[n].astype(jnp.bfloat16) for n in ("x", "d_out")}

    def gradient():
        def total(scales):
            outs = mosaic_gpu.rotate_heads_with(
                gpu.Config(), heads, low["x"], inputs["cos"], inputs["sin"], scales, EPS
            )
            flat = [out.reshape(*low["x"].shape[:2], -1) for out in outs]
            return (jnp.concatenate(flat, -1) * low["d_out"]).astype(jnp.float32).sum()

        return jax.grad(total)(inputs["scales"])

    with interpreted():
        np.testing.assert_array_equal(gradient(), gradient())


@pytest.mark.parametrize(
    "heads, per_entry", [((16, 8), 4), ((28, 4), 4), ((14, 2), 2), ((7, 1), 1)]
)
def test_a_block_has_heads_of_one_part(heads, per_entry):
    actual = gpu.Heads(heads, heads[1], 128, 64)
    assert actual.group(4) == per_entry
    for first in range(0, sum(actual.parts), per_entry):
        owners = [part for part, local_value, _ in actual.owners(np.int32(first)) if local_value]
        starts = np.cumsum([0, *actual.parts])
        assert owners == [np.searchsorted(starts, first, "right") - 1]


def trace_for_hopper(case, name="NVIDIA H200"):
    from jax._src.mesh import AbstractDevice

    device = AbstractDevice(name, 132, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    provided = dataclasses.replace(case, tokens=64).inputs()
    shapes = [(1, case.tokens, provided[n].shape[-1]) for n in ("x", "cos", "sin")]
    dtypes = (jnp.bfloat16, jnp.float32, jnp.float32)
    arrays = [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, dtypes, strict=True)]
    scales = [jax.ShapeDtypeStruct((case.head_dim,), jnp.float32) for _ in case.counts]

    def loss(x, cos, sin, *scales):
        outs = op(case, "auto", x, cos, sin, scales or None)
        return sum(out.astype(jnp.float32).sum() for out in outs)

    with jax.sharding.use_abstract_mesh(mesh):
        step = jax.jit(jax.grad(loss))
        traced = step.trace(*arrays, *(scales if case.normed else []))
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("case", [c for c in CASES if "bench" in c.tags], ids=lambda c: c.name)
def test_lowers_for_a_hopper_gpu(case):
    require()
    assert "rotate_heads_back" in trace_for_hopper(case)


def test_other_gpus_are_left_to_xla():
    case = next(case for case in CASES if "bench" in case.tags)
    assert "rotate_heads_back" not in trace_for_hopper(case, "NVIDIA A100-SXM4-80GB")


@pytest.mark.parametrize(
    "shape, half, dtype, reason",
    [
        ((1, 512, 512), 64, jnp.float32, "takes bfloat16 and float32 angles, got float32"),
        ((1, 576, 512), 64, jnp.bfloat16, None),
        ((1, 544, 512), 64, jnp.bfloat16, "544 tokens must be a multiple of 64"),
        ((4, 64, 512), 64, jnp.bfloat16, "256 tokens must be .* at least 512"),
        ((1, 512, 512), 16, jnp.bfloat16, "32 rotated dims are no multiple of 64"),
        ((1, 512, 384), 48, jnp.bfloat16, "head dim 96 is none of"),
    ],
)
def test_declines(monkeypatch, shape, half, dtype, reason):
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda: None)
    taken = []
    monkeypatch.setattr(mosaic_gpu, "rotate_heads_with", lambda *_: taken.append(1))
    x, angle = jnp.zeros(shape, dtype), jnp.zeros((*shape[:2], half))
    arguments = (x, angle, angle, (2, 1), 96 if half == 48 else 128)
    if reason is None:
        rotate_heads(*arguments, impl="mosaic_gpu")
        assert taken
        return
    with pytest.raises(NotImplementedError, match=reason):
        rotate_heads(*arguments, impl="mosaic_gpu")
    assert rotate_heads(*arguments)[0].shape[2] == 2  # the next backend takes it
    assert not taken


def test_declines_arrays_that_are_spread_over_devices(monkeypatch):
    from jaxtrain_kernels import mosaic

    require()
    monkeypatch.setattr(mosaic, "device_kind", lambda: "NVIDIA H200")
    x, angle = jnp.zeros((1, 512, 512), jnp.bfloat16), jnp.zeros((1, 512, 64))
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((4,), ("fsdp",))):
        with pytest.raises(NotImplementedError, match="call it inside shard_map"):
            rotate_heads(x, angle, angle, (2, 1), 128, impl="mosaic_gpu")


def test_arguments_that_do_not_fit():
    x, angle = jnp.zeros((1, 8, 64)), jnp.zeros((1, 8, 8))
    with pytest.raises(ValueError, match="does not hold heads of 16 in"):
        rotate_heads(x, angle, angle, (4, 2), 16)
    with pytest.raises(ValueError, match="want twice"):
        rotate_heads(x, angle[:, :4], angle, (2, 1), 16)
    with pytest.raises(ValueError, match="want .16. for each of"):
        rotate_heads(x, angle, angle, (2, 1), 16, [jnp.ones(16)])
