"""A whole optimizer step of mixtures of experts: full, LoRA, and LoRA on experts in few bits.

python benchmarks/experts_step.py --out benchmarks/results/experts_step_h200
python benchmarks/experts_step.py --cases tiny      # on a CPU, to see that it works

Shapes of Qwen3-30B-A3B and gpt-oss-20b with random weights, rows of one document of random tokens.
Each case runs in a process of its own under a time limit, jaxtrain's (train_step.py's Program) and
PyTorch's (peers/experts.py) in turn; rows are written as they come.

step s       median; tok/s: tokens a second. Cases are cut to `layers` where that is given
peak GiB     jaxtrain: the compiler's sum of arguments and temporaries; PyTorch: allocator's peak
             in the timed steps
process GiB  jaxtrain: the allocator's peak from the start, so with drawing and quantizing weights
"""

import argparse
import contextlib
import dataclasses

import numpy as np
from harness import (
    Table,
    allocated_gib,
    append_line,
    command_line,
    make_parser,
    measure_children,
    shorten,
)
from step_work import MODELS, WORKS


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to run a step."""

    by: str
    """jaxtrain | torch | torch eager (without torch.compile) | unpack (a layer's dequantization)"""
    model: str
    work: str
    rows: int
    layers: int = 0
    """0: all of the model's."""
    lora: int = 0
    target: str = "all-linear"
    quantize: str = "none"
    remat: str = "full"

    def label(self) -> str:
        """Return the description in the table."""
        words = [f"{self.layers} layers"] if self.layers else []
        words += [f"LoRA {self.lora} {self.target}"] if self.lora else ["full"]
        words += [self.quantize] if self.quantize != "none" else []
        return ", ".join(words)


def both(*cases: Case) -> list[Case]:
    """Each case by jaxtrain and by PyTorch."""
    return [dataclasses.replace(case, by=by) for case in cases for by in ("jaxtrain", "torch")]


QWEN, OSS = ("qwen3-30b-a3b", "doc4k", 4), ("gpt-oss-20b", "doc4k", 2)
CASES = {
    "unpack": [Case("unpack", *QWEN, quantize="nf4")],
    "qwen-nf4": [
        *both(Case("", *QWEN, lora=16, quantize="nf4")),
        Case("torch eager", *QWEN, lora=16, quantize="nf4"),
    ],
    "oss-packed": [Case("jaxtrain", *OSS, lora=16, target="attention", quantize="mxfp4")],
    "qwen-lora": [
        *both(Case("", *QWEN, layers=12, lora=16)),
        Case("torch eager", *QWEN, layers=12, lora=16),
    ],
    "qwen-full": both(Case("", *QWEN, layers=8)),
    "oss-lora": both(Case("", *OSS, lora=16, target="attention")),
    "oss-full": both(Case("", *OSS, layers=8)),
    "qwen-nf4-attention": [
        Case("jaxtrain", *QWEN, lora=16, target="attention", quantize="nf4"),
    ],
    "8b": [Case("jaxtrain", "qwen3-8b", "doc2k", 1, lora=16, quantize="nf4")],
    "qwen-nf4-fused": [Case("jaxtrain", *QWEN, lora=16, quantize="nf4_fused")],
    "tiny": [
        *both(Case("", "tiny-moe", "tiny-doc", 2, lora=4)),
        *both(Case("", "tiny-moe", "tiny-doc", 2)),
        *both(Case("", "tiny-moe", "tiny-doc", 2, lora=4, quantize="nf4")),
        Case("unpack", "tiny-moe", "tiny-doc", 2, quantize="nf4"),
        *both(Case("", "tiny-gpt-oss", "tiny-doc", 2, lora=4, target="attention")),
    ],
}


def config_of(case: Case) -> dict:
    """config.json of the case's model, cut in layers."""
    raw = dict(MODELS[case.model])
    if case.layers:
        raw["num_hidden_layers"] = case.layers
        if "layer_types" in raw:
            raw["layer_types"] = raw["layer_types"][: case.layers]
    return raw


def run_jaxtrain(case: Case, timed: int) -> dict:
    """The step of the training code."""
    import jax
    from train_step import Program, Setting

    MODELS[case.model] = config_of(case)
    on_cpu = jax.default_backend() == "cpu"
    setting = Setting(
        case.model,
        case.work,
        remat=case.remat,
        lora=case.lora,
        target=case.target,
        quantize=case.quantize,
        rows=case.rows,
        param_dtype="float32" if on_cpu else "bfloat16",
        dtype="float32" if on_cpu else "bfloat16",
    )
    program = Program(setting)
    actual = program.measure(timed)
    actual["process_gib"] = allocated_gib()
    actual["trained"] = sum(value.size for value in program.state.params.values())
    return actual | {"version": f"jax {jax.__version__}", "hardware": jax.devices()[0].device_kind}


def run_unpack(case: Case) -> dict:
    """Milliseconds to unpack the matrices of a layer's experts, as each pass does."""
    import jax
    import jax.numpy as jnp
    from harness import jax_ms

    from jaxtrain.adapters.storage import STORAGES

    raw, storage = MODELS[case.model], STORAGES[case.quantize]
    shape = (raw["num_experts"], raw["hidden_size"], raw["moe_intermediate_size"])
    parts = {name: jnp.ones(part.shape, part.dtype) for name, part in storage.shapes(shape).items()}
    unpack = jax.jit(lambda parts: storage.dequantize(parts, jnp.bfloat16))
    actual = jax_ms(unpack, parts)
    moved = sum(part.nbytes for part in parts.values()) + 2 * np.prod(shape)
    seconds = actual["ms"] / 1e3
    return {
        "step_s": 3 * seconds,
        "compile_s": actual["compile_s"],
        "peak_gib": actual["temp_mib"] / 1024,
        "gb_per_s": float(moved / seconds / 1e9),
        "loss": 0.0,
    }


def run_torch(case: Case, timed: int) -> dict:
    """The step of transformers and PEFT."""
    from peers import experts

    raw = config_of(case)
    length = WORKS[case.work].row
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, raw["vocab_size"], (case.rows, length), np.int64)
    compile = case.by == "torch"
    how = (case.lora, case.target, timed, compile, case.quantize)
    return experts.measure(raw, tokens, *how)


