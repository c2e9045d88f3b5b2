"""conv_heads' part of kernels.py: times beside XLA's, and errors.

The calls of several layers are timed in one program each, as the rows of a batch are the same for
all: what they read (`hops_of`) is found once. `tb_s` counts every number read once and written
once: x, and q, k and v or their gradients; in the backward x twice, as itself and as its gradient.
"""

import jax
import jax.numpy as jnp
from jaxtrain_kernels import conv_heads
from jaxtrain_kernels.conv_heads import gpu, hops_of
from timing import jax_ms

LAYERS = 4
SWEEP = [gpu.Config(*sizes) for sizes in ((16, 4, 4), (32, 4, 4), (64, 8, 8))]
"""(tokens, warps, gradient_warps)."""


def make_layers(case):
    """prev, and x, w and cotangents of each of LAYERS, drawn on the device."""
    inputs = case.inputs()
    low = ("x", "d_q", "d_k", "d_v")
    layers = []
    for key in jax.random.split(jax.random.key(0), LAYERS):
        keys = jax.random.split(key, len(low))
        drawn = [
            jax.random.normal(k, inputs[name].shape, jnp.bfloat16)
            for k, name in zip(keys, low, strict=True)
        ]
        layers.append((drawn[0], jnp.asarray(inputs["w"]), tuple(drawn[1:])))
    return jnp.asarray(inputs["prev"]), layers


def function_of(case, impl):
    """(x, w, prev, hops) -> q, k, v; impl: a backend or a Config."""

    def call(x, w, prev, hops):
        if isinstance(impl, gpu.Config):
            parts = gpu.ColumnParts(case.dim, case.width, case.taps, 1e-6, impl)
            return gpu.run(parts, x, w, case.dim, hops)
        return conv_heads(x, w, case.dim, case.dim, prev, hops=hops, impl=impl)

    return call


def time_layers(case, call, prev, layers, step: str) -> dict:
    """What jax_ms finds, for one of the layers."""

    def forward(prev, layers):
        hops = hops_of(prev, case.taps)
        return [call(x, w, prev, hops) for x, w, _ in layers]

    def backward(prev, layers):
        hops, found = hops_of(prev, case.taps), []
        for x, w, d_outs in layers:
            _, pull = jax.vjp(lambda x, w: call(x, w, prev, hops), x, w)
            found.append(pull(d_outs))  # what the forward gives is not asked for, nor computed
        return found

    found = jax_ms(forward if step == "forward" else backward, prev, layers)
    return found | {"ms": found["ms"] / LAYERS}


def run_conv_heads(case, impls, report):
    """Times of each backend; "sweep" in `impls`: of other sizes of the kernels, too."""
    arrays = make_layers(case)
    calls = {impl: function_of(case, impl) for impl in impls if impl not in ("torch", "sweep")}
    for config in SWEEP if "sweep" in impls else ():
        name = f"gpu_{config.tokens}_{config.warps}_{config.gradient_warps}"
        calls[name] = function_of(case, config)
    for name, call in calls.items():
        labels = {"op": "conv_heads", "case": case.name, "impl": name, "unit": "tb_s"}
        for step, size in zip(("forward", "backward"), case.moved_bytes(), strict=True):
            report.timed(
                size,
                lambda c=call, s=step: time_layers(case, c, *arrays, s),
                **labels,
                step=step,
            )


def conv_heads_errors(case, impls, report):
    """Largest errors against float32 maths on the same bfloat16 numbers."""
    prev, layers = make_layers(case)
    x, w, d_outs = layers[0]

    def results(impl, dtype):
        @jax.jit
        def both(x, w, d_outs):
            call = function_of(case, impl)
            outs, pull = jax.vjp(lambda x, w: call(x, w, prev, None), x, w)
            found = (*outs, *pull(d_outs))
            return [y.astype(jnp.float32) for y in found]

        return both(x.astype(dtype), w, tuple(d.astype(dtype) for d in d_outs))

    exact, plain = results("reference", jnp.float32), results("xla", jnp.bfloat16)
    for impl in (impl for impl in impls if impl not in ("xla", "torch", "sweep")):
        labels = {"op": "conv_heads", "case": case.name, "impl": impl}
        names = ("q", "k", "v", "dx", "dw")
        report.errors(names, results(impl, jnp.bfloat16), exact, plain, **labels)
