"""A step of strided EBFT: this project and PyTorch, in one run.

python benchmarks/ebft_strided.py --out benchmarks/results/ebft_strided_h200
python benchmarks/ebft_strided.py --size tiny      # on a CPU, to see that it works

Qwen3-0.6B's shape with random weights, documents of 2,048 random tokens; stride, context and blocks
of 8 tokens, 4 draws at temperature 0.6; features of three layers of a frozen copy, RLOO, AdamW with
float32 masters, products in bfloat16. A step is all of it: draws, features, loss, update. Each side
runs in a process of its own under a time limit; rows are written as they come.

jaxtrain    the training code as it runs: task.prepare, step
torch       peers/strided.py: Axolotl's layout and draws, with the right indices
torch kept  the same with keys and values kept while drawing

step s    median of the steps after warm-up; drawn/s: tokens of blocks a second, text/s of documents
peak GiB  the allocator's peak
"""

import argparse
import contextlib
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import (
    Table,
    allocated_gib,
    append_line,
    command_line,
    log,
    make_parser,
    measure_children,
    time_queued,
)
from step_work import MODELS, write_tokenizer

SIDES = ("jaxtrain", "torch", "torch kept")
SIZES = {
    "full": {"model": "qwen3-0.6b", "length": 2048, "blocks": (8, 8, 8, 4)},
    "tiny": {"model": "tiny", "length": 64, "blocks": (8, 8, 4, 2)},
}
"""blocks: stride, context, tokens of a block, draws."""
LAYERS = (0.25, 0.5, 0.75)
TEMPERATURE = 0.6


def write_config(options, folder: Path) -> dict:
    """The run of our side as a config's table."""
    size = SIZES[options.size]
    raw = MODELS[size["model"]]
    write_tokenizer(folder / "tokenizer", raw["vocab_size"] - 8)
    words = " ".join(f"w{number % 100 + 2}" for number in range(4 * size["length"]))
    (folder / "rows.jsonl").write_text(json.dumps({"text": words}) + "\n")
    stride, context, block, samples = size["blocks"]
    tiny = options.size == "tiny"
    return {
        "run": {"max_steps": 1000, "export": False, "output_dir": str(folder / "run")},
        "model": {
            "tokenizer": str(folder / "tokenizer"),
            "architecture": raw,
            "compute_dtype": "float32" if tiny else "bfloat16",
            "remat": options.remat,
        },
        "data": {
            "sequence_len": size["length"],
            "micro_batch_size": options.rows,
            "datasets": [{"path": str(folder / "rows.jsonl"), "format": "completion"}],
        },
        "task": {
            "kind": "ebft_strided",
            "stride": stride,
            "context_length": context,
            "generate_max_len": block,
            "n_samples": samples,
            "temperature": TEMPERATURE,
            "features": {"network": "start", "layers": list(options.layers)},
        },
        "optim": {"learning_rate": 1e-6},
    }


def make_rows(options) -> np.ndarray:
    """Random tokens [rows, S]."""
    size = SIZES[options.size]
    words = MODELS[size["model"]]["vocab_size"] - 8
    return np.random.default_rng(1).integers(2, words, (options.rows, size["length"]), np.int32)


def run_jaxtrain(options) -> dict:
    """prepare and step as the loop calls them, two steps in flight."""
    import jax
    from task_step import TaskStep, describe_side

    from jaxtrain.distributed.feed import feed

    with tempfile.TemporaryDirectory() as folder:
        program = TaskStep(write_config(options, Path(folder)), __file__)
    batch, numbers = program.make_batch(make_rows(options)), itertools.count()

    def run():
        with jax.set_mesh(program.mesh):
            ready = feed(program.prepare(batch, next(numbers)), program.mesh)
        return program.run(program.step, ready)

    began = time.perf_counter()
    first = jax.device_get(run())
    compile_s = time.perf_counter() - began
    log(f"jaxtrain: first step in {compile_s:.0f} s")
    for _ in range(1, options.warm_up):
        jax.block_until_ready(run())
    seconds = time_queued(run, options.steps)
    if options.trace:
        with jax.profiler.trace(str(options.trace)):
            jax.block_until_ready(run())
    total, weight = first.metrics["ebft/rl_loss"]
    row = {"seconds": seconds, "compile_s": compile_s, "loss": float(total / weight)}
    return row | {"peak_gib": allocated_gib()} | describe_side()


def run_torch(options, retained: bool) -> dict:
    """PyTorch's step on the same documents."""
    import torch
    from peers import strided

    cuda = torch.cuda.is_available()
    kind = torch.bfloat16 if cuda else torch.float32
    how = strided.Options(kind, "cuda" if cuda else "cpu", 1e-6)
    size = SIZES[options.size]
    raw = MODELS[size["model"]]
    depth = raw["num_hidden_layers"]
    layers = sorted({max(int(share * depth), 1) - 1 for share in options.layers})
    geometry = strided.Geometry(size["length"], *size["blocks"])
    step = strided.Step(raw, geometry, layers, TEMPERATURE, how)
    documents = torch.from_numpy(make_rows(options)).long().to(how.device)
    return strided.measure(step, documents, retained, options.warm_up, options.steps)


def derive(options, side: str, actual: dict) -> dict:
    """The derived numbers of a row."""
    size = SIZES[options.size]
    stride, context, block, samples = size["blocks"]
    blocks = (size["length"] - block - context) // stride + 1
    step_s = statistics.median(actual["seconds"])
    drawn = options.rows * blocks * block * samples
    return {
        "by": side,
        "rows": options.rows,
        "step_s": step_s,
        "drawn_per_s": drawn / step_s,
        "text_per_s": options.rows * size["length"] / step_s,
        **actual,
    }


COLUMNS = (
    ("by", "by", "<12"),
    ("rows", "rows", ">5"),
    ("step s", "step_s", ">9.4f"),
    ("drawn/s", "drawn_per_s", ">10,.0f"),
    ("text/s", "text_per_s", ">9,.0f"),
    ("peak GiB", "peak_gib", ">10.1f"),
    ("compile s", "compile_s", ">11.0f"),
    ("loss", "loss", ">10.2g"),
)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--size", default="full", choices=[*SIZES])
    parser.add_argument("--sides", default=",".join(SIDES), help="sides, with commas")
    parser.add_argument("--rows", type=int, default=1, help="documents of a step")
    parser.add_argument("--remat", default="none", help="jaxtrain: model.remat")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=170.0, help="limit of a side's process")
    parser.add_argument("--trace", type=Path, help="jaxtrain: folder for a profile of a step")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.layers = LAYERS
    if options.child:
        side, path = options.child
        row = run_jaxtrain(options) if side == "jaxtrain" else run_torch(options, "kept" in side)
        return append_line(path, derive(options, side, row))
    cases = {(side,): {"by": side} for side in options.sides.split(",")}
    measure_children(__file__, Table(COLUMNS, options.out, command_line()), cases, options.seconds)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
