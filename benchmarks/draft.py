"""Training steps of draft models, DFlash and Eagle3: this project and PyTorch, in one run.

python benchmarks/draft.py --out benchmarks/results/draft_h200
python benchmarks/draft.py --size tiny --seconds 300      # on a CPU, to see that it works
python benchmarks/draft.py --splits 0 1 2 --out benchmarks/results/draft_splits_h200

Qwen3-8B's shape with random weights as the target, rows of random tokens that all train. DFlash:
5 layers, 512 anchors of 16 tokens. Eagle3: unroll of 7, 32,000 of the tokens in the draft's head.
Both sides: target in bfloat16, without gradients and up to the last layer that is read; draft in
bfloat16 products with float32 masters, AdamW, clipping. Each side of each method runs in a process
of its own under a time limit; rows are written as they come.

jaxtrain  the training code as it runs: task, roles, step; the same batch again and again
torch     peers/drafts.py: FlexAttention, torch.compile, TorchSpec's layout

step s    median of the steps after warm-up, and target s that of the target's forward pass alone
ideal s   target s plus the draft's own operations (see count_draft) at half of the data sheet's
          dense bf16 rate (989 TFLOP/s for an H200); x ideal: step s over it
MFU       operations of target and draft over step s and that rate
peak GiB  jaxtrain: arguments, outputs and temporaries of the compiled program; PyTorch: the
          allocator's peak

--splits: DFlash on several GPUs by the training command, one process for each split: 0 runs the
target in the step, sharded over all devices, n gives the last n devices to the target
(task.target.source = "ahead") and trains on the others. A row of --lengths tokens for each device
that trains. rows/s: rows that were trained a second, in the steps after the warm-up; busy: share of
the time in which the target's devices worked; starved: in which those that train had no states.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from functools import partial
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
    planned_gib,
    query_gpu,
    read_lines,
    run_limited,
    shorten,
    time_queued,
)
from step_work import MODELS, write_tokenizer

KINDS, SIDES = ("dflash", "eagle3"), ("jaxtrain", "torch")
PEAK = 989e12
SIZES = {
    "full": {"model": "qwen3-8b", "lengths": [2048, 8192], "layers": 5, "anchors": 512},
    "tiny": {"model": "tiny", "lengths": [128, 256], "layers": 2, "anchors": 16},
}
KEPT = {"full": 32000, "tiny": 128}
STEPS, BLOCK, DECAY, FACTOR = 7, 16, 7.0, 0.8
"""Eagle3's unroll; DFlash's block and decay; Eagle3's factor from step to step."""


def target_sizes(options) -> dict:
    """config.json of the target."""
    raw = MODELS[SIZES[options.size]["model"]]
    return raw if options.size == "full" else raw | {"num_hidden_layers": 8}


