"""Kernels beside their PyTorch peers, in one run on one GPU.

python benchmarks/kernels.py --op attention --out benchmarks/results/attention.json
python benchmarks/kernels.py --op logp_gather --case t8192 --impl xla torch

Prints a line per measurement and writes them as JSON. `tflops` counts useful work: 4 (forward) and
10 (backward) x heads x head dim (its mean with that of values) x visible pairs; 2 or 6 x T x D x V;
6 or 18 x rows x D x F, two thirds of that without a gate.
`share` is of the measured rate of large bf16 matmuls, on an H200. `error` is the largest error
against float32 maths, `plain_error` that of the same maths in bf16 by XLA.
"""

import argparse
from pathlib import Path

import conv
import decode
import delta
import jax
import jax.numpy as jnp
import moe
import numpy as np
import rotate
import vocabulary
from jaxtrain_kernels import Context, attention, logp_gather
from jaxtrain_kernels.conv_heads import cases as conv_cases
from jaxtrain_kernels.decode_attention import cases as decode_cases
from jaxtrain_kernels.gated_delta import cases as delta_cases
from jaxtrain_kernels.grouped_matmul import cases as moe_cases
from jaxtrain_kernels.logp_gather import cases as logp_cases
from jaxtrain_kernels.rotate_heads import cases as rotate_cases
from jaxtrain_kernels.tree_attention import cases as attention_cases
from jaxtrain_kernels.tree_attention import cudnn
from report import Report
from timing import jax_ms, torch_ms


def attention_function(case, arrays, impl):
    options = {"softcap": case.softcap, "window": case.window}
    if impl != "cudnn":
        options["sinks"] = arrays.get("sinks")
    names = ("until", "since", "positions", "key_positions")
    context = Context(*map(arrays.get, names))
    if impl == "cudnn":  # which would rather know how many documents there are
        options |= {"documents": len(case.forest()) * case.rows, "scale": case.head_dim**-0.5}
        return lambda q, k, v: cudnn.attention(q, k, v, context, **options)
    return lambda q, k, v: attention(q, k, v, context, impl=impl, **options)


def run_attention(case, impls, report):
    inputs = case.inputs()
    arrays = {n: jnp.asarray(x) for n, x in inputs.items()}
    q, k, v, d_out = (arrays[n].astype(jnp.bfloat16) for n in ("q", "k", "v", "d_out"))
    flops = case.flops()
    for impl in (impl for impl in impls if impl != "torch"):
        function = attention_function(case, arrays, impl)
        labels = {"op": "attention", "case": case.name, "impl": impl}
        report.timed(flops, lambda f=function: jax_ms(f, q, k, v), **labels, step="forward")

        def backward(function=function):
            _, pull = jax.vjp(jax.jit(function), q, k, v)
            return jax_ms(lambda pull, d_out: pull(d_out), pull, d_out)

        report.timed(2.5 * flops, backward, **labels, step="backward")
    if "torch" in impls and not case.sinks and case.window is None:
        import torch_peers

        for peer in ("flex", "sdpa"):
            labels = {"op": "attention", "case": case.name, "impl": "torch_" + peer}
            made = report.made(lambda p=peer: getattr(torch_peers, p)(case, inputs), **labels)
            if made is None:
                continue
            report.timed(flops, lambda m=made: torch_ms(m[0]), **labels, step="forward")
            report.timed(2.5 * flops, lambda m=made: torch_ms(m[1]), **labels, step="backward")


def attention_errors(case, impls, report):
    """Largest errors on the case's tree with two query heads and one key head."""
    inputs = case.inputs()
    arrays = {n: jnp.asarray(x) for n, x in inputs.items()}
    if case.sinks:
        arrays["sinks"] = arrays["sinks"][:2]
    low = [arrays[n][:, :, :h].astype(jnp.bfloat16) for n, h in (("q", 2), ("k", 1), ("v", 1))]
    d_out = arrays["d_out"][:, :, :2].astype(jnp.bfloat16)

    def results(impl, dtype):
        q, k, v = (x.astype(dtype) for x in low)
        out, pull = jax.vjp(jax.jit(attention_function(case, arrays, impl)), q, k, v)
        found = (out, *pull(d_out.astype(dtype)))
        return [np.asarray(x.astype(jnp.float32)) for x in found]

    with jax.default_matmul_precision("highest"):
        exact = results("xla", jnp.float32)
    plain = results("xla", jnp.bfloat16)
    for impl in (impl for impl in impls if impl not in ("xla", "torch")):
        names = ("out", "dq", "dk", "dv")
        labels = {"op": "attention", "case": case.name, "impl": impl}
        report.errors(names, results(impl, jnp.bfloat16), exact, plain, **labels)


