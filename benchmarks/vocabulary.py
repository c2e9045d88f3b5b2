"""The vocabulary ops' part of kernels.py: times and errors of weighted_logp.

`weighted_logp` is a loss and its gradients, so its peers are whole losses: torch.compile, Liger
Kernel and cut-cross-entropy (those two where they are installed). `temp_mib` is memory beside
inputs and results.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtrain_kernels import weighted_logp
from timing import jax_ms, torch_ms


def weighted_arrays(case):
    inputs = case.inputs()
    hidden, head = (jnp.asarray(inputs[n], jnp.bfloat16) for n in ("hidden", "head"))
    weights = jnp.abs(jnp.asarray(inputs["g"][0]))
    return hidden, head, jnp.asarray(inputs["targets"]), weights


def run_weighted_logp(case, impls, report):
    arrays = weighted_arrays(case)
    flops = 2 * case.tokens * case.width * case.vocabulary
    for impl in (impl for impl in impls if impl != "torch"):
        labels = {"op": "weighted_logp", "case": case.name, "impl": impl}

        def loss(*arrays, impl=impl):
            return weighted_logp(*arrays, impl=impl)[0]

        report.timed(flops, lambda f=loss: jax_ms(f, *arrays), **labels, step="forward")
        both = jax.value_and_grad(loss, (0, 1))
        report.timed(3 * flops, lambda f=both: jax_ms(f, *arrays), **labels, step="both")
    if "torch" in impls:
        import torch_peers
        import vocabulary_peers

        inputs = case.inputs()
        del arrays
        peers = {
            "torch_compile_1": functools.partial(torch_peers.compiled_logp, chunks=1),
            "torch_compile_8": functools.partial(torch_peers.compiled_logp, chunks=8),
            "liger": vocabulary_peers.liger,
            "cut_cross_entropy": vocabulary_peers.cut_cross_entropy,
            "cut_cross_entropy_exact": functools.partial(
                vocabulary_peers.cut_cross_entropy, exact=True
            ),
        }
        for name, make in peers.items():
            labels = {"op": "weighted_logp", "case": case.name, "impl": name, "step": "both"}
            report.timed(3 * flops, lambda make=make: torch_ms(make(inputs)), **labels)


def weighted_logp_errors(case, impls, report):
    """Largest errors of the values and gradients of the weighted sum."""
    hidden, head, targets, weights = weighted_arrays(case)

    def results(impl, dtype):
        @jax.jit
        def both(hidden, head):
            def call(hidden, head):
                return weighted_logp(hidden, head, targets, weights, impl=impl)

            (total, scores), gradients = jax.value_and_grad(call, (0, 1), has_aux=True)(
                hidden, head
            )
            return *scores, total, *gradients

        return [x.astype(jnp.float32) for x in both(hidden.astype(dtype), head.astype(dtype))]

    with jax.default_matmul_precision("highest"):
        exact = results("xla", jnp.float32)
    plain = results("xla", jnp.bfloat16)
    for impl in (impl for impl in impls if impl not in ("xla", "torch")):
        names = ("logp", "entropy", "lse", "top", "sum", "d_hidden", "d_head")
        labels = {"op": "weighted_logp", "case": case.name, "impl": impl}
        report.errors(names, results(impl, jnp.bfloat16), exact, plain, **labels)