def captured(kind: str, num_layers: int, count: int) -> tuple[int, ...]:
    """The target's layers that are read."""
    if kind == "eagle3":
        return (1, num_layers // 2 - 1, num_layers - 4)
    span = num_layers - 4
    return tuple(round(1 + i * span / (count - 1)) for i in range(count))


def matrices(raw: dict, inputs: int = 1) -> tuple[int, int]:
    """(weights of a layer, those of its keys and values); inputs: widths that q, k, v read."""
    width, heads = raw["hidden_size"], raw["num_attention_heads"] * raw["head_dim"]
    kv = 2 * inputs * width * raw["num_key_value_heads"] * raw["head_dim"]
    return (inputs + 1) * width * heads + kv + 3 * width * raw["intermediate_size"], kv


def count_target(kind: str, raw: dict, length: int, layers: tuple[int, ...]) -> float:
    """Operations of the target's forward pass over a row; Eagle3 reads its last layer, too."""
    depth = raw["num_hidden_layers"] if kind == "eagle3" else max(layers) + 1
    pairs = length * (length + 1) // 2
    heads = raw["num_attention_heads"] * raw["head_dim"]
    return depth * (2 * matrices(raw)[0] * length + 4 * heads * pairs)


def count_draft(kind: str, options, length: int, pairs: int) -> float:
    """Operations of the draft's step: three times its forward pass, two where there is no gradient
    by what goes in (states of the target) or by weights (the target's head), nothing recomputed.

    pairs: visible (query, key) pairs, of one of DFlash's layers, or of all of Eagle3's steps.
    """
    raw, size = target_sizes(options), SIZES[options.size]
    width, vocabulary = raw["hidden_size"], raw["vocab_size"]
    heads = raw["num_attention_heads"] * raw["head_dim"]
    if kind == "dflash":
        layers, slots = size["layers"], size["anchors"] * BLOCK
        weights, kv = matrices(raw)
        states = 2 * 2 * layers * width * width * length
        guesses = size["anchors"] * (BLOCK - 1)
        head = 2 * 2 * guesses * vocabulary * width
        body = layers * (2 * weights * slots + 2 * kv * length + 4 * heads * pairs)
        return states + head + 3 * body
    weights, _ = matrices(raw, inputs=2)
    states = 2 * 2 * 3 * width * width * length
    teacher = 2 * vocabulary * width * length
    body = STEPS * length * 2 * (weights + KEPT[options.size] * width) + 4 * heads * pairs
    return states + teacher + 3 * body


def unrolled_pairs(length: int) -> int:
    """Visible pairs of all of Eagle3's steps."""
    return STEPS * (length * (length + 1) // 2) + length * STEPS * (STEPS - 1) // 2


def write_config(options, kind: str, folder: Path) -> dict:
    """The run of our side as a config's table."""
    size, raw = SIZES[options.size], target_sizes(options)
    vocabulary = raw["vocab_size"]
    if not (folder / "tokenizer").exists():
        write_tokenizer(folder / "tokenizer", vocabulary - 8)
        rng = np.random.default_rng(0)
        with (folder / "rows.jsonl").open("w") as file:  # who counts tokens, counts these
            for _ in range(8):
                words = rng.integers(2, vocabulary - 8, 6000)
                file.write(json.dumps({"text": " ".join(f"w{word}" for word in words)}) + "\n")
    task = {"kind": kind, "min_loss_tokens": 1, "draft": {"remat": options.remat}}
    if kind == "dflash":
        task |= {"block_size": BLOCK, "num_anchors": size["anchors"], "decay": DECAY}
        task["draft"]["num_layers"] = size["layers"]
    else:
        task |= {"length": STEPS, "draft_vocab_size": KEPT[options.size]}
    count = size["layers"] if kind == "dflash" else 3
    task["draft"]["target_layers"] = [*captured(kind, raw["num_hidden_layers"], count)]
    task["draft"]["scan_layers"] = options.scan
    return {
        "run": {"max_steps": 1000, "export": False, "output_dir": str(folder / kind)},
        "model": {
            "tokenizer": str(folder / "tokenizer"),
            "architecture": raw,
            "param_dtype": "bfloat16",
            "compute_dtype": "bfloat16",
            "scan_layers": not options.unroll,
        },
        "data": {
            "sequence_len": max(size["lengths"]),
            "too_long": "truncate",
            "datasets": [{"path": str(folder / "rows.jsonl"), "format": "completion"}],
        },
        "task": task,
        "optim": {"learning_rate": 1e-5},
    }


def run_jaxtrain(options, kind: str, report) -> None:
    """The compiled step of the task; `report` takes each length's numbers."""
    import jax
    from task_step import TaskStep, describe_side

    from jaxtrain.layers import linear
    from jaxtrain.methods.drafts.anchors import ANCHOR
    from jaxtrain.methods.drafts.target_states import read_target

    if options.apart:
        linear.MANY = 2**30
    with tempfile.TemporaryDirectory() as folder:
        program = TaskStep(write_config(options, kind, Path(folder)), __file__)
    log("weights drawn")
    with jax.set_mesh(program.mesh):
        layers = tuple(program.roles.build(program.params)["draft"].capture)

    @jax.jit
    def of_target(frozen, batch):
        target = program.roles.rebuild("target")(program.roles.params("target", frozen))
        only = jax.tree.map(lambda x: x[0], batch)
        return read_target(target, only, layers, last=kind == "eagle3")

    words = target_sizes(options)["vocab_size"] - 8
    for length in options.lengths or SIZES[options.size]["lengths"]:
        tokens = np.random.default_rng(1).integers(2, words, (1, length), np.int32)
        batch = program.prepare(program.make_batch(tokens))
        compiled, placed = program.compile(batch)
        log(f"{kind} {length}: step compiled in {program.compile_s:.0f} s")
        run = partial(program.run, compiled, placed)
        losses = [float(run().metrics["loss"][0]) for _ in range(options.warm_up)]
        with jax.set_mesh(program.mesh):
            alone = of_target.lower(program.frozen, placed).compile()
        jax.block_until_ready(alone(program.frozen, placed))
        row = {
            "seconds": time_queued(run, options.steps),
            "loss": losses[0],
            "loss_after": losses[-1],
            "compile_s": program.compile_s,
            "peak_gib": planned_gib(compiled),
            "temporaries_gib": compiled.memory_analysis().temp_size_in_bytes / 2**30,
            "held_gib": allocated_gib(),
            "pairs": unrolled_pairs(length),
        }
        if kind == "dflash":
            anchors = np.flatnonzero(batch.streams[ANCHOR])
            row["pairs"] = int(anchors.sum() * BLOCK + len(anchors) * BLOCK**2)
            row["anchors"] = len(anchors)
        target_s = []
        for _ in range(options.steps):
            start = time.perf_counter()
            jax.block_until_ready(alone(program.frozen, placed))
            target_s.append(time.perf_counter() - start)
        report(length, row | {"target_s": statistics.median(target_s)} | describe_side())
        if options.trace:
            with jax.profiler.trace(f"{options.trace}/{kind}-{length}"):
                jax.block_until_ready(run())


def run_torch(options, kind: str, report) -> None:
    """PyTorch's step on rows of the same shape."""
    import torch
    from peers import drafts
    from peers.timing import warm_up

    cuda = torch.cuda.is_available()
    how = drafts.Options(torch.bfloat16 if cuda else torch.float32, "cuda" if cuda else "cpu")
    torch.manual_seed(0)
    raw, size = target_sizes(options), SIZES[options.size]
    count = size["layers"] if kind == "dflash" else 3
    layers = captured(kind, raw["num_hidden_layers"], count)
    depth = raw["num_hidden_layers"] if kind == "eagle3" else max(layers) + 1
    target = drafts.Target(raw, depth, how)
    work = {"layers": layers, "block_size": BLOCK, "decay": DECAY, "steps": STEPS}
    work |= {"num_anchors": size["anchors"], "factor": FACTOR, "mask_id": raw["vocab_size"] - 1}
    work["kept"] = np.arange(0, raw["vocab_size"], raw["vocab_size"] // KEPT[options.size])
    work["kept"] = work["kept"][: KEPT[options.size]]
    with torch.device(how.device):
        if kind == "dflash":
            draft = drafts.DFlash(raw | {"num_hidden_layers": size["layers"]}, count)
            step = drafts.DFlashStep(target, draft, work, how)
        else:
            draft = drafts.Eagle3(raw, count, KEPT[options.size])
            step = drafts.Eagle3Step(target, draft, work, how)
    log("weights drawn")
    for length in options.lengths or size["lengths"]:
        rng = np.random.default_rng(1)
        tokens = torch.from_numpy(rng.integers(2, raw["vocab_size"] - 8, (1, length)))
        tokens = tokens.to(how.device)
        trained = torch.ones(1, length, device=how.device)
        trained[:, 0] = 0
        row = warm_up(lambda t=tokens, w=trained: step.run(t, w), options.warm_up)
        row |= drafts.measure(step, tokens, trained, options.steps)
        pairs = unrolled_pairs(length)
        if kind == "dflash":  # on average over draws
            pairs = int(size["anchors"] * BLOCK * (length / 2 + BLOCK))
        name = torch.cuda.get_device_name() if cuda else "cpu"
        report(length, row | {"pairs": pairs, "hardware": name, "version": torch.__version__})


def derive(options, kind: str, length: int, numbers: dict) -> dict:
    """The derived numbers of a row."""
    raw = target_sizes(options)
    count = SIZES[options.size]["layers"] if kind == "dflash" else 3
    layers = captured(kind, raw["num_hidden_layers"], count)
    row = dict(numbers)
    row["step_s"] = statistics.median(numbers["seconds"])
    row["target_tflop"] = count_target(kind, raw, length, layers) / 1e12
    row["draft_tflop"] = count_draft(kind, options, length, numbers["pairs"]) / 1e12
    total = (row["target_tflop"] + row["draft_tflop"]) * 1e12
    row["mfu"] = total / row["step_s"] / PEAK
    if "target_s" in numbers:
        row["ideal_s"] = numbers["target_s"] + row["draft_tflop"] * 1e12 / (0.5 * PEAK)
        row["x_ideal"] = row["step_s"] / row["ideal_s"]
    return row


COLUMNS = (
    ("method", "kind", "<8"),
    ("row", "length", ">6"),
    ("by", "by", ">10"),
    ("step s", "step_s", ">9.4f"),
    ("target s", "target_s", ">10.4f"),
    ("ideal s", "ideal_s", ">9.4f"),
    ("x ideal", "x_ideal", ">9.2f"),
    ("MFU", "mfu", ">7.1%"),
    ("peak GiB", "peak_gib", ">10.1f"),
    ("compile s", "compile_s", ">11.0f"),
    ("loss", "loss", ">9.3f"),
)
SPLIT_COLUMNS = (
    ("target devices", "target_devices", "<15"),
    ("rows/s", "rows_per_s", ">9.2f"),
    ("step s", "step_s", ">9.4f"),
    ("rows", "rows_per_step", ">6.0f"),
    ("peak GiB", "peak_gib", ">10.1f"),
    ("busy", "busy", ">7.0%"),
    ("starved", "starved", ">9.0%"),
    ("process s", "whole_s", ">11.0f"),
)
SPLIT_WARM_UP, SPLIT_STEPS = 4, 12


def run_split(options, split: int, folder: Path) -> dict:
    """Return the rates of a run that gives `split` devices to the target; 0: none."""
    name, length = f"split{split}", (options.lengths or [2048])[0]
    table = write_config(options, "dflash", folder)
    table["run"]["output_dir"] = str(folder / name)
    table["data"]["sequence_len"] = length
    table["checkpoint"] = {"every": 10**6, "every_minutes": None}
    table["log"] = {"plot": False, "console": "off"}
    if split:
        table["task"]["target"] = {"source": "ahead", "devices": split}
    config, metrics = folder / f"{name}.json", folder / name / "metrics.jsonl"
    config.write_text(json.dumps(table))

    def read_steps() -> list[dict]:
        return [line for line in read_lines(metrics) if "loss" in line]

    def done() -> bool:
        return len(read_steps()) >= SPLIT_WARM_UP + SPLIT_STEPS

    command = [sys.executable, "-m", "jaxtrain.main", "--config", str(config)]
    start = time.perf_counter()
    output, late = run_limited(command, options.seconds, done)
    steps = read_steps()
    row = {"target_devices": split, "whole_s": time.perf_counter() - start}
    if len(steps) < SPLIT_WARM_UP + 3:
        return row | {"failed": shorten(f"{late}: {output}", 700)}
    timed = steps[SPLIT_WARM_UP:]
    times = [line["time"] for line in timed]
    tokens = sum(line["tokens"] for line in timed[1:])
    return row | {
        "rows_per_s": tokens / length / (times[-1] - times[0]),
        "rows_per_step": tokens / length / (len(timed) - 1),
        "step_s": statistics.median(np.diff(times).tolist()),
        "peak_gib": timed[-1]["peak_memory_gib"],
        "busy": timed[-1].get("target/busy"),
        "starved": timed[-1].get("target/starved"),
        "loss": [steps[0]["loss"], steps[-1]["loss"]],
    }


def measure_splits(options) -> None:
    """Measure the training command for every split of the devices."""
    table = Table(SPLIT_COLUMNS, options.out, command_line(), hardware=query_gpu())
    with tempfile.TemporaryDirectory() as folder:
        for split in options.splits:
            table.add(run_split(options, split, Path(folder)))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--size", default="full", choices=[*SIZES])
    parser.add_argument("--kinds", default="dflash,eagle3", help="methods, with commas")
    parser.add_argument("--sides", default="jaxtrain,torch", help="sides, with commas")
    parser.add_argument("--splits", type=int, nargs="+", help="devices of the target; see above")
    parser.add_argument("--lengths", type=lambda text: [*map(int, text.split(","))])
    parser.add_argument("--remat", default="none", help="jaxtrain: of the draft")
    parser.add_argument("--scan", action="store_true", help="jaxtrain: one compiled draft layer")
    parser.add_argument("--unroll", action="store_true", help="jaxtrain: every target layer")
    parser.add_argument("--apart", action="store_true", help="jaxtrain: q, k, v and gate, up alone")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of one process")
    parser.add_argument("--trace", type=Path, help="jaxtrain: folder for profiles of one step")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.child and options.splits:
        return measure_splits(options)
    if not options.child:
        ways = itertools.product(options.kinds.split(","), options.sides.split(","))
        cases = {way: dict(zip(("kind", "by"), way, strict=True)) for way in ways}
        table = Table(COLUMNS, options.out, command_line())
        return measure_children(__file__, table, cases, options.seconds)
    kind, side, path = options.child

    def report(length: int, numbers: dict) -> None:
        row = derive(options, kind, length, numbers)
        append_line(path, {"kind": kind, "length": length, "by": side} | row)

    run = run_jaxtrain if side == "jaxtrain" else run_torch
    run(options, kind, report)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
