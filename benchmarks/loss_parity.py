"""Training with the kernels follows training without them: the same data, seed and steps.

python benchmarks/loss_parity.py --out benchmarks/results/loss_parity_h200

Runs, all from the same weights on the same trees, which are new in every step:

kernels    bfloat16, impl "auto": what training uses
xla        bfloat16, impl "xla": the reference path
reordered  the same with the trees of each row in reverse: the same sums in another order, which is
           what rounding alone does to a run
float32    (--float32) the reference path in float32: what all of them approximate

Tokens come from a random Markov chain, so that there is something to learn. Prints how far each
run's loss is from xla's, writes OUT.json, OUT.txt and OUT.png.
"""

import dataclasses
import json
import time
from pathlib import Path

import numpy as np
from harness import command_line, describe_devices, make_figure, make_parser
from jaxtrain_kernels.testing import agent_tree
from train_step import Program, Setting

from jaxtrain.batch import Batch
from jaxtrain.config import OptimConfig
from jaxtrain.data.packing.pack import build_batch, lay_out, stack_batches
from jaxtrain.data.packing.tree import build_tree
from jaxtrain.distributed.feed import feed
from jaxtrain.models import families

RUNS = {
    "kernels": {"impl": "auto"},
    "xla": {"impl": "xla"},
    "reordered": {"impl": "xla"},
    "float32": {"impl": "xla", "dtype": "float32"},
}


@dataclasses.dataclass(frozen=True)
class Data:
    """Rows of trees whose tokens a Markov chain drew: each token has four likely followers."""

    vocabulary: int
    length: int = 4096
    trees: int = 4
    states: int = 2048

    def chain(self) -> np.ndarray:
        """[states, 4]: the followers of each token."""
        rng = np.random.default_rng(0)
        states = min(self.states, self.vocabulary)
        return rng.integers(0, states, (states, 4)).astype(np.int32)

    def batch(self, step: int, reverse: bool) -> Batch:
        """[1, 1, T] of one step; `reverse` changes nothing but the order of the trees."""
        followers, rng = self.chain(), np.random.default_rng(step)
        turns = 4
        size = self.length // (self.trees * turns) * 3 // 5
        row = []
        for index in range(self.trees):
            ends, parts = [0], []
            for n, parent in agent_tree(turns, size, size // 4, seed=step * self.trees + index):
                tokens = np.empty(n, np.int32)
                last = ends[parent + 1]
                for i, choice in enumerate(rng.integers(0, 4, n)):
                    tokens[i] = last = followers[last, choice]
                ends.append(last)
                parts.append((parent, tokens, np.ones(n), ""))
            row.append(lay_out(build_tree(parts)))
        row = row[::-1] if reverse else row
        return stack_batches([build_batch([row], self.length)])


def train(name: str, setting: Setting, data: Data, steps: int, rate: float) -> tuple[list, float]:
    """(loss of each step, seconds) of one run."""
    reverse = name == "reordered"
    setting = dataclasses.replace(setting, **RUNS[name])
    optim = OptimConfig(learning_rate=rate, warmup_steps=20, lr_scheduler="constant")
    program = Program(setting, data.batch(0, reverse), optim)
    program.open()
    start = time.perf_counter()
    losses = []
    for step in range(steps):
        program.placed = feed(data.batch(step, reverse), program.mesh)
        losses.append(program.run().metrics["loss"][0])
    losses = [float(loss) for loss in losses]
    return losses, time.perf_counter() - start


def compare(losses: dict[str, list[float]]) -> list[str]:
    """A line for each run: distance from xla's losses over the whole run, and by thirds."""
    base = np.array(losses["xla"])
    thirds = np.array_split(np.arange(len(base)), 3)
    lines = [
        f"{'run':<11}{'last loss':>10}{'mean |d|':>11}{'max |d|':>10}  mean |d| by thirds, mean d"
    ]
    for name, values in losses.items():
        difference = np.array(values) - base
        by_third = "  ".join(f"{np.abs(difference[t]).mean():.1e}" for t in thirds)
        lines.append(
            f"{name:<11}{np.mean(values[-10:]):>10.4f}{np.abs(difference).mean():>11.2e}"
            f"{np.abs(difference).max():>10.2e}  {by_third}, {difference.mean():+.1e}"
        )
    return lines


def draw(losses: dict[str, list[float]], path: Path) -> None:
    """Losses, and their distance from xla's."""
    figure = make_figure((10, 3.6))
    losses_axes, distance_axes = figure.subplots(1, 2)
    base = np.array(losses["xla"])
    for name, values in losses.items():
        losses_axes.plot(values, label=name, linewidth=1)
        if name != "xla":
            distance_axes.plot(np.abs(np.array(values) - base), label=name, linewidth=0.8)
    losses_axes.set_title("loss", loc="left")
    distance_axes.set_title("|loss - loss of xla|", loc="left")
    distance_axes.set_yscale("log")
    for axes in (losses_axes, distance_axes):
        axes.set_xlabel("step")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> dict:
    parser = make_parser(__doc__, out="path without suffix; .json, .txt, .png")
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--float32", action="store_true")
    options = parser.parse_args(arguments)
    setting = Setting(options.model, "tree8k", depth=options.depth, dtype=options.dtype)
    data = Data(families.config_from_hf(setting.raw()).vocab_size, options.length)
    report = {
        "command": command_line(arguments, "loss_parity.py"),
        **describe_devices(),
        "setting": dataclasses.asdict(setting),
        "seconds": {},
        "losses": {},
    }
    for name in RUNS:
        if name != "float32" or options.float32:
            losses, seconds = train(name, setting, data, options.steps, options.rate)
            report["losses"][name], report["seconds"][name] = losses, seconds
    head = [report["command"], f"{report['hardware']}, jax {report['jax']}", ""]
    report["table"] = head + compare(report["losses"])
    print("\n".join(report["table"]))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".json").write_text(json.dumps(report) + "\n")
        options.out.with_suffix(".txt").write_text("\n".join(report["table"]) + "\n")
        draw(report["losses"], options.out.with_suffix(".png"))
    return report


if __name__ == "__main__":
    main()
