"""Compile Triton kernels for GPUs that are not there: what ptxas says about each.

Run by test_kernels_triton.py in its own process: `python triton_compile.py` lowers every kernel
through jax-triton for five generations and prints {target, case, kernel, registers, spills,
shared_kib, tensor_cores, in_flight} lines as JSON; `in_flight` says whether what it multiplies or
reduces goes to shared memory while it computes.
"""

import json
import re
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp

PTXAS = "/usr/local/cuda/bin/ptxas"
TARGETS = (80, 89, 90, 100, 120)  # A100; L4, RTX 40; H100; B200; RTX 50
MATMULS = ("mma.sync", "wgmma", "tcgen05.mma")


def report(case: str, function, *shapes, targets=TARGETS):
    from jax_triton import triton_lib
    from jaxtrain_kernels.triton_call import compile_for

    original, created = triton_lib.compile_ttir_to_ptx_inplace, []

    def recorded(*arguments):
        created.append(original(*arguments))
        return created[-1]

    triton_lib.compile_ttir_to_ptx_inplace = recorded
    try:
        for target in targets:
            created.clear()
            with compile_for(target):  # a new function, so that nothing traced is taken again
                traced = jax.jit(lambda *a: function(*a)).trace(*shapes)
                traced.lower(lowering_platforms=("cuda",))
            for kernel in created:
                print(json.dumps({"target": target, "case": case} | assembled(kernel)), flush=True)
    finally:
        triton_lib.compile_ttir_to_ptx_inplace = original


def assembled(kernel) -> dict:
    """Output of ptxas for a compiled kernel."""
    (arch,) = re.findall(r"\.target (sm_\w+)", kernel.binary)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.binary)
        file.flush()
        command = [PTXAS, f"-arch={arch}", "-v", file.name, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    (spills,) = re.findall(r"(\d+) bytes spill stores", done.stderr)
    (registers,) = re.findall(r"Used (\d+) registers", done.stderr)
    return {
        "kernel": kernel.name,
        "registers": int(registers),
        "spills": int(spills),
        "shared_kib": kernel.shared_mem_bytes / 1024,
        "tensor_cores": any(name in kernel.binary for name in MATMULS),
        "in_flight": "cp.async" in kernel.binary and "ld.global.v4" not in kernel.binary,
    }


def shape(*sizes, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def grouped(D, F, dtype="bfloat16", block=128, experts=8, tokens=1024):
    """Forward, dx and dw of float32 master weights."""
    from jaxtrain_kernels.grouped_matmul import grouped_matmul, routing

    def step(x, w, choice):
        routed = routing.route(choice, experts, block)

        def total(x, w):
            rows = routing.gather_in(x, routed)
            y = grouped_matmul(rows, w, routed.segments, impl="triton")
            return y.astype(jnp.float32).sum()

        return jax.value_and_grad(total, (0, 1))(x, w)

    shapes = (shape(tokens, D, dtype=dtype), shape(experts, D, F, dtype="float32"))
    return step, *shapes, shape(tokens, 1, dtype="int32")


def gathered(dtype="bfloat16", softcap=None, weighted=False, T=1024, D=1024, V=151936):
    """Values and gradients of log-probabilities of hidden states."""
    from jaxtrain_kernels import logp_gather, weighted_logp

    def step(hidden, head, targets):
        def total(hidden, head):
            options = {"softcap": softcap, "impl": "triton"}
            if weighted:
                weights = jnp.ones((T,))
                return weighted_logp(hidden, head, targets, weights, **options)[0]
            return logp_gather(hidden, head, targets, **options).logp.sum()

        return jax.value_and_grad(total, (0, 1))(hidden, head)

    return step, shape(T, D, dtype=dtype), shape(V, D, dtype=dtype), shape(T, dtype="int32")


def attended(H, V=None, dtype="bfloat16", T=1000, N=4, K=2, **options):
    """Forward, dq, dk and dv of a packed row."""
    from jaxtrain_kernels import Context, attention

    def step(q, k, v, until, positions):
        def total(q, k, v):
            context = Context(until, positions=positions)
            out = attention(q, k, v, context, impl="triton", **options)
            return out.astype(jnp.float32).sum()

        return jax.value_and_grad(total, (0, 1, 2))(q, k, v)

    heads = [shape(1, T, *head_shape, dtype=dtype) for head_shape in ((N, H), (K, H), (K, V or H))]
    return step, *heads, *[shape(1, T, dtype="int32")] * 2


def attention_cases():
    for H in (64, 128, 256):
        yield f"attention d{H}", attended(H)
        yield f"attention softcap d{H}", attended(H, softcap=30.0)
        yield f"attention window d{H}", attended(H, window=100)
        yield f"attention float32 d{H}", attended(H, dtype="float32")
    yield "attention d192 v128", attended(192, 128)
    yield "attention float16 d128 even", attended(128, dtype="float16", T=1024)


def cases():
    yield "moe 2048 768", grouped(2048, 768)
    yield "moe 2880 2880", grouped(2880, 2880)
    yield "moe 2048 768 float16", grouped(2048, 768, dtype="float16")
    for block in (64, 32, 16):
        yield f"moe 1024 512 block {block}", grouped(1024, 512, block=block)
    yield "moe rank 16", grouped(2048, 16)
    for dtype in ("bfloat16", "float16"):
        yield f"logp_gather {dtype}", gathered(dtype)
        yield f"logp_gather {dtype} softcap", gathered(dtype, 30.0, T=1000, V=151900)
    yield "weighted_logp", gathered(weighted=True)
    yield "weighted_logp softcap", gathered(weighted=True, softcap=30.0)


def main():
    expected = sys.argv[1] if len(sys.argv) > 1 else ""
    for name, call in attention_cases() if expected.startswith("attention") else cases():
        if expected in name:
            report(name, *call)


if __name__ == "__main__":
    main()
