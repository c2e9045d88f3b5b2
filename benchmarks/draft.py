"""Training steps of draft models, DFlash and Eagle3: this project and PyTorch, in one run.

python benchmarks/draft.py --out benchmarks/results/draft_h200
python benchmarks/draft.py --size tiny --seconds 300      # on a CPU, to see that it works

Qwen3-8B's shape with random weights as the target, rows of random tokens that all train. DFlash:
5 layers, 512 anchors of 16 tokens. Eagle3: unroll of 7, 32,000 of the tokens in the draft's head.
Both sides: target in bfloat16, without gradients and up to the last layer that is read; draft in
bfloat16 products with float32 masters, AdamW, clipping. Each side of each method runs in a process
of its own under a time limit; rows are written as they come.

jaxtrain  the training code as it runs: task, roles, step; the same batch again and again
torch     draft_peers.py: FlexAttention, torch.compile, TorchSpec's layout

step s    median of the steps after warm-up, and target s that of the target's forward pass alone
ideal s   target s plus the draft's own operations (see count_draft) at half of the data sheet's
          dense bf16 rate (989 TFLOP/s for an H200); x ideal: step s over it
MFU       operations of target and draft over step s and that rate
peak GiB  jaxtrain: arguments, outputs and temporaries of the compiled program; PyTorch: the
          allocator's peak
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from apart import run_apart
from preference import write_tokenizer
from step_work import MODELS

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


def run_jaxtrain(options, kind: str, tell) -> None:
    """The compiled step of the task; `tell` takes each length's numbers."""
    import jax

    from jaxtrain.config.load import validate_config
    from jaxtrain.core.optimizer import build_optimizer, build_schedule
    from jaxtrain.core.roles import Roles
    from jaxtrain.core.step import init_state, make_step
    from jaxtrain.core.task import Round
    from jaxtrain.data.packing.pack import build_batch, lay_out, stack_batches
    from jaxtrain.data.packing.tree import chain
    from jaxtrain.distributed.feed import feed
    from jaxtrain.layers import linear
    from jaxtrain.methods.drafts.anchors import ANCHOR
    from jaxtrain.methods.drafts.target_states import read_target
    from jaxtrain.methods.registry import make_task

    if options.apart:
        linear.MANY = 2**30
    with tempfile.TemporaryDirectory() as place:
        config = validate_config(write_config(options, kind, Path(place)), "draft.py")
        task = make_task(config)
        roles = Roles(task.roles)
        mesh = task.mesh
        with jax.set_mesh(mesh):
            trained, frozen, copies = roles.open(0)
            log("weights drawn")
            optimizer = build_optimizer(config.optim, build_schedule(config.optim, 1000), trained)
            state = init_state(trained, optimizer, copies)
            del trained
            step = make_step(
                roles.build, task.loss, task.coef, optimizer, config.optim.max_grad_norm
            )
            draft = roles.build({**frozen, **state.copies, **state.params})["draft"]
            layers = tuple(draft.capture)
            del draft

            @jax.jit
            def of_target(frozen, batch):
                params = roles.params("target", frozen)
                target = roles.rebuild("target")(params)
                only = jax.tree.map(lambda x: x[0], batch)
                return read_target(target, only, layers, last=kind == "eagle3")

            fields = task.data.fields
            for length in options.lengths or SIZES[options.size]["lengths"]:
                rng = np.random.default_rng(1)
                words = target_sizes(options)["vocab_size"] - 8
                tokens = rng.integers(2, words, length, np.int32)
                ones = dict.fromkeys(fields.components, np.ones(length))
                row = [lay_out(chain(tokens, ones), "branch")]
                batch = stack_batches([build_batch([row], length, fields)])
                batch = task.prepare(Round([batch]), None).batches[0]
                placed = feed(batch, mesh)
                began = time.perf_counter()
                compiled = step.lower(state, placed, frozen).compile()
                compile_s = time.perf_counter() - began
                log(f"{kind} {length}: step compiled in {compile_s:.0f} s")
                losses = []
                for _ in range(options.warm_up):
                    state, output = compiled(state, placed, frozen)
                    losses.append(float(output.metrics["loss"][0]))
                alone = of_target.lower(frozen, placed).compile()
                jax.block_until_ready(alone(frozen, placed))
                wait(options, kind, "jaxtrain")
                ends = []
                for _ in range(options.steps + 2):  # two in flight, as in training
                    state, after = compiled(state, placed, frozen)
                    jax.block_until_ready(output)
                    ends.append(time.perf_counter())
                    output = after
                jax.block_until_ready(state)
                memory = compiled.memory_analysis()
                peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes
                peak += memory.output_size_in_bytes - memory.alias_size_in_bytes
                held = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
                found = {
                    "seconds": np.diff(ends[1:]).tolist(),
                    "loss": losses[0],
                    "loss_after": losses[-1],
                    "compile_s": compile_s,
                    "peak_gib": peak / 2**30,
                    "temporaries_gib": memory.temp_size_in_bytes / 2**30,
                    "held_gib": held / 2**30,
                    "pairs": unrolled_pairs(length),
                    "hardware": jax.devices()[0].device_kind,
                    "version": f"jax {jax.__version__}",
                }
                if kind == "dflash":
                    anchors = np.flatnonzero(batch.streams[ANCHOR])
                    found["pairs"] = int(anchors.sum() * BLOCK + len(anchors) * BLOCK**2)
                    found["anchors"] = len(anchors)
                tell(length, found)
                target = []
                for _ in range(options.steps):
                    began = time.perf_counter()
                    jax.block_until_ready(alone(frozen, placed))
                    target.append(time.perf_counter() - began)
                tell(length, found | {"target_s": statistics.median(target)})
                if options.trace:
                    with jax.profiler.trace(f"{options.trace}/{kind}-{length}"):
                        state, output = compiled(state, placed, frozen)
                        jax.block_until_ready(state)


