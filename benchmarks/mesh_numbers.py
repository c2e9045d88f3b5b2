r"""Meshes of several GPUs against one: log-probs, gradients, and ten steps of AdamW.

python benchmarks/mesh_numbers.py --out benchmarks/results/mesh_numbers_h100
XLA_FLAGS=--xla_force_host_platform_device_count=4 \
    python benchmarks/mesh_numbers.py --tiny      # on a CPU, to see that it works

Four trees of an agent's answers, of 2k packed tokens each, and the same random weights on every
mesh; Qwen3-0.6B's shape in four layers, and Qwen3-30B-A3B's in two. float32: XLA's products at full
precision, no kernels. bfloat16: as trained, with kernels and float32 masters.

logp      largest difference of a token's log-prob from one device's, before the first step
mean      mean difference
gradient  over all parameters: largest difference of the first gradient / its largest value
loss 1    relative difference of the first loss
loss 10   largest relative difference of ten losses

In bfloat16 one device alone is a row, too: its distance from float32, the scale of the others.
"""

import concurrent.futures
import dataclasses

import jax
import numpy as np
import optax
from harness import Table, command_line, describe_devices, make_parser, shorten
from train_step import Program, Setting

from jaxtrain.config import OptimConfig
from jaxtrain.core.losses.logp import token_logp
from jaxtrain.distributed.feed import feed, row_shards
from jaxtrain.distributed.mesh import make_mesh

ROWS, STEPS = 4, 10
OPTIM = OptimConfig(learning_rate=1e-4)
DENSE = [
    {"fsdp": 2},
    {"fsdp": 4},
    {"tensor": 2},
    {"tensor": 4},
    {"context": 2},
    {"context": 4},
    {"fsdp": 2, "tensor": 2},
    {"fsdp": 2, "context": 2},
    {"context": 2, "tensor": 2},
]
EXPERTS = [{"fsdp": 4}, {"expert": 2}, {"expert": 4}, {"expert": 2, "tensor": 2}]
EXPERTS += [{"fsdp": 2, "expert": 2}, {"expert": 2, "context": 2}]
WAYS = {"float32": {"impl": "xla"}, "bfloat16": {"remat": "save_attention"}}


def list_settings(tiny: bool) -> list[tuple[Setting, list[Setting]]]:
    """Return (on one device, on several) for each model and dtype."""
    models = [("tiny", 2, DENSE), ("tiny-moe", 2, EXPERTS)]
    if not tiny:
        models = [("qwen3-0.6b", 4, DENSE), ("qwen3-30b-a3b", 2, EXPERTS)]
    work = "tiny-tree" if tiny else "tree2k"
    settings = []
    for model, depth, meshes in models:
        for dtype, how in WAYS.items():
            single = Setting(model, work, depth=depth, dtype=dtype, rows=ROWS, **how)
            sizes = [tuple(mesh.items()) for mesh in meshes]
            spread = [dataclasses.replace(single, mesh=mesh) for mesh in sizes]
            settings.append((single, [s for s in spread if s.num_devices <= jax.device_count()]))
    return settings


class Numbers:
    """Compiled programs of a setting, and then the numbers that they compute, on the host."""

    def __init__(self, setting: Setting):
        shards = row_shards(make_mesh(jax.devices()[: setting.num_devices], **dict(setting.mesh)))
        setting = dataclasses.replace(setting, rows=ROWS // shards)
        # The context is of the thread that compiles.
        with jax.default_matmul_precision("highest" if setting.dtype == "float32" else "default"):
            program = self.program = Program(setting, optim=OPTIM)

            def score(params, batch):
                batch = jax.tree.map(lambda x: x[0], batch._replace(denoms={}))
                return token_logp(program.rebuild(params), batch, impl=setting.impl).logp

            with jax.set_mesh(program.mesh):
                params = {**program.frozen, **program.state.params}
                placed = feed(program.batch, program.mesh)
                self.score = jax.jit(score).lower(params, placed).compile()

    def compute(self) -> "Numbers":
        """Run ten steps, free the devices, and return self."""
        program = self.program
        program.open()
        params = {**program.frozen, **program.state.params}
        self.logp = np.asarray(self.score(params, program.placed), np.float64)
        self.scored = np.asarray(program.batch.weights["nll"][0]) > 0
        self.losses = []
        for step in range(STEPS):
            total, weight = program.run().metrics["loss"]
            self.losses.append(float(total) / float(weight))
            if step == 0:  # from zero, Adam's first moment is the gradient times a constant
                moment = optax.tree_utils.tree_get(program.state.opt_state, "mu")
                self.gradients = [np.asarray(x, np.float32) for x in jax.tree.leaves(moment)]
        del self.program, self.score
        return self


def compare(actual: Numbers, expected: Numbers) -> dict[str, float]:
    """Return the columns of the table."""
    difference = np.abs(actual.logp - expected.logp)[expected.scored]
    pairs = zip(actual.gradients, expected.gradients, strict=True)
    losses = [abs(a / b - 1) for a, b in zip(actual.losses, expected.losses, strict=True)]
    return {
        "logp": difference.max(),
        "mean": difference.mean(),
        "gradient": max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs),
        "loss_first": losses[0],
        "loss_most": max(losses),
        "loss": actual.losses[0],
        "loss_last": actual.losses[-1],
    }


COLUMNS = (
    ("model", "model", "<14"),
    ("dtype", "dtype", "<9"),
    ("mesh", "name", "<24"),
    ("logp", "logp", ">9.1e"),
    ("mean", "mean", ">9.1e"),
    ("gradient", "gradient", ">9.1e"),
    ("loss 1", "loss_first", ">9.1e"),
    ("loss 10", "loss_most", ">9.1e"),
    ("first", "loss", ">9.5f"),
    ("tenth", "loss_last", ">9.5f"),
)


def main(arguments: list[str] | None = None) -> dict:
    parser = make_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="tiny models, on fake devices")
    options = parser.parse_args(arguments)
    command = command_line(arguments, "mesh_numbers.py")
    table = Table(COLUMNS, options.out, command, **describe_devices())
    settings = list_settings(options.tiny)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        waiting = {s: pool.submit(Numbers, s) for single, many in settings for s in (single, *many)}
        wide = None
        for single, many in settings:
            expected = waiting[single].result().compute()
            wide, before = (expected, wide) if single.dtype == "float32" else (wide, wide)
            rows = [(single, expected, before)] if single.dtype != "float32" else []
            for setting, actual, base in [*rows, *((s, None, expected) for s in many)]:
                name = " ".join(f"{axis}={size}" for axis, size in setting.mesh)
                row = dataclasses.asdict(setting) | {"name": name or "one, against float32"}
                try:
                    row |= compare(actual or waiting[setting].result().compute(), base)
                except (jax.errors.JaxRuntimeError, NotImplementedError) as reason:
                    row["failed"] = shorten(reason)
                table.add(row)
    return table.report


if __name__ == "__main__":
    main()
