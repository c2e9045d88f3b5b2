"""A whole optimizer step: forward, loss, backward, clipping, AdamW; this project and PyTorch.

python benchmarks/train_step.py --work tree8k --peer torch --out benchmarks/results/train_step_h200

One step of the training code as it runs (jaxtrain.core.step, the model, the loss) without the data
pipeline, on the same rows again and again. Prints a table; writes OUT.json, OUT.txt and OUT.png.

step s    median between the ends of steps that were queued together: the device's time
tok/s     packed tokens, without padding, a second on all devices
MFU       6 x weights that multiply a token (the head counts, the embedding table does not; 4 where
          frozen) x tokens + 12 x heads x head dim x visible pairs of the mask in each layer, over
          the data sheet's dense bf16 peak (989 TFLOP/s for an H200); recomputation not counted
peak GiB  jax: arguments and temporaries of the compiled program, per device; PyTorch: the
          allocator's peak during timed steps

Every value of --impl, --remat and --layers is measured in turn with the others. `--impl xla` is the
reference path without kernels. `--mesh fsdp=4` runs on several devices, a row for each row shard.
Peers (peers/): `torch` is FlexAttention and torch.compile on the same rows, `torch-full`
the same with every block checkpointed, `torch-branches` the tree's branches each alone, packed into
rows of documents, one a microstep, as trainers without trees do it. Models with linear attention
are measured on branches by each of them, and without torch.compile where it
fails or `--eager` says so; `how` says what ran.
"""

import argparse
import dataclasses
import functools
import gzip
import itertools
import math
import os
import re
import time
from pathlib import Path

import jax
from harness import (
    Table,
    command_line,
    compile_step,
    describe_devices,
    draw_bars,
    make_parser,
    planned_gib,
    shorten,
    summarize_seconds,
    time_queued,
)
from step_work import MODELS, WORKS

from jaxtrain.batch import Batch
from jaxtrain.config import AdapterConfig, ModelConfig, OptimConfig
from jaxtrain.core.adapter import make_adapter
from jaxtrain.core.bundle import ModelBundle, make_product
from jaxtrain.core.losses.nll import nll_loss
from jaxtrain.core.metrics import count_work, model_flops, peak_flops
from jaxtrain.core.optimizer import build_optimizer, build_schedule
from jaxtrain.core.step import abstract_state, init_state, make_step
from jaxtrain.core.step_metrics import count_matmul_params
from jaxtrain.core.weights import abstract_params, open_params, split_trained
from jaxtrain.distributed.feed import feed, row_shards
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.layers.expert_transport import Transport
from jaxtrain.models import build, families

WARM_UP, TIMED = 3, 10
ATTENTION_ONLY = ("cudnn",)
SWITCH = {"true": True, "false": False}
OPTIM = OptimConfig(learning_rate=1e-5)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A way to run the step."""

    model: str
    work: str
    impl: str = "auto"
    """Backend of attention and of the log-probs."""
    remat: str = "none"
    layers: str = "scan"
    """scan or unroll."""
    depth: int = 0
    """Number of layers instead of the model's; 0 leaves it."""
    lora: int = 0
    """Rank; 0 trains everything."""
    target: str = "all-linear"
    """What LoRA is on."""
    quantize: str = "none"
    """Storage of the frozen matrices."""
    matmul: str = "default"
    """model.matmul of a config."""
    moments: str = "params"
    """optim.moments of a config."""
    param_dtype: str = "float32"
    dtype: str = "bfloat16"
    rows: int = 1
    """Rows of a microstep for each row shard."""
    microsteps: int = 1
    mesh: tuple[tuple[str, int], ...] = ()
    flags: tuple[tuple[str, str], ...] = ()
    """XLA flags of this program."""
    transport: Transport = Transport()
    """Of tokens to experts of other devices."""
    note: str = ""

    @property
    def num_devices(self) -> int:
        return math.prod(size for _, size in self.mesh)

    def raw(self) -> dict:
        """The model's config.json."""
        second = {"num_hidden_layers": self.depth} if self.depth else {}
        return MODELS[self.model] | second

    def label(self) -> str:
        """Return the description in the table."""
        parts = [self.impl, self.layers, f"remat={self.remat}"]
        parts += [f"depth={self.depth}"] if self.depth else []
        if self.lora:
            parts += [f"lora={self.lora}", self.target]
        parts += [self.quantize] if self.quantize != "none" else []
        parts += [self.matmul] if self.matmul != "default" else []
        parts += [f"moments={self.moments}"] if self.moments != "params" else []
        parts += [f"{axis}={size}" for axis, size in self.mesh]
        parts += [f"{name.removeprefix('xla_')}={value}" for name, value in self.flags]
        return " ".join([*parts, self.note]).rstrip()


