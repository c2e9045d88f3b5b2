"""Compile Triton kernels to Hopper machine code without a GPU: what ptxas says about each.

Run by test_kernels_decode_attention_gpu.py in a process of its own, as sm90a.py is, with `FLAGS` as
XLA's: `python sm90a_triton.py FOLDER` prints {case, kernel, registers, spills, in_flight} lines as
JSON; `in_flight` says whether loads go to shared memory while the program computes.
"""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from sm90a import compile_for_h200

FLAGS = "--xla_dump_to={folder} --xla_dump_emitter_re=.* --xla_gpu_dump_llvmir=true"
PTXAS = "/usr/local/cuda/bin/ptxas"


def report(folder: Path, case: str, function, *shapes):
    for old in folder.glob("*"):
        old.unlink()
    compile_for_h200(function, *shapes)
    for path in sorted(folder.glob("*.ptx")):
        done = subprocess.run(
            [PTXAS, "-arch=sm_90a", "-v", str(path), "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        )
        names = re.findall(r"entry function '(\w+)'", done.stderr)
        if not names:  # a library's, such as that of sorts
            continue
        (name,) = names
        (spills,) = re.findall(r"(\d+) bytes spill stores", done.stderr)
        (registers,) = re.findall(r"Used (\d+) registers", done.stderr)
        row = {"case": case, "kernel": name, "registers": int(registers), "spills": int(spills)}
        row |= {"in_flight": "cp.async" in path.read_text()}
        print(json.dumps(row), flush=True)


def decode_call(head_dim, dtype, heads=16, softcap=None, stored=None):
    """stored: the dtype of the cache's codes, where it has these."""
    from jaxtrain_kernels import decode_attention

    q = jax.ShapeDtypeStruct((128, heads, head_dim), dtype)
    cache = jax.ShapeDtypeStruct((4, 128, 1280, 8, head_dim), stored or dtype)
    scales = [jax.ShapeDtypeStruct(cache.shape[:-1], jnp.float32)] * 2 if stored else []
    layer, *rows = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), *[(128,)] * 3))

    def call(q, k, v, layer, until, leader, shared, *scales):
        named = dict(zip(("k_scale", "v_scale"), scales, strict=bool(scales)))
        named |= {"leader": leader, "shared": shared}
        return decode_attention(q, k, v, layer, until, softcap=softcap, impl="gpu", **named)

    return call, q, cache, cache, layer, *rows, *scales


def delta_step():
    """Decode step with one token of 64 rows, 16 key and 32 value heads of 128 dims."""
    from jaxtrain_kernels import gated_delta

    heads = [jax.ShapeDtypeStruct((64, 1, n, 128), jnp.bfloat16) for n in (16, 16, 32)]
    gates = [jax.ShapeDtypeStruct((64, 1, 32), jnp.float32)] * 2
    until = jax.ShapeDtypeStruct((64, 1), jnp.int32)
    state = jax.ShapeDtypeStruct((64, 32, 128, 128), jnp.float32)
    return (
        lambda *a: gated_delta(*a[:6], state=a[6], impl="gpu_decode"),
        *(*heads, *gates, until, state),
    )


def conv_heads_call():
    """8,192 tokens, 16 key heads of 128 dims with two value heads each: forward and backward."""
    from jaxtrain_kernels import conv_heads

    heads = [jax.ShapeDtypeStruct((1, 8192, n, 128), jnp.bfloat16) for n in (16, 16, 32)]
    x = jax.ShapeDtypeStruct((1, 8192, 16 * 512 + 4096), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((16, 512, 4), jnp.float32)
    prev = jax.ShapeDtypeStruct((1, 8192), jnp.int32)

    def both(x, w, prev, *d_outs):
        outs, pull = jax.vjp(lambda x, w: conv_heads(x, w, 128, 128, prev, impl="gpu"), x, w)
        return outs, pull(d_outs)

    return both, x, w, prev, *heads


def main():
    folder = Path(sys.argv[1])
    for head_dim, dtype in itertools.product((64, 128, 256), ("bfloat16", "float32")):
        for softcap in (None, 30.0):
            name = f"d{head_dim} {dtype}" + (" softcap" if softcap else "")
            report(folder, name, *decode_call(head_dim, dtype, softcap=softcap))
    report(folder, "d128 bfloat16 16 to 1", *decode_call(128, "bfloat16", heads=128))
    for head_dim, stored in itertools.product((64, 128, 256), ("int8", "float8_e4m3fn")):
        report(folder, f"d{head_dim} {stored}", *decode_call(head_dim, "bfloat16", stored=stored))
    report(folder, "delta", *delta_step())
    report(folder, "conv", *conv_heads_call())


if __name__ == "__main__":
    main()