def run_logp_gather(case, impls, report):
    inputs = case.inputs()
    hidden, head = (jnp.asarray(inputs[n], jnp.bfloat16) for n in ("hidden", "head"))
    targets = jnp.asarray(inputs["targets"])
    flops = 2 * case.tokens * case.width * case.vocabulary
    for impl in (impl for impl in impls if impl != "torch"):
        labels = {"op": "logp_gather", "case": case.name, "impl": impl}

        def loss(hidden, head, impl=impl):
            return logp_gather(hidden, head, targets, impl=impl).logp.sum()

        report.timed(flops, lambda f=loss: jax_ms(f, hidden, head), **labels, step="forward")
        both = jax.grad(loss, (0, 1))
        report.timed(3 * flops, lambda f=both: jax_ms(f, hidden, head), **labels, step="both")
    if "torch" in impls:
        import torch_peers

        for chunks in (1, 8):
            step = torch_peers.compiled_logp(inputs, chunks)
            labels = {"op": "logp_gather", "case": case.name, "impl": f"torch_compile_{chunks}"}
            report.timed(3 * flops, lambda f=step: torch_ms(f), **labels, step="both")


def logp_gather_errors(case, impls, report):
    """Largest errors of the values and gradients, with random cotangents for all three."""
    inputs = case.inputs()
    low = [jnp.asarray(inputs[n], jnp.bfloat16) for n in ("hidden", "head")]
    targets, g = jnp.asarray(inputs["targets"]), jnp.asarray(inputs["g"])

    def results(impl, dtype):
        @jax.jit
        def both(hidden, head, g):
            out, pull = jax.vjp(lambda x, w: logp_gather(x, w, targets, impl=impl), hidden, head)
            return (*out, *pull(type(out)(*g, jnp.zeros_like(out.top))))

        return [x.astype(jnp.float32) for x in both(*(x.astype(dtype) for x in low), g)]

    with jax.default_matmul_precision("highest"):
        exact = results("xla", jnp.float32)
    plain = results("xla", jnp.bfloat16)
    for impl in (impl for impl in impls if impl not in ("xla", "torch")):
        names = ("logp", "entropy", "lse", "top", "d_hidden", "d_head")
        labels = {"op": "logp_gather", "case": case.name, "impl": impl}
        report.errors(names, results(impl, jnp.bfloat16), exact, plain, **labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--op",
        choices=[
            "attention",
            "conv_heads",
            "decode_attention",
            "gated_delta",
            "logp_gather",
            "weighted_logp",
            "moe",
            "rotate_heads",
        ],
        nargs="+",
        required=True,
    )
    parser.add_argument("--case", nargs="*", default=[""], help="parts of case names")
    parser.add_argument("--impl", nargs="+", default=["mosaic_gpu", "xla", "torch"])
    parser.add_argument("--errors", action="store_true", help="numerics instead of times")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = Report(options.out)
    runners = {
        "attention": (attention_cases, attention_errors if options.errors else run_attention),
        "logp_gather": (logp_cases, logp_gather_errors if options.errors else run_logp_gather),
        "weighted_logp": (
            logp_cases,
            vocabulary.weighted_logp_errors if options.errors else vocabulary.run_weighted_logp,
        ),
        "decode_attention": (
            decode_cases,
            decode.decode_attention_errors if options.errors else decode.run_decode_attention,
        ),
        "gated_delta": (
            delta_cases,
            delta.gated_delta_errors if options.errors else delta.run_gated_delta,
        ),
        "conv_heads": (
            conv_cases,
            conv.conv_heads_errors if options.errors else conv.run_conv_heads,
        ),
        "rotate_heads": (
            rotate_cases,
            rotate.rotate_heads_errors if options.errors else rotate.run_rotate_heads,
        ),
        "moe": (moe_cases, moe.moe_errors if options.errors else moe.run_moe),
    }
    for op in options.op:
        cases, runner = runners[op]
        for case in cases.CASES:
            if "bench" in case.tags and any(part in case.name for part in options.case):
                runner(case, options.impl, report)


if __name__ == "__main__":
    main()
