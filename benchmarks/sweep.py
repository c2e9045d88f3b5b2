"""Time variants of the attention kernels on one GPU: what the tuned tables hold comes from this.

python benchmarks/sweep.py --case tree8k tree32k_h16_8_d64 --out benchmarks/results/sweep.json
python benchmarks/sweep.py --save    # and put the winners into kernels/jaxtrain_kernels/tuned
"""

import argparse
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
from harness import Report, jax_ms
from jaxtrain_kernels import Context, autotune
from jaxtrain_kernels.tree_attention import (
    blocks,
    cases,
    gpu_dkv,
    gpu_dq,
    gpu_fused,
    gpu_fwd,
    gpu_gather,
    gpu_tiles,
)

SHARED = {"programs": 0}  # thread blocks that go through many tiles, one per multiprocessor
MORE = {"compute_registers": 240, "memory_registers": 24}
LESS = {"compute_registers": 232, "memory_registers": 40}
HELD = {"in_registers": True}
AHEAD = {"ahead": True}  # a step's scores are queued before it begins
IN_TURN = {"ahead": False}
FORWARD = {
    64: [
        *({}, HELD, SHARED, {"stages": 3}, {"k_block": 256}, {"polynomial": 8}),
        *(AHEAD, AHEAD | {"stages": 4}, AHEAD | SHARED, AHEAD | {"polynomial": 8}),
        *(AHEAD | {"polynomial": 4}, AHEAD | HELD),
    ],
    128: [
        *({}, HELD, HELD | MORE, SHARED, {"q_stages": 1}, {"k_block": 64, "stages": 4}, MORE),
        AHEAD,
    ],
    192: [{}, HELD, SHARED, {"k_block": 64, "stages": 4}, MORE],
    256: [{}, SHARED, MORE],
}
DKV = {
    64: [{}, {"q_stages": 4}, LESS],
    128: [{}, {"q_stages": 3}, LESS],
    192: [{}, {"q_stages": 3}],
    256: [{}, LESS],
}
DQ = {
    64: [{}, HELD, SHARED, {"k_stages": 2, "v_stages": 2}, {"k_block": 128}],
    128: [
        *({}, HELD, SHARED, {"tile_stages": 1}, {"k_stages": 3, "v_stages": 2}, LESS),
        *({"k_block": 128}, HELD | {"k_stages": 3, "v_stages": 3, "tile_stages": 1}),
    ],
    192: [{}, SHARED, {"k_stages": 3, "v_stages": 3}, LESS],
    256: [{}, SHARED, {"k_stages": 1}],
}
FUSED = {
    64: [{}, HELD, IN_TURN, IN_TURN | HELD, IN_TURN | {"q_part": 128}],
    128: [{}, LESS],
    192: [],
    256: [],
}

TUNED = ("fwd", "dkv", "dq", "fused")  # kernels that read a table
GAIN = 0.99  # share of the default's time that a variant must stay below to be saved


class Inputs:
    """A case's arrays, its keys in both orders, and what the backward needs of the forward."""

    def __init__(self, case):
        arrays = {n: jnp.asarray(x) for n, x in case.inputs().items()}
        self.q, self.k, self.v, self.d_out = (
            arrays[n].astype(jnp.bfloat16) for n in ("q", "k", "v", "d_out")
        )
        self.case, self.T, self.H = case, self.q.shape[1], case.head_dim
        local_value = blocks.normalize(Context(arrays["until"], arrays.get("since")))
        arranged, arrangement = jax.jit(lambda c: blocks.arrange(c, self.T, None))(local_value)
        self.contexts = {False: local_value, True: arranged}
        self.arrangement = arrangement
        swapped = jax.jit(gpu_gather.gather)(arrangement.order, arrangement.moved, self.k, self.v)
        self.moved = {False: None, True: gpu_tiles.Moved(*swapped, arrangement.moved)}
        self.settings = gpu_tiles.Settings(self.H**-0.5, case.softcap, None)
        run, arguments = self.forward(gpu_fwd.heuristic(self.H), True)
        self.out, self.lse = jax.jit(run)(*arguments)
        delta = jnp.einsum(
            "BTNH,BTNH->BNT", self.d_out, self.out, preferred_element_type=jnp.float32
        )
        self.queries = gpu_tiles.Queries(self.q, self.d_out, self.lse, delta)

    def keys(self, q_block, k_block, arranged, transpose=False):
        context = self.contexts[arranged]
        pair = blocks.meet(context, self.T, q_block, k_block, None)
        lists = blocks.lists(*(x.swapaxes(1, 2) if transpose else x for x in pair))
        return gpu_tiles.describe_keys(self.k, self.v, context, lists, self.moved[arranged])

    def forward(self, config, arranged):
        def run(q, keys):
            return gpu_fwd.forward(q, keys, self.settings, config)

        return run, (self.q, self.keys(gpu_tiles.TILE, config.k_block, arranged))

    def backward(self, kernel, config, arranged):
        if kernel == "dq":
            keys = self.keys(gpu_tiles.TILE, config.k_block, arranged)
        else:
            keys = self.keys(config.q_block, gpu_dkv.key_tile(self.H), arranged, True)

        def run(queries, keys):
            if kernel == "dq":
                return gpu_dq.dq(queries, keys, self.settings, config)
            if kernel == "dkv":
                return gpu_dkv.dkv(queries, keys, self.settings, config)
            return gpu_fused.backward(queries, keys, self.settings, config)

        return run, (self.queries, keys)