class Program:
    """A step, compiled on shapes; `open` puts its state and batch on the devices."""

    loss = staticmethod(nll_loss)

    def __init__(self, setting: Setting, batch: Batch | None = None, optim: OptimConfig = OPTIM):
        self.setting = setting
        optim = optim.model_copy(update={"moments": setting.moments})
        self.mesh = make_mesh(jax.devices()[: setting.num_devices], **dict(setting.mesh))
        self.architecture = families.config_from_hf(setting.raw())
        rows = setting.rows * row_shards(self.mesh)
        shape = (self.architecture.vocab_size, rows, setting.microsteps)
        self.batch = WORKS[setting.work].batch(*shape) if batch is None else batch
        adapter = AdapterConfig()
        if setting.lora:
            how = {"target": setting.target, "quantize": setting.quantize}
            adapter = AdapterConfig(kind="lora", rank=setting.lora, **how)
        options = {
            "param_dtype": setting.param_dtype,
            "dtype": setting.dtype,
            "remat": setting.remat,
            "scan_layers": setting.layers == "scan",
            "attention_impl": setting.impl,
            "transport": setting.transport,
        }
        self.bundle = ModelBundle(
            tokenizer=None,
            architecture=self.architecture,
            mesh=self.mesh,
            folder=None,
            options=options,
            adapter=make_adapter(adapter, self.architecture),
            product=make_product(ModelConfig(matmul=setting.matmul, path="-")),
        )
        with jax.set_mesh(self.mesh):
            shapes, self.rebuild = abstract_params(self.bundle)
            trained, self.frozen = split_trained(shapes, self.bundle.adapter)
            self.optimizer = build_optimizer(optim, build_schedule(optim, 1000), trained)
            head = "auto" if setting.impl in ATTENTION_ONLY else setting.impl
            loss = functools.partial(self.loss, impl=head)
            grad_norm = optim.max_grad_norm
            step = make_step(self.rebuild, loss, {"nll": 1.0}, self.optimizer, grad_norm)
            self.state, self.placed = abstract_state(trained, self.optimizer), None
            placed = feed(self.batch, self.mesh)
            flags = {name: SWITCH.get(value, value) for name, value in setting.flags}
            start = time.perf_counter()
            self.step, self.compiled = compile_step(
                step, self.state, placed, self.frozen, flags or None
            )
            self.compile_s = time.perf_counter() - start

    def open(self) -> None:
        """Draw weights, and put the batch on the devices."""
        with jax.set_mesh(self.mesh):
            trained, self.frozen = split_trained(open_params(self.bundle, 0), self.bundle.adapter)
            self.state = init_state(trained, self.optimizer)
            self.placed = feed(self.batch, self.mesh)

    def run(self):
        """Run one step and return its output."""
        with jax.set_mesh(self.mesh):
            self.state, output = self.step(self.state, self.placed, self.frozen)
        return output

    def measure(self, timed: int | None = None, warm_up: int = WARM_UP) -> dict:
        """Loss of the first step, seconds a step, memory, rates."""
        if self.placed is None:
            self.open()
        outputs = [self.run() for _ in range(warm_up)]
        losses = [float(output.metrics["loss"][0]) for output in outputs]
        row = {
            "loss": losses[0],
            "loss_after": losses[-1],
            **summarize_seconds(time_queued(self.run, timed or TIMED)),
            "compile_s": self.compile_s,
            "peak_gib": planned_gib(self.compiled),
        }
        return row | self.rates(row["step_s"])

    def rates(self, seconds: float) -> dict:
        """Tokens a second and MFU of a step that takes `seconds`."""
        model = self.rebuild({**self.frozen, **self.state.params})
        return count_rates(model, self.batch, seconds, self.mesh.size, self.frozen)

    def trace(self, folder: Path, steps: int = 3) -> None:
        """A profile of some steps, and the compiled program, in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        text = re.sub(r", backend_config=\{kernel_hash.*", "", self.compiled.as_text())
        with gzip.open(folder / "program.txt.gz", "wt") as file:
            file.write(text)
        with jax.profiler.trace(str(folder)):
            for _ in range(steps):
                output = self.run()
            jax.block_until_ready((output, self.state))


def count_rates(model, batch, seconds: float, devices: int = 1, frozen=()) -> dict:
    """Tokens a second and MFU; see the head of this file. By default all weights are trained."""
    tokens, spans = count_work(batch)
    matmul_params, mixing = count_matmul_params(model, frozen), model.stack.mixing_flops(spans)
    flops = model_flops(matmul_params, tokens, mixing)
    rate = flops / seconds / devices
    peak = peak_flops(jax.devices()[0].device_kind, "bfloat16", None)
    return {
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "tflops": rate / 1e12,
        "mfu": rate / peak if peak else None,
    }


def choose_settings(options: argparse.Namespace) -> list[Setting]:
    """Every combination of the repeated options."""
    shared = {
        "depth": options.depth,
        "lora": options.lora,
        "quantize": options.quantize,
        "param_dtype": options.param_dtype,
        "dtype": options.dtype,
        "rows": options.rows,
        "microsteps": options.microsteps,
        "mesh": tuple((a, int(n)) for a, n in (part.split("=") for part in options.mesh)),
        "flags": tuple(tuple(flag.split("=", 1)) for flag in options.flags),
    }
    per_entry = itertools.product(
        options.model, options.work, options.impl, options.remat, options.layers
    )
    return [
        Setting(*entry, **shared, matmul=matmul, moments=moments)
        for entry in per_entry
        for matmul, moments in itertools.product(options.matmul, options.moments)
    ]


COLUMNS = (
    ("model", "model", "<12"),
    ("work", "work", "<11"),
    ("by", "by", "<10"),
    ("step s", "step_s", ">9.4f"),
    ("tok/s", "tokens_per_s", ">10,.0f"),
    ("MFU", "mfu", ">7.1%"),
    ("peak GiB", "peak_gib", ">10.2f"),
    ("compile s", "compile_s", ">11.1f"),
    ("loss", "loss", ">9.4f"),
)


def measure_setting(setting: Setting, trace: Path | None = None) -> dict:
    """Return one row of the report; a setting that cannot run has "failed"."""
    row = {"by": "jaxtrain", "how": setting.label()} | dataclasses.asdict(setting)
    try:
        program = Program(setting)
        row |= program.measure()
        if trace is not None:
            program.trace(trace)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as reason:
        row["failed"] = shorten(reason)
    return row


PEERS = ("torch", "torch-full", "torch-branches")


def measure_peer(setting: Setting, peer: str, eager: bool = False) -> dict:
    """Return PyTorch's row for the same model and work; `how` says what ran. Where torch.compile
    fails, a model with linear attention runs without it."""
    import torch
    from peers import train_step as torch_step

    architecture = families.config_from_hf(setting.raw())
    work, vocabulary = WORKS[setting.work], architecture.vocab_size
    batch = work.batch(vocabulary, setting.rows, setting.microsteps)
    hybrid = setting.raw()["model_type"] == "qwen3_5_text"
    row = {"by": "PyTorch", "torch": torch.__version__} | dataclasses.asdict(setting)
    packed, notes = batch, []
    if peer == "torch-full":
        notes.append("remat=full")
    if peer == "torch-branches" or (hybrid and any(p >= 0 for _, p in work.forest())):
        packed = work.packed_branches(vocabulary)
        notes.append(f"branches alone, {len(packed.tokens)} rows")
    cuda = torch.cuda.is_available()
    options = torch_step.Options(
        dtype=getattr(torch, setting.dtype),
        remat="full" if peer == "torch-full" else "none",
        device="cuda" if cuda else "cpu",
        compile=cuda and not eager,
    )
    frequency, _ = architecture.encodings()["default"]
    kernels = "flash-linear-attention" if hybrid else "FlexAttention"
    kernels = kernels if cuda else "plain loops"
    while True:
        how = f"{kernels} + compile" if options.compile else f"{kernels}, eager"
        row["how"] = ", ".join([how, *notes])
        try:
            step = torch_step.build_step(setting.raw(), tuple(frequency), packed, options)
            row |= step.measure()
        except (RuntimeError, ImportError, AttributeError) as reason:
            why = shorten(reason)
            if not (hybrid and options.compile):
                return row | {"failed": why}
            print(f"torch.compile failed, so without it: {why}", flush=True)
            row["compile_failed"] = why
            options = dataclasses.replace(options, compile=False)
            continue
        return row | count_rates(build.abstract(architecture), batch, row["step_s"])


def draw(report: dict, path: Path) -> None:
    """Bars of step time and peak memory."""
    rows = [row for row in report["rows"] if "failed" not in row]
    names = [f"{row['model']} {row['work']}\n{row['by']} {row['how']}" for row in rows]
    colors = ["C2" if row["by"] == "jaxtrain" else "0.6" for row in rows]
    panels = (
        ("seconds a step", [row["step_s"] for row in rows], "{:.3f}"),
        ("peak memory, GiB", [row["peak_gib"] for row in rows], "{:.1f}"),
    )
    draw_bars(path, f"One optimizer step, {report['hardware']}", names, colors, panels)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__, out="path without suffix; .json, .txt, .png")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["qwen3-0.6b"])
    parser.add_argument("--work", nargs="+", choices=WORKS, default=["tree8k"])
    parser.add_argument(
        "--impl",
        nargs="*",
        default=["auto"],
        help="auto, xla, reference, or one of attention alone; or none",
    )
    parser.add_argument("--remat", nargs="+", default=["none"])
    parser.add_argument("--layers", nargs="+", choices=["scan", "unroll"], default=["scan"])
    parser.add_argument("--matmul", nargs="+", default=["default"], help="model.matmul")
    parser.add_argument("--moments", nargs="+", default=["params"], help="optim.moments")
    parser.add_argument("--depth", type=int, default=0, help="layers instead of the model's")
    parser.add_argument("--lora", type=int, default=0, help="rank; 0 trains everything")
    parser.add_argument("--quantize", default="none", help="storage of frozen matrices, as nf4")
    parser.add_argument("--param-dtype", default="float32")
    parser.add_argument("--dtype", default="bfloat16", help="of activations and matmuls")
    parser.add_argument("--rows", type=int, default=1, help="rows of a microstep per row shard")
    parser.add_argument("--microsteps", type=int, default=1)
    parser.add_argument("--mesh", nargs="*", default=[], help="axes, as fsdp=4 tensor=2")
    parser.add_argument("--flags", nargs="*", default=[], help="XLA flags, as xla_gpu_x=false")
    parser.add_argument("--peer", nargs="*", choices=PEERS, default=[])
    parser.add_argument("--eager", action="store_true", help="peers without torch.compile")
    parser.add_argument("--trace", type=Path, help="folder for profiles and compiled programs")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict:
    options = parse(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory, too
    command = command_line(arguments, "train_step.py")
    table = Table(COLUMNS, options.out, command, **describe_devices())
    for index, setting in enumerate(choose_settings(options)):
        trace = options.trace and options.trace / str(index)
        table.add(measure_setting(setting, trace), draw)
    options.impl = options.impl or [""]
    works = dict.fromkeys(
        dataclasses.replace(setting, impl="", remat="", layers="", moments="", flags=())
        for setting in choose_settings(options)
    )
    for setting, peer in itertools.product(works, options.peer):
        table.add(measure_peer(setting, peer, options.eager), draw)
    return table.report


if __name__ == "__main__":
    main()
