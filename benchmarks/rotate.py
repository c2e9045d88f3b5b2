"""rotate_heads' part of kernels.py: times, errors and variants.

The calls of several layers are timed in one program each, as they are shorter than a launch from
the host may take. `tb_s` counts every number read once and written once: of the heads, of the
angles, and in the backward with a norm of the heads that it recomputes.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtrain_kernels import rotate_heads
from jaxtrain_kernels.rotate_heads import gpu, mosaic_gpu
from timing import jax_ms, torch_ms

LAYERS = 8
EPS = 1e-6
SWEEP = [gpu.Config(heads, back) for heads, back in ((4, 2), (2, 1), (8, 2), (1, 1), (2, 2))]


def make_arrays(case):
    """cos and sin; x, the heads' cotangents and scales of each of LAYERS, drawn on the device."""
    inputs = dataclasses.replace(case, tokens=64).inputs()
    cos, sin = (
        jnp.tile(jnp.asarray(inputs[name]), (1, case.tokens // 64, 1)) for name in ("cos", "sin")
    )
    B, T, H = case.rows, case.tokens, case.head_dim
    parts = (*case.counts, *([case.passed] if case.passed else []))
    xs, d_outs = [], []
    for key in jax.random.split(jax.random.key(0), LAYERS):
        keys = jax.random.split(key, len(parts) + 1)
        xs.append(jax.random.normal(keys[0], (B, T, sum(parts) * H), jnp.bfloat16))
        shapes = [(B, T, count, H) for count in parts]
        d_outs.append(
            tuple(
                jax.random.normal(key, shape, jnp.bfloat16)
                for key, shape in zip(keys[1:], shapes, strict=True)
            )
        )
    scales = [jnp.asarray(inputs["scales"])] * LAYERS if case.normed else [None] * LAYERS
    return cos, sin, xs, d_outs, scales


def function_of(case, impl):
    def call(x, cos, sin, scales):
        scales = None if scales is None else list(scales)
        return rotate_heads(x, cos, sin, case.counts, case.head_dim, scales, eps=EPS, impl=impl)

    return call


def with_config(case, config):
    heads = gpu.Heads(case.counts, case.passed, case.head_dim, case.half)

    def call(x, cos, sin, scales):
        scales = None if scales is None else list(scales)
        return mosaic_gpu.rotate_heads_with(config, heads, x, cos, sin, scales, EPS)

    return call


def time_layers(call, cos, sin, xs, d_outs, scales, step: str) -> dict:
    """What jax_ms finds, for one of the layers."""

    def forward(xs, cos, sin, scales):
        return [call(x, cos, sin, scale) for x, scale in zip(xs, scales, strict=True)]

    def backward(xs, cos, sin, scales, d_outs):
        found = []
        for x, scale, d_out in zip(xs, scales, d_outs, strict=True):
            _, pull = jax.vjp(lambda x, scale: call(x, cos, sin, scale), x, scale)
            found.append(pull(d_out))  # what the forward gives is not asked for, nor computed
        return found

    if step == "forward":
        found = jax_ms(forward, xs, cos, sin, scales)
    else:
        found = jax_ms(backward, xs, cos, sin, scales, d_outs)
    return found | {"ms": found["ms"] / LAYERS}


def run_rotate_heads(case, impls, report):
    """Times of each backend; "sweep" in `impls`: of the variants of the kernels, too."""
    arrays = make_arrays(case)
    calls = {impl: function_of(case, impl) for impl in impls if impl not in ("torch", "sweep")}
    if "sweep" in impls:
        for config in SWEEP:
            name = f"mosaic_gpu_{config.heads}_{config.gradient_heads}"
            calls[name] = with_config(case, config)
    work = dict(zip(("forward", "backward"), case.moved_bytes(), strict=True))
    for name, call in calls.items():
        labels = {"op": "rotate_heads", "case": case.name, "impl": name, "unit": "tb_s"}
        for step, size in work.items():
            report.timed(
                size, lambda c=call, s=step: time_layers(c, *arrays, s), **labels, step=step
            )
    if "torch" in impls:
        del arrays, calls
        import rotate_peers

        labels = {"op": "rotate_heads", "case": case.name, "impl": "torch_compile", "unit": "tb_s"}
        steps = rotate_peers.compiled(case, LAYERS)
        for (step, size), run in zip(work.items(), steps, strict=True):

            def timing(run=run):
                found = torch_ms(run)
                return found | {"ms": found["ms"] / LAYERS}

            report.timed(size, timing, **labels, step=step)


def rotate_heads_errors(case, impls, report):
    """Largest errors against float32 maths on the same bfloat16 heads."""
    cos, sin, xs, d_outs, scales = make_arrays(case)

    def results(impl, dtype):
        @jax.jit
        def both(x, scales, d_out):
            call = function_of(case, impl)
            outs, pull = jax.vjp(lambda x, s: call(x, cos, sin, s), x, scales)
            dx, d_scales = pull(tuple(d.astype(dtype) for d in d_out))
            flat = [out.reshape(*x.shape[:2], -1) for out in outs]
            found = [jnp.concatenate(flat, axis=-1), dx, *([d_scales] if case.normed else [])]
            return [y.astype(jnp.float32) for y in found]

        return both(xs[0].astype(dtype), scales[0], d_outs[0])

    exact = results("reference", jnp.float32)
    plain = results("xla", jnp.bfloat16)
    for impl in (impl for impl in impls if impl not in ("xla", "torch", "sweep")):
        names = ("out", "dx", *(["d_scales"] if case.normed else []))
        labels = {"op": "rotate_heads", "case": case.name, "impl": impl}
        report.errors(names, results(impl, jnp.bfloat16), exact, plain, **labels)
