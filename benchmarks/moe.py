"""The mixture-of-experts layer for kernels.py: times of a forward and a whole step, and errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtrain_kernels import Adapters, moe_ffn
from jaxtrain_kernels.grouped_matmul.ffn import Biases
from timing import jax_ms, torch_ms

TRAINED = ("x", "gates", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")


def split(inputs, dtype):
    """(the choices, what has gradients by name, the cotangent)."""
    arrays = {n: jnp.asarray(x, dtype) for n, x in inputs.items() if n != "experts"}
    g = arrays.pop("g")
    return jnp.asarray(inputs["experts"]), {n: arrays[n] for n in TRAINED if n in arrays}, g


def layer(case, experts, impl, given, **options):
    biases = Biases(*(given.get(n) for n in ("b_gate", "b_up", "b_down")))
    weights = (given.get("w_gate"), given["w_up"], given["w_down"])
    options |= {"activation": case.activation, "biases": biases, "impl": impl}
    return moe_ffn(given["x"], experts, given["gates"], *weights, **options)


def whole_step(case, experts, impl):
    """Output and all gradients of the layer."""

    def step(given, g):
        out, pull = jax.vjp(functools.partial(layer, case, experts, impl), given)
        return {"out": out, **pull(g)[0]}

    return step


def expert_adapters(case, rank: int = 16):
    """a and b in float32 for the matrices of every expert."""
    rng = np.random.default_rng(1)
    D, F = case.width, case.hidden

    def factors(i, o):
        shapes = (case.experts, i, rank), (case.experts, rank, o)
        return tuple(jnp.asarray(0.02 * rng.standard_normal(s), jnp.float32) for s in shapes)

    return Adapters(factors(D, F) if case.gated else None, factors(D, F), factors(F, D))


def frozen_step(case, experts, impl):
    """Output and the gradients of x, gates and adapters, with frozen experts."""

    def step(x, gates, adapters, given, g):
        def run(x, gates, adapters):
            options = {"adapters": adapters, "freeze_experts": True}
            return layer(case, experts, impl, given | {"x": x, "gates": gates}, **options)

        out, pull = jax.vjp(run, x, gates, adapters)
        return out, pull(g)

    return step


def run_moe(case, impls, report):
    inputs, flops = case.inputs(), case.flops()
    experts, given, g = split(inputs, jnp.bfloat16)
    for impl in (impl for impl in impls if impl != "torch"):
        labels = {"op": "moe_ffn", "case": case.name, "impl": impl}
        timing = functools.partial(jax_ms, functools.partial(layer, case, experts, impl), given)
        report.timed(flops, timing, **labels, step="forward")
        timing = functools.partial(jax_ms, whole_step(case, experts, impl), given, g)
        report.timed(3 * flops, timing, **labels, step="both")
        for name, adapters in (("frozen", Adapters()), ("lora", expert_adapters(case))):
            step = frozen_step(case, experts, impl)
            rest = (given["x"], given["gates"], adapters, given, g)
            report.timed(2 * flops, functools.partial(jax_ms, step, *rest), **labels, step=name)
    if "torch" in impls:
        import torch_peers

        forward, both = torch_peers.grouped_layer(case, inputs)
        labels = {"op": "moe_ffn", "case": case.name, "impl": "torch_grouped_mm"}
        report.timed(flops, lambda: torch_ms(forward), **labels, step="forward")
        report.timed(3 * flops, lambda: torch_ms(both), **labels, step="both")


def moe_errors(case, impls, report):
    """Largest errors of the layer with the first 2,048 tokens; the plain maths runs in bfloat16."""
    case = dataclasses.replace(case, tokens=min(case.tokens, 2048))
    experts, given, g = split(case.inputs(), jnp.bfloat16)

    def results(impl, dtype):
        given_, g_ = jax.tree.map(lambda x: x.astype(dtype), (given, g))
        found = jax.jit(whole_step(case, experts, impl))(given_, g_)
        return {n: x.astype(jnp.float32) for n, x in found.items()}

    with jax.default_matmul_precision("highest"):
        exact = results("xla", jnp.float32)
    plain = results("xla", jnp.bfloat16)
    for impl in (impl for impl in impls if impl not in ("xla", "torch")):
        found, labels = results(impl, jnp.bfloat16), {"op": "moe_ffn", "case": case.name}
        rows = [[each[n] for n in exact] for each in (found, exact, plain)]
        report.errors(list(exact), *rows, **labels, impl=impl)
