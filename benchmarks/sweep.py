"""Time the kernels' block sizes on one GPU: what `heuristic` chooses comes from this.

python benchmarks/sweep.py --case tree8k tree32k_h16_8_d64 --out benchmarks/results/sweep.json
"""

import argparse
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtrain_kernels.tree_attention import blocks, cases, gpu_bwd, gpu_fwd
from timing import jax_ms

from kernels import Report

FORWARD = {
    64: [{}, {"stages": 3}, {"k_block": 256}],
    128: [{}, {"k_block": 64, "stages": 4}, {"compute_registers": 240, "memory_registers": 24}],
    256: [{}, {"compute_registers": 240, "memory_registers": 24}],
}
DKV = {
    64: [{}, {"q_stages": 3}, {"q_stages": 4}],
    128: [{}, {"q_stages": 3}, {"compute_registers": 232, "memory_registers": 40}],
    256: [{}, {"compute_registers": 232, "memory_registers": 40}],
}
DQ = {
    64: [{}, {"k_block": 128}, {"k_stages": 3, "v_stages": 3}],
    128: [{}, {"k_block": 128}, {"k_stages": 3, "v_stages": 2}, {"k_stages": 3, "v_stages": 3}],
    256: [{}, {"k_stages": 1}],
}


def sweep(case, report):
    arrays = {n: jnp.asarray(x) for n, x in case.inputs().items()}
    q, k, v, d_out = (arrays[n].astype(jnp.bfloat16) for n in ("q", "k", "v", "d_out"))
    H, T = case.head_dim, case.tokens
    keys = blocks.Keys(*blocks.normalise(None, arrays["until"]))
    settings = {"scale": H**-0.5, "softcap": case.softcap, "window": None}
    flops = 4 * case.heads * H * case.pairs()

    def tiles(q_block, k_block, transpose=False):
        pair = blocks.meet(keys, None, T, q_block, k_block, None)
        return blocks.lists(*(x.swapaxes(1, 2) if transpose else x for x in pair))

    def forward(config):
        listed = jax.jit(lambda: tiles(gpu_fwd.TILE, config.k_block))()

        def run(q, k, v, keys, tiles):
            return gpu_fwd.forward(q, k, v, keys, None, tiles, config=config, **settings)

        return run, (q, k, v, keys, listed)

    run, arguments = forward(gpu_fwd.heuristic(H))
    out, lse = jax.jit(run)(*arguments)
    delta = jnp.einsum("BTNH,BTNH->BNT", d_out, out, preferred_element_type=jnp.float32)

    def backward(kernel):
        def made(config):
            if kernel is gpu_bwd.dkv:
                listed = tiles(config.q_block, gpu_bwd.key_tile(H), True)
            else:
                listed = tiles(gpu_fwd.TILE, config.k_block)

            def run(q, k, v, d_out, lse, delta, keys, tiles):
                arrays = (q, k, v, d_out, lse, delta, keys, None, tiles)
                return kernel(*arrays, config=config, **settings)

            return run, (q, k, v, d_out, lse, delta, keys, listed)

        return made

    work = [
        ("forward", FORWARD, 1.0, gpu_fwd.heuristic(H), forward),
        ("dkv", DKV, 2.0, gpu_bwd.heuristic(H), backward(gpu_bwd.dkv)),
        ("dq", DQ, 1.5, gpu_bwd.heuristic(H), backward(gpu_bwd.dq)),
    ]
    for name, changes, units, start, made in work:
        for change in changes[H]:

            def measure(start=start, change=change, made=made):
                run, arguments = made(dataclasses.replace(start, **change))
                return jax_ms(run, *arguments)

            report.timed(units * flops, measure, kernel=name, case=case.name, change=str(change))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", nargs="*", default=[""])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = Report(options.out)
    for case in cases.CASES:
        if "tune" in case.tags and any(part in case.name for part in options.case):
            sweep(case, report)


if __name__ == "__main__":
    main()
