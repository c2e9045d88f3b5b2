"""The gated delta rule in kernels.py: times beside flash-linear-attention's Triton kernels, errors.

flash-linear-attention knows packed documents (cu_seqlens) and no trees: its rows of `branches` are
every branch of the case's forest alone, which for documents is the forest itself. Queries and keys
come normalized to both, so that neither side's own normalization is in the figures. `chunks` says
whether a forward of the Hopper kernels finds the row's chunks ("found") or is handed them
("given"), as by a model, which finds them once for all layers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtrain_kernels import gated_delta
from jaxtrain_kernels.gated_delta import find_chunks
from timing import jax_ms, torch_ms

INPUTS = ("q", "k", "v", "g", "beta")


def low_inputs(case):
    """The case's arrays on the device: q, k, v and d_out in bfloat16."""
    arrays = {name: jnp.asarray(x) for name, x in case.inputs().items()}
    low = ("q", "k", "v", "d_out")
    return arrays | {name: arrays[name].astype(jnp.bfloat16) for name in low}


def count_flops(case, tokens: int) -> float:
    """Of the forward pass in chunks of 64, without what is recomputed; see docs/kernels.md."""
    K, V, C = case.key_dim, case.value_dim, 64
    shared = 4 * C * K * case.key_heads / case.value_heads
    return case.rows * tokens * case.value_heads * (6 * K * V + 4 * C * V + shared)


def branch_tokens(case) -> tuple[np.ndarray, np.ndarray]:
    """(packed tokens of every branch one after the other, where each begins and the end)."""
    nodes = case.forest()
    starts = np.cumsum([0] + [size for size, _ in nodes])
    parents = {parent for _, parent in nodes}
    taken, ends = [], [0]
    for leaf in (node for node in range(len(nodes)) if node not in parents):
        path, node = [], leaf
        while node >= 0:
            path.append(np.arange(starts[node], starts[node + 1]))
            node = nodes[node][1]
        taken += path[::-1]
        ends.append(ends[-1] + sum(map(len, path)))
    return np.concatenate(taken), np.array(ends)


def run_gated_delta(case, impls, report):
    arrays = low_inputs(case)
    context = (arrays["until"], arrays["prev"])
    inputs = [arrays[name] for name in INPUTS]
    tokens = sum(size for size, _ in case.forest())
    flops = count_flops(case, tokens)
    for impl in (impl for impl in impls if impl != "torch"):
        labels = {"op": "gated_delta", "case": case.name, "impl": impl}

        def function(*inputs, chunks=None, impl=impl):
            return gated_delta(*inputs, *context, chunks=chunks, impl=impl)[0]

        def backward(function=function):
            _, pull = jax.vjp(jax.jit(function), *inputs)
            return jax_ms(lambda pull, d_out: pull(d_out), pull, arrays["d_out"])

        def with_chunks(function=function):
            given = lambda chunks, *inputs: function(*inputs, chunks=chunks)  # noqa: E731
            return jax_ms(given, find_chunks(*context), *inputs)

        forward = functools.partial(jax_ms, function, *inputs)
        found = {"chunks": "found"} if impl == "mosaic_gpu" else {}
        report.timed(flops, forward, **labels, **found, step="forward")
        if found:
            report.timed(flops, with_chunks, **labels, chunks="given", step="forward")
        report.timed(2 * flops, backward, **labels, step="backward")
    if "torch" in impls:
        index, ends = branch_tokens(case)
        labels = {"op": "gated_delta", "case": case.name, "impl": "fla", "tokens": len(index)}
        forward, backward = peer(arrays, index, ends)
        # Useful work: what the forest's tokens need once.
        report.timed(flops, lambda: torch_ms(forward), **labels, step="forward")
        report.timed(2 * flops, lambda: torch_ms(backward), **labels, step="backward")


def peer(arrays, index, ends):
    """(forward, backward) of flash-linear-attention on these tokens of the first row."""
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def put(name):
        x = arrays[name]
        dtype = torch.float32 if x.dtype == jnp.float32 else torch.bfloat16
        taken = torch.from_numpy(np.asarray(x[:1, index].astype(jnp.float32)))
        return taken.cuda().to(dtype).requires_grad_(name != "d_out")

    inputs, d_out = [put(name) for name in INPUTS], put("d_out")
    places = torch.from_numpy(ends).cuda() if len(ends) > 2 else None
    attend = functools.partial(chunk_gated_delta_rule, scale=1.0, cu_seqlens=places)

    def forward():
        with torch.no_grad():
            return attend(*inputs)[0]

    out = attend(*inputs)[0]

    def backward():
        return torch.autograd.grad(out, inputs, d_out, retain_graph=True)

    return forward, backward


def gated_delta_errors(case, impls, report):
    """Largest errors on the case's forest with two value heads on one key head."""
    arrays = low_inputs(case)
    arrays |= {name: arrays[name][:, :, :1] for name in ("q", "k")}
    arrays |= {name: arrays[name][:, :, :2] for name in ("v", "g", "beta", "d_out")}
    context = (arrays["until"], arrays["prev"])

    def results(impl, dtype):
        given = [x if x.dtype == jnp.float32 else x.astype(dtype) for x in map(arrays.get, INPUTS)]
        function = jax.jit(lambda *x: gated_delta(*x, *context, impl=impl)[0])
        out, pull = jax.vjp(function, *given)
        found = (out, *pull(arrays["d_out"].astype(dtype)))
        return [np.asarray(x.astype(jnp.float32)) for x in found]

    with jax.default_matmul_precision("highest"):
        exact = results("xla", jnp.float32)
    plain = results("xla", jnp.bfloat16)
    names = ("out", "dq", "dk", "dv", "dg", "dbeta")
    for impl in (impl for impl in impls if impl not in ("xla", "torch")):
        labels = {"op": "gated_delta", "case": case.name, "impl": impl}
        report.errors(names, results(impl, jnp.bfloat16), exact, plain, **labels)
    index, ends = branch_tokens(case)
    if "torch" in impls and len(index) == sum(size for size, _ in case.forest()):
        forward, backward = peer(arrays, index, ends)
        found = [np.asarray(x.float().cpu()) for x in (forward(), *backward())]
        exact, plain = ([x[:1, index] for x in results] for results in (exact, plain))
        labels = {"op": "gated_delta", "case": case.name, "impl": "fla"}
        report.errors(names, found, exact, plain, **labels)
