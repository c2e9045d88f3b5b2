"""Training steps on one GPU and on several: rates, scaling, memory, at published sizes.

python benchmarks/pod.py --cases 0.6b llama-8b 128k --out benchmarks/results/pod_h200

Random weights and tokens; a row is one document, so attention sees the whole causal half. Every
program is compiled first, side by side, on shapes alone; then each is opened and runs. The step is
that of train_step.py, its columns likewise.

eff.      tok/s/GPU against that of the same case on the fewest GPUs
peak GiB  most bytes that the allocator of GPU 0 had in use, where that is a new high; "plan"
          is the compiler's own sum of arguments and temporaries
"""

import concurrent.futures
import dataclasses
import gc
import re
from collections import Counter
from pathlib import Path

import jax
from harness import (
    Table,
    allocated_gib,
    command_line,
    describe_devices,
    make_parser,
    planned_gib,
    shorten,
)
from train_step import Program, Setting

TIMED = 5
LONG = {"doc128k": {"timed": 2}, "doc1024k": {"timed": 1, "warm_up": 1}}
"""Fewer steps where one takes long."""


def settings(model: str, work: str, axes: list[dict[str, int]], **second) -> list[Setting]:
    """Return a program for each mesh."""
    second = {"remat": "save_attention"} | second
    return [Setting(model, work, mesh=tuple(mesh.items()), **second) for mesh in axes]


def fsdp(*sizes: int) -> list[dict[str, int]]:
    return [{"fsdp": size} for size in sizes]


LORA = {"lora": 16, "param_dtype": "bfloat16"}
QLORA = LORA | {"quantize": "nf4"}
ROOM = {"remat": "elementwise"}
WHOLE = {"remat": "none"}
ONE = ("qwen3-8b", "doc8k", [{}])
TINY = [{"fsdp": 2}, {"fsdp": 2, "context": 2}]
CASES = {
    "0.6b": settings("qwen3-0.6b", "doc8k", fsdp(1, 2, 4, 8), rows=2, remat="none"),
    "llama-8b": settings("llama-8b", "doc8k", fsdp(2, 4, 8)),
    "8b": settings("qwen3-8b", "doc8k", fsdp(2, 4, 8)),
    "4b": settings("qwen3-4b", "doc16k", fsdp(1, 4, 8)),
    "128k": settings("qwen3-0.6b", "doc128k", [{"context": 4}, {"context": 8}]),
    # A million tokens of context: two layers run, as a step of all takes minutes.
    "1m": [
        *settings("qwen3-0.6b", "doc1024k", [{"context": 4}, {"context": 8}], depth=2),
        *settings("qwen3-0.6b", "doc1024k", [{"context": 4}, {"context": 8}], note="not run"),
    ],
    "128k-2": settings("qwen3-0.6b", "doc128k", [{"context": 2}]),
    "tensor": settings("llama-8b", "doc8k", [{"fsdp": n, "tensor": 2} for n in (2, 4)]),
    "qlora": settings("qwen3-8b", "doc2k", [{}], **QLORA),
    "lora": settings(*ONE, **LORA),
    "qlora-8k": settings(*ONE, **QLORA),
    # With room for what they compute again otherwise.
    "llama-8b-room": settings("llama-8b", "doc8k", fsdp(2, 4, 8), **ROOM),
    "8b-room": settings("qwen3-8b", "doc8k", fsdp(2, 4, 8), **ROOM),
    "4b-room": settings("qwen3-4b", "doc16k", fsdp(1, 4, 8), **ROOM),
    "lora-room": settings(*ONE, **LORA, **ROOM),
    "lora-whole": settings(*ONE, **LORA, **WHOLE),
    "lora-unrolled": settings(*ONE, **LORA, **WHOLE, layers="unroll"),
    "qlora-room": settings(*ONE, **QLORA, **ROOM),
    "qlora-unrolled": settings(*ONE, **QLORA, **WHOLE, layers="unroll"),
    "tiny": settings("tiny", "tiny-doc", TINY),
    "tiny-qlora": settings("tiny", "tiny-doc", [{}], **QLORA),
}


def measure(program: Program) -> dict:
    """Rates and memory of a program, whose arrays are freed with it."""
    if program.setting.note == "not run":
        return {"plan_gib": planned_gib(program.compiled), "compile_s": program.compile_s}
    before = allocated_gib()
    row = program.measure(**LONG.get(program.setting.work, {"timed": TIMED}))
    after, devices = allocated_gib(), program.mesh.size
    metrics = program.run().metrics
    return row | {
        "plan_gib": row["peak_gib"],
        "peak_gib": after if after > before else None,
        "tokens_per_s_per_gpu": row["tokens_per_s"] / devices,
        "metrics": {name: float(total / weight) for name, (total, weight) in metrics.items()},
        "collectives": count_collectives(program.compiled.as_text()),
    }


def count_collectives(text: str) -> dict[str, int]:
    """Collectives in a compiled program by kind; those of one device do not count."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return dict(Counter(re.findall(rf" ({kinds})(?:-start)?\(", text)))


COLUMNS = (
    ("case", "name", "<15"),
    ("GPUs", "devices", ">5"),
    ("step s", "step_s", ">9.4f"),
    ("tok/s/GPU", "tokens_per_s_per_gpu", ">11,.0f"),
    ("MFU", "mfu", ">7.1%"),
    ("eff.", "efficiency", ">7.1%"),
    ("peak GiB", "peak_gib", ">10.1f"),
    ("plan", "plan_gib", ">7.1f"),
    ("compile s", "compile_s", ">11.1f"),
    ("loss", "loss", ">9.4f"),
)


def run(
    cases: list[tuple[str, Setting]],
    out: Path | None,
    command: str,
    kind: type[Program] = Program,
) -> Table:
    """Compile all cases that the devices hold, run each, and write the report after each."""
    table = Table(COLUMNS, out, command, **describe_devices())
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        programs = [pool.submit(kind, setting) for _, setting in cases]
        concurrent.futures.wait(programs)  # nothing compiles while steps are timed
        for name, setting in cases:
            row = {"name": name, "how": setting.label()} | dataclasses.asdict(setting)
            try:
                program = programs.pop(0).result()
                row |= {"devices": program.mesh.size} | measure(program)
                rows = [*table.rows, row]
                if "tokens_per_s_per_gpu" in row:
                    base = next(r for r in rows if r["name"] == name and "failed" not in r)
                    row["efficiency"] = row["tokens_per_s_per_gpu"] / base["tokens_per_s_per_gpu"]
            except Exception as reason:  # the other cases still count
                row["failed"] = shorten(reason)
            program = None
            gc.collect()
            table.add(row)
    return table


def main() -> None:
    parser = make_parser(__doc__)
    default = ["0.6b", "llama-8b", "8b", "4b", "128k"]
    parser.add_argument("--cases", nargs="+", choices=CASES, default=default)
    options = parser.parse_args()
    chosen = [(name, setting) for name in options.cases for setting in CASES[name]]
    fits = [(n, s) for n, s in chosen if s.num_devices <= jax.device_count()]
    run(fits, options.out, command_line())


if __name__ == "__main__":
    main()
