"""The parts of gated_delta's Hopper backend one by one: times, and errors beside XLA's.

    python benchmarks/delta_parts.py [--cases one8k_h16_32 tree8k_h16_32] [--out parts.json]

Errors are relative norms beside XLA with float32 operands; `plain_relative` is XLA with bfloat16
operands, whose error a kernel may reach twice.
"""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
from delta import INPUTS, low_inputs
from jaxtrain_kernels.gated_delta import (
    gpu_order,
    gpu_prepare,
    gpu_walk,
    mosaic_gpu,
    xla,
)
from jaxtrain_kernels.gated_delta.cases import CASES
from report import Report
from timing import jax_ms


def time_parts(case, report):
    arrays = low_inputs(case)
    until, prev = arrays["until"], arrays["prev"]
    prev = None if len(case.forest()) == 1 else prev
    inputs = [arrays[name] for name in INPUTS]
    options = mosaic_gpu.choose_options(inputs[0], inputs[2], prev is None)
    links, slots = gpu_order.order_rows(prev, until, options.lanes)
    ordered = jax.jit(functools.partial(mosaic_gpu._in_order, options, links))(*inputs)
    T, P = jax.jit(gpu_prepare.prepare)(ordered, links)
    bare, ordered = ordered, ordered._replace(T=T, P=P)
    labels = {"op": "gated_delta", "case": case.name, "chunks": int(links.total.sum())}

    def walk(states, links, ordered):
        return gpu_walk.walk(links, ordered, None, slots, states=states)

    steps = {
        "cut": lambda: jax_ms(
            lambda u: tuple(gpu_order.order_rows(prev, u, options.lanes)[0]), until
        ),
        "order": lambda: jax_ms(functools.partial(mosaic_gpu._in_order, options, links), *inputs),
        "prepare": lambda: jax_ms(gpu_prepare.prepare, bare, links),
        "walk": lambda: jax_ms(functools.partial(walk, False), links, ordered),
        "walk states": lambda: jax_ms(functools.partial(walk, True), links, ordered),
    }
    for name, measure in steps.items():
        report.timed(1.0, measure, **labels, step=name)

    def whole(*inputs, function):
        return function(*inputs, until, prev)[0]

    measure = functools.partial(whole, function=mosaic_gpu.gated_delta)
    report.timed(1.0, lambda: jax_ms(measure, *inputs), **labels, step="forward")
    return measure, whole, inputs, labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="*", default=[c.name for c in CASES if "bench" in c.tags])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    report = Report(given.out)
    for case in (case for case in CASES if case.name in given.cases):
        kernels, whole, inputs, labels = time_parts(case, report)
        if case.tokens > 10_000:
            continue
        plain = jax.jit(functools.partial(whole, function=xla.gated_delta))
        wide = [x.astype(jnp.float32) for x in inputs]
        exact = plain(*wide)
        found, beside = (f(*inputs).astype(jnp.float32) for f in (jax.jit(kernels), plain))
        report.errors(["o"], [found], [exact], [beside], **labels)


if __name__ == "__main__":
    main()
