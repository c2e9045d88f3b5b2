"""An optimizer step on an agent's tree: packed, and as its baselines, with time and memory.

python benchmarks/tree_vs_flat.py --size full --out benchmarks/results/tree_vs_flat_h200

The work is one trajectory of an agent with 20 turns: a trunk of 330 tokens a turn and a thought of
70 beside each, 7,889 packed tokens with 20 leaves; 70,761 tokens when every branch runs alone. The
model has the shape of Qwen3-0.6B, random weights in float32, bfloat16 compute, AdamW, clipping: the
training step as it runs. What is batched how:

tree        one row, one forward and backward
per_branch  the root-to-leaf paths as documents of rows of 8,192 tokens, packed first-fit-decreasing
            as all flat data here, a microstep a row; weight 1 on each branch
grouped     the same paths with weight 1/K, a microstep each (memory is one branch), each padded to
            the next of a few lengths; gradients add up in the same optimizer step
current_rl  what RL trainers train on: the visible prefix, the thought and the answer of each turn
            as a flat sample, packed like per_branch; each turn trains once

Prints a table and writes OUT.json, OUT.txt and OUT.png. Times are medians between the ends of
steps that were queued together, so they are the device's, not the dispatch's. Memory is what the
compiled program allocates: arguments and temporaries.
"""

import dataclasses
import logging
import time
import tomllib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import (
    Table,
    command_line,
    compile_step,
    describe_devices,
    draw_bars,
    make_parser,
    planned_gib,
    summarize_seconds,
    time_queued,
)
from jaxtrain_kernels.testing import agent_tree

from jaxtrain.batch import Batch
from jaxtrain.config import OptimConfig
from jaxtrain.core.losses.nll import nll_loss
from jaxtrain.core.optimizer import build_optimizer, build_schedule
from jaxtrain.core.step import State, init_state, make_step
from jaxtrain.data.packing.branches import list_branches
from jaxtrain.data.packing.pack import build_batch, fit_rows, lay_out, stack_batches
from jaxtrain.data.packing.tree import Tree, build_tree, chain
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.methods.trees.turns import TrainedParts, build_current_rl, make_turns
from jaxtrain.models import build, families
from jaxtrain.models.parameters import split_model

MODES = ("tree", "per_branch", "grouped", "current_rl")
WARM_UP, TIMED = 3, 10

TORCH_PEER = "torch 2.11, one NVIDIA H200, bf16, the same tree and model shape"
TORCH = {
    "tree, FlexAttention + compile": {"step_s": 0.145216, "peak_gib": 15.443},
    "per-branch, SDPA": {"step_s": 2.0736, "peak_gib": 18.973},
}
"""Whole training steps in PyTorch, measured once; for orientation, not a controlled comparison."""


@dataclasses.dataclass(frozen=True)
class Size:
    """A work and a model."""

    preset: str
    compute_dtype: str
    turns: int
    trunk: int
    leaf: int
    tree_row: int
    """T of the packed tree."""
    flat_row: int
    """T of packed rows of branches or samples."""
    buckets: tuple[int, ...]
    """T of single branches; the last is at least the longest."""


SIZES = {
    "tiny": Size("tiny", "float32", 4, 24, 10, 128, 128, (48, 80, 128)),
    "full": Size("qwen3_0_6b", "bfloat16", 20, 330, 70, 7936, 8192, (1024, 2048, 4096, 7168)),
}


@dataclasses.dataclass(frozen=True)
class Work:
    """The batches [A, 1, T] of one optimizer step; all of them together are the step."""

    batches: tuple[Batch, ...]
    units: int
    """Branches, samples, or the branches of the tree."""
    unit_tokens: int
    """Tokens of them alone, without padding."""
    how: str
    """What is batched how."""

    @property
    def slots(self) -> int:
        """Token slots that are computed, padding included."""
        return sum(batch.tokens.size for batch in self.batches)