def around(inputs, case, report):
    """Time the work around the kernels: the order of the keys, lists, copies, delta."""
    local_value, order = inputs.contexts[False], inputs.arrangement

    def metadata(context):
        arranged, order = blocks.arrange(context, inputs.T, None)
        meeting = blocks.meet(arranged, inputs.T, gpu_tiles.TILE, 128, None)
        return blocks.lists(*meeting), order

    def delta(d_out, out):
        return (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1).swapaxes(1, 2)

    def lists(context):
        return blocks.lists(*blocks.meet(context, inputs.T, gpu_tiles.TILE, 128, None))

    work = {
        "arrange + lists": (metadata, (local_value,)),
        "lists": (lists, (local_value,)),
        "gather": (gpu_gather.gather, (order.order, order.moved, inputs.k, inputs.v)),
        "gather back": (
            lambda back, k, v: gpu_gather.gather(back, None, k, v),
            (order.back, inputs.k, inputs.v),
        ),
        "delta": (delta, (inputs.d_out, inputs.out)),
    }
    for name, (function, arguments) in work.items():
        report.timed(0, lambda f=function, a=arguments: jax_ms(f, *a), kernel=name, case=case.name)


def sweep(case, report):
    inputs, H = Inputs(case), case.head_dim
    report.add(case=case.name, moved=str(inputs.arrangement.moved))
    flops = case.flops()
    around(inputs, case, report)
    work = [
        ("fwd", gpu_fwd.heuristic(H), FORWARD, 1.0),
        ("dkv", gpu_dkv.heuristic(H), DKV, 2.0),
        ("dq", gpu_dq.heuristic(H), DQ, 1.5),
        ("fused", gpu_fused.heuristic(H), FUSED, 2.5),
    ]
    for kernel, start, changes, units in work:
        plain = [({}, False)] if changes[H] else []
        for change, arranged in [*plain, *((change, True) for change in changes[H])]:

            def measure(kernel=kernel, start=start, change=change, arranged=arranged):
                config = dataclasses.replace(start, **change)
                if kernel == "fwd":
                    run, arguments = inputs.forward(config, arranged)
                else:
                    run, arguments = inputs.backward(kernel, config, arranged)
                return jax_ms(run, *arguments, budget_s=0.12)

            labels = {"kernel": kernel, "case": case.name, "change": change}
            report.timed(units * flops, measure, **labels, arranged=arranged)


def winner(case, kernel, rows) -> dict | None:
    """The table's entry of a kernel by the rows of its case; None where nothing was timed."""
    times = [
        (row["ms"], row["change"])
        for row in rows
        if (row.get("kernel"), row["case"]) == (kernel, case.name)
        and row.get("arranged")
        and "ms" in row
    ]
    default = [ms for ms, change in times if not change]
    if not default:
        return None
    ms, change = min(times, key=lambda pair: pair[0])
    if ms > GAIN * default[0]:
        ms, change = default[0], {}
    key = {"head_dim": case.head_dim, "window": case.window is not None}
    return {"key": key, "near": {"tokens": case.tokens}, "config": change, "ms": round(ms, 3)}


def save(swept, report):
    """Put the winners of all cases into the tables of this kind of device."""
    header = report.header
    source = f"{header['command']}, {header['hardware']}, jax {header['jax']}"
    for kernel in TUNED:
        entries = [e for case in swept if (e := winner(case, kernel, report.rows))]
        path = autotune.save(f"tree_attention_{kernel}", autotune.device_kind(), source, entries)
        print(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", nargs="*", default=[""], help="parts of names; default: all")
    parser.add_argument("--out", type=Path, help="all measurements as JSON")
    parser.add_argument("--save", action="store_true", help="winners go into the tuned tables")
    options = parser.parse_args()
    report = Report(options.out)
    swept = [
        case
        for case in cases.CASES
        if "tune" in case.tags and any(part in case.name for part in options.case)
    ]
    for case in swept:
        sweep(case, report)
    if options.save:
        save(swept, report)


if __name__ == "__main__":
    main()