def run_case(case: Case, timed: int) -> dict:
    """Return a row of the report."""
    if case.by == "unpack":
        actual = run_unpack(case)
    else:
        actual = run_jaxtrain(case, timed) if case.by == "jaxtrain" else run_torch(case, timed)
    tokens = case.rows * WORKS[case.work].row
    rates = {} if case.by == "unpack" else {"tokens_per_s": tokens / actual["step_s"]}
    return {**dataclasses.asdict(case), "how": case.label(), "tokens": tokens, **actual, **rates}


COLUMNS = (
    ("model", "model", "<15"),
    ("by", "by", "<12"),
    ("tokens", "tokens", ">7"),
    ("step s", "step_s", ">9.4f"),
    ("tok/s", "tokens_per_s", ">9,.0f"),
    ("peak GiB", "peak_gib", ">10.1f"),
    ("process", "process_gib", ">9.1f"),
    ("compile s", "compile_s", ">11.0f"),
    ("loss", "loss", ">9.3f"),
)


def run_as_child(name: str, index: str, path: str, timed: int) -> None:
    """Measure one case and write its row; an error is a row, too."""
    case = CASES[name][int(index)]
    try:
        row = run_case(case, timed)
    except Exception as reason:
        failed = shorten(f"{type(reason).__name__}: {reason}", 400)
        row = {**dataclasses.asdict(case), "how": case.label(), "failed": failed}
    append_line(path, row)


def main() -> None:
    parser = make_parser(__doc__)
    chosen = [name for name in CASES if name != "tiny"]
    parser.add_argument("--cases", nargs="+", choices=[*CASES], default=chosen)
    parser.add_argument("--steps", type=int, default=5, help="that are timed")
    parser.add_argument("--seconds", type=float, default=110.0, help="limit of a case's process")
    parser.add_argument("--budget", type=float, default=470.0, help="limit of all, in seconds")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return run_as_child(*options.child, options.steps)
    table = Table(COLUMNS, options.out, command_line())
    cases = {
        (name, str(index)): {**dataclasses.asdict(case), "how": case.label()}
        for name in options.cases
        for index, case in enumerate(CASES[name])
    }
    measure_children(__file__, table, cases, options.seconds, budget=options.budget)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