def run_torch(options, kind: str, tell) -> None:
    """PyTorch's step on rows of the same shape."""
    import draft_peers
    import torch

    cuda = torch.cuda.is_available()
    how = draft_peers.Options(torch.bfloat16 if cuda else torch.float32, "cuda" if cuda else "cpu")
    torch.manual_seed(0)
    raw, size = target_sizes(options), SIZES[options.size]
    count = size["layers"] if kind == "dflash" else 3
    layers = captured(kind, raw["num_hidden_layers"], count)
    depth = raw["num_hidden_layers"] if kind == "eagle3" else max(layers) + 1
    target = draft_peers.Target(raw, depth, how)
    work = {"layers": layers, "block_size": BLOCK, "decay": DECAY, "steps": STEPS}
    work |= {"num_anchors": size["anchors"], "factor": FACTOR, "mask_id": raw["vocab_size"] - 1}
    work["kept"] = np.arange(0, raw["vocab_size"], raw["vocab_size"] // KEPT[options.size])
    work["kept"] = work["kept"][: KEPT[options.size]]
    with torch.device(how.device):
        if kind == "dflash":
            draft = draft_peers.DFlash(raw | {"num_hidden_layers": size["layers"]}, count)
            step = draft_peers.DFlashStep(target, draft, work, how)
        else:
            draft = draft_peers.Eagle3(raw, count, KEPT[options.size])
            step = draft_peers.Eagle3Step(target, draft, work, how)
    log("weights drawn")
    rows = {}
    for length in options.lengths or size["lengths"]:
        rng = np.random.default_rng(1)
        tokens = torch.from_numpy(rng.integers(2, raw["vocab_size"] - 8, (1, length)))
        trained = torch.ones(1, length, device=how.device)
        trained[:, 0] = 0
        rows[length] = tokens.to(how.device), trained
    firsts = {}
    if options.gate is not None:
        for length, row in rows.items():
            firsts[length] = draft_peers.warm_up(step, *row, options.warm_up)
        wait(options, kind, "torch")
    for length, (tokens, trained) in rows.items():
        first = firsts.get(length) or draft_peers.warm_up(step, tokens, trained, options.warm_up)
        found = first | draft_peers.measure(step, tokens, trained, options.steps)
        name = torch.cuda.get_device_name() if cuda else "cpu"
        pairs = unrolled_pairs(length)
        if kind == "dflash":  # on average over draws
            pairs = int(size["anchors"] * BLOCK * (length / 2 + BLOCK))
        tell(
            length,
            found | {"pairs": pairs, "hardware": name, "version": f"torch {torch.__version__}"},
        )


def log(text: str) -> None:
    """A line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def wait(options, kind: str, side: str) -> None:
    """With --gate: tell that all is compiled and warm, and go on once that is allowed."""
    if options.gate is None:
        return
    (options.gate / f"{kind}-{side}.ready").touch()
    log(f"{kind}, {side}: ready")
    while not (options.gate / f"{kind}-{side}.go").exists():
        time.sleep(0.2)


def work_out(options, kind: str, length: int, found: dict) -> dict:
    """The derived numbers of a row."""
    raw = target_sizes(options)
    count = SIZES[options.size]["layers"] if kind == "dflash" else 3
    layers = captured(kind, raw["num_hidden_layers"], count)
    row = dict(found)
    row["step_s"] = statistics.median(found["seconds"])
    row["target_tflop"] = count_target(kind, raw, length, layers) / 1e12
    row["draft_tflop"] = count_draft(kind, options, length, found["pairs"]) / 1e12
    total = (row["target_tflop"] + row["draft_tflop"]) * 1e12
    row["mfu"] = total / row["step_s"] / PEAK
    if "target_s" in found:
        row["ideal_s"] = found["target_s"] + row["draft_tflop"] * 1e12 / (0.5 * PEAK)
        row["x_ideal"] = row["step_s"] / row["ideal_s"]
    return row


HEADER = (
    f"{'method':<8}{'row':>6}{'by':>10}{'step s':>9}{'steps/s':>9}{'target s':>10}{'ideal s':>9}"
    f"{'x ideal':>9}{'MFU':>7}{'peak GiB':>10}{'compile s':>11}{'loss':>9}"
)


def table_line(row: dict) -> str:
    """One line of the table."""
    start = f"{row['kind']:<8}{row['length']:>6}{row['by']:>10}"
    if "failed" in row:
        return f"{start}  failed: {row['failed']}"

    def shown(key: str, width: int, digits: int) -> str:
        return f"{row[key]:>{width}.{digits}f}" if key in row else f"{'-':>{width}}"

    return (
        f"{start}{row['step_s']:>9.4f}{1 / row['step_s']:>9.2f}{shown('target_s', 10, 4)}"
        f"{shown('ideal_s', 9, 4)}{shown('x_ideal', 9, 2)}{row['mfu']:>7.1%}"
        f"{row['peak_gib']:>10.1f}{row['compile_s']:>11.0f}{row['loss']:>9.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="full", choices=[*SIZES])
    parser.add_argument("--kinds", default="dflash,eagle3", help="methods, with commas")
    parser.add_argument("--sides", default="jaxtrain,torch", help="sides, with commas")
    parser.add_argument("--lengths", type=lambda text: [*map(int, text.split(","))])
    parser.add_argument("--remat", default="none", help="jaxtrain: of the draft")
    parser.add_argument(
        "--scan", action="store_true", help="jaxtrain: one compiled layer of the draft"
    )
    parser.add_argument("--unroll", action="store_true", help="jaxtrain: every layer of the target")
    parser.add_argument(
        "--apart", action="store_true", help="jaxtrain: q, k, v and gate, up each alone"
    )
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--seconds", type=float, default=110.0, help="longest of one side's process"
    )
    parser.add_argument(
        "--trace", type=Path, help="jaxtrain: folder for a profile of one step each"
    )
    parser.add_argument("--out", type=Path, help="path without suffix for JSON and text")
    parser.add_argument("--gate", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind, side, path = options.child

        def tell(length: int, found: dict) -> None:
            row = work_out(options, kind, length, found)
            with Path(path).open("a") as file:
                file.write(json.dumps({"kind": kind, "length": length, "by": side} | row) + "\n")

        run = run_jaxtrain if side == "jaxtrain" else run_torch
        run(options, kind, tell)
        return
    report = {
        "command": " ".join(["python benchmarks/draft.py", *sys.argv[1:]]).split(" --out")[0],
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as place:
        for kind in options.kinds.split(","):
            for side in options.sides.split(","):
                log(f"{kind}, {side}")
                rows = Path(place) / f"{kind}-{side}.jsonl"
                failed = run_apart(__file__, ["--child", kind, side, str(rows)], options.seconds)
                lines = rows.read_text().splitlines() if rows.exists() else []
                found = {row["length"]: row for row in map(json.loads, lines)}
                report["rows"] += found.values()
                if failed:
                    last = max(found, default=0)
                    gone = {"kind": kind, "by": side, "length": last, "failed": failed}
                    report["rows"].append(gone)
                print(HEADER, *map(table_line, report["rows"]), sep="\n", flush=True)
                if options.out:
                    options.out.parent.mkdir(parents=True, exist_ok=True)
                    text = json.dumps(report, indent=1) + "\n"
                    options.out.with_suffix(".json").write_text(text)
                    table = "\n".join([report["command"], HEADER, *map(table_line, report["rows"])])
                    options.out.with_suffix(".txt").write_text(table + "\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