def make_trajectory(size: Size, vocabulary: int) -> tuple[Tree, list[Tree]]:
    """(the tree, its current-RL samples). The first third of a trunk node answers the turn before,
    the rest is context; thoughts and answers train."""
    nodes = agent_tree(size.turns, size.trunk, size.leaf)
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, vocabulary, n).astype(np.int32) for n, _ in nodes]
    parts = []
    for index, (count, parent) in enumerate(nodes):
        side = index % 2 == 1
        answer = 0 if index == 0 else count // 3
        mask = np.ones(count) if side else (np.arange(count) < answer).astype(float)
        parts.append((parent, tokens[index], mask, "think" if side else "trunk"))
    turns = []
    for turn in range(size.turns):
        trunk, thought = tokens[2 * turn], tokens[2 * turn + 1]
        context = trunk if turn == 0 else trunk[len(trunk) // 3 :]
        after = tokens[2 * turn + 2] if turn + 1 < size.turns else trunk[:0]
        turns.append((context, thought, after[: len(after) // 3]))
    return build_tree(parts), build_current_rl(make_turns(turns), TrainedParts())


def pack(trees: list[Tree], row_tokens: int) -> Batch:
    """[A, 1, T], as many rows as first-fit-decreasing needs."""
    rows = fit_rows([tree.num_tokens for tree in trees], row_tokens)
    return stack_batches(
        [build_batch([[lay_out(trees[i]) for i in row]], row_tokens) for row in rows]
    )


def make_work(mode: str, tree: Tree, samples: list[Tree], size: Size) -> Work:
    """The step's batches in one mode."""
    k = tree.num_branches
    share = 1 / k if mode == "grouped" else 1.0
    branches = [
        chain(b.tokens, {name: w * share for name, w in b.weights.items()})
        for b in list_branches(tree)
    ]
    branch_tokens = sum(branch.num_tokens for branch in branches)
    match mode:
        case "tree":
            batch = pack([tree], size.tree_row)
            return Work((batch,), k, branch_tokens, f"1 row of {size.tree_row}")
        case "per_branch" | "current_rl":
            units = branches if mode == "per_branch" else samples
            batch = pack(units, size.flat_row)
            how = f"{len(units)} in {len(batch.tokens)} packed rows of {size.flat_row}"
            tokens = sum(unit.num_tokens for unit in units)
            return Work((batch,), len(units), tokens, how)
        case "grouped":
            of_bucket: dict[int, list[Tree]] = {}
            for branch in branches:
                bucket = next(n for n in size.buckets if n >= branch.num_tokens)
                of_bucket.setdefault(bucket, []).append(branch)
            batches = tuple(
                stack_batches([build_batch([[lay_out(b)]], bucket) for b in group])
                for bucket, group in sorted(of_bucket.items())
            )
            counts = (f"{len(group)} x {bucket}" for bucket, group in sorted(of_bucket.items()))
            return Work(batches, k, branch_tokens, "one a row, " + " + ".join(counts))
    raise AssertionError(mode)


def make_bucketed_step(rebuild, optimizer, max_grad_norm: float) -> Callable:
    """(state, batches of several T) -> (state, loss): one optimizer step over all of them.

    The microsteps of jaxtrain.core.step, which takes one T a step, for a few T in one program.
    """

    def step(state: State, batches: tuple[Batch, ...]):
        total = sum(jnp.sum(batch.weights["nll"]) for batch in batches)

        def loss(params, micro):
            sums, _ = nll_loss(rebuild(params), micro)
            return sums["nll"] / total

        def add(carry, micro):
            value, grads = jax.value_and_grad(loss)(state.params, micro)
            return jax.tree.map(jnp.add, carry, (value, grads)), None

        carry = jax.tree.map(jnp.zeros_like, (jnp.float32(0), state.params))
        for batch in batches:
            carry, _ = jax.lax.scan(add, carry, batch)
        value, grads = carry
        scale = jnp.minimum(1.0, max_grad_norm / optax.tree.norm(grads))
        grads = jax.tree.map(lambda g: g * scale, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return State(state.step + 1, optax.apply_updates(state.params, updates), opt_state), value

    return jax.jit(step, donate_argnums=0)


def measure(work: Work, architecture, options: dict, impl: str) -> dict:
    """Loss of the first step, seconds a step, compile seconds and memory of one mode."""
    mesh = make_mesh(jax.devices()[:1])
    with jax.set_mesh(mesh):
        model = build.init(architecture, 0, mesh=mesh, attention_impl=impl, **options)
        params, rebuild = split_model(model)
        optim = OptimConfig(learning_rate=1e-5)
        optimizer = build_optimizer(optim, build_schedule(optim, 1000), params)
        state = init_state(params, optimizer)
        batches = jax.device_put(work.batches)
        if len(batches) == 1:
            step = make_step(rebuild, nll_loss, {"nll": 1.0}, optimizer, optim.max_grad_norm)
            (arguments,) = batches
            start = time.perf_counter()
            compiled, largest = compile_step(step, state, arguments)
        else:
            step = make_bucketed_step(rebuild, optimizer, optim.max_grad_norm)
            arguments, start = batches, time.perf_counter()
            compiled = largest = step.lower(state, arguments).compile()
        compile_s = time.perf_counter() - start
        state, first = compiled(state, arguments)
        for _ in range(WARM_UP - 1):
            state, _ = compiled(state, arguments)
        jax.block_until_ready(state)

        def run():
            nonlocal state
            state, output = compiled(state, arguments)
            return output

        seconds = time_queued(run, TIMED)
    return {
        "loss": float(first.metrics["loss"][0] if len(batches) == 1 else first),
        **summarize_seconds(seconds),
        "compile_s": compile_s,
        "peak_gib": planned_gib(largest),
    }


class Chosen(logging.Handler):
    """Remembers which backend of each op took the call, as the dispatcher logs it."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.backends: dict[str, str] = {}
        log = logging.getLogger("jaxtrain_kernels.dispatch")
        log.setLevel(logging.DEBUG)
        log.propagate = False
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if len(record.args) == 2:
            op, name = record.args
            self.backends[op] = name


COLUMNS = (
    ("mode", "mode", "<11"),
    ("attention", "attention", "<12"),
    ("step s", "step_s", ">8.4f"),
    ("speed", "speed", ">7.1f"),
    ("peak GiB", "peak_gib", ">10.2f"),
    ("units/s", "units_per_s", ">9.1f"),
    ("unit tok/s", "unit_tokens_per_s", ">12,.0f"),
    ("computed/s", "slots_per_s", ">12,.0f"),
    ("loss", "loss", ">9.4f"),
)
NOTE = (
    "A unit is a branch (current_rl: a flat sample); computed/s counts token slots, padding"
    " included. tree, per_branch and grouped have the same loss but for rounding. speed is"
    " against the first per_branch row."
)


def run(size: Size, modes: list[str], impls: list[str], out: Path | None, command: str) -> dict:
    """Measure every mode with every attention backend; the report is written after each."""
    preset = tomllib.loads((files("jaxtrain") / f"presets/model/{size.preset}.toml").read_text())
    architecture = families.config_from_hf(preset["architecture"])
    tree, samples = make_trajectory(size, architecture.vocab_size)
    table = Table(
        COLUMNS,
        out,
        command,
        **describe_devices(),
        model=f"{size.preset}, {build.param_count(architecture) / 1e6:.1f}M parameters, random",
        compute_dtype=size.compute_dtype,
        packed_tokens=tree.num_tokens,
        branches=tree.num_branches,
        branch_tokens=sum(tree.branch_lengths()),
        note=NOTE,
        torch={"source": TORCH_PEER, **TORCH} if size is SIZES["full"] else None,
    )
    chosen = Chosen()
    options = {"param_dtype": "float32", "dtype": size.compute_dtype}
    for impl in impls:
        for mode in modes:
            work = make_work(mode, tree, samples, size)
            row = measure(work, architecture, options, impl)
            backend = chosen.backends["attention"] if impl == "auto" else impl
            step_s = row["step_s"]
            flat = [r for r in table.rows if r["mode"] == "per_branch"]
            row = {
                "mode": mode,
                "attention": backend,
                "how": work.how,
                "units": work.units,
                "unit_tokens": work.unit_tokens,
                "slots": work.slots,
                **row,
                "speed": flat[0]["step_s"] / step_s if flat else None,
                "units_per_s": work.units / step_s,
                "unit_tokens_per_s": work.unit_tokens / step_s,
                "slots_per_s": work.slots / step_s,
            }
            table.add(row, draw)
    return table.report


def draw(report: dict, path: Path) -> None:
    """Draw bars of step time and of branch tokens a second, with PyTorch's."""
    bars = [
        (f"{row['mode'].replace('_', '-')}\n{row['attention']}", row["step_s"], row["unit_tokens"])
        for row in report["rows"]
    ]
    colors = ["C2" if row["mode"] == "tree" else "C0" for row in report["rows"]]
    for name, peer in TORCH.items() if report["torch"] else ():
        bars.append((f"PyTorch\n{name}", peer["step_s"], report["branch_tokens"]))
        colors.append("0.6")
    names, seconds, tokens = zip(*bars, strict=True)
    rates = [count / s / 1e3 for count, s in zip(tokens, seconds, strict=True)]
    panels = (
        ("seconds a step", seconds, "{:.3f}"),
        ("branch (sample) tokens a second, thousands", rates, "{:,.0f}"),
    )
    title = (
        f"One step on an agent's tree: {report['packed_tokens']:,} packed tokens,"
        f" {report['branches']} branches of {report['branch_tokens']:,};"
        f" {report['model'].split(',')[0]}, {report['hardware']}"
    )
    draw_bars(path, title, names, colors, panels)


def main(arguments: list[str] | None = None) -> dict:
    parser = make_parser(__doc__, out="path without suffix; .json, .txt, .png")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--mode", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--impl", nargs="*", default=["auto"], help="backends of attention")
    options = parser.parse_args(arguments)
    command = command_line(arguments, "tree_vs_flat.py")
    return run(SIZES[options.size], options.mode, options.impl, options.out, command)


if __name__ == "__main__":
    main()
