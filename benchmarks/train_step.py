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
Peers (torch_model.py): `torch` is FlexAttention and torch.compile on the same rows, `torch-full`
the same with every block checkpointed, `torch-branches` the tree's branches each alone, packed into
rows of documents, one a microstep, as trainers without trees do it. Models with linear attention
(torch_hybrid.py) are measured on branches by each of them, and without torch.compile where it
fails or `--eager` says so; `how` says what ran.
"""

import argparse
import dataclasses
import functools
import gzip
import itertools
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np
from step_work import MODELS, WORKS

from jaxtrain.batch import Batch
from jaxtrain.config import AdapterConfig, ModelConfig, OptimConfig
from jaxtrain.core.adapter import make_adapter
from jaxtrain.core.bundle import ModelBundle, make_product
from jaxtrain.core.losses.nll import nll_loss
from jaxtrain.core.metrics import count_work, model_flops, peak_flops
from jaxtrain.core.optimizer import build_optimizer, build_schedule
from jaxtrain.core.step import init_state, make_step
from jaxtrain.core.step_metrics import count_matmul_params
from jaxtrain.core.weights import abstract_params, open_params, split_trained
from jaxtrain.distributed.feed import feed, row_shards
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.models import build, families

WARM_UP, TIMED = 3, 10
ATTENTION_ONLY = ("cudnn",)
SWITCH = {"true": True, "false": False}
OPTIM = OptimConfig(learning_rate=1e-5)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to run the step."""

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
    param_dtype: str = "float32"
    dtype: str = "bfloat16"
    rows: int = 1
    """Rows of a microstep for each row shard."""
    microsteps: int = 1
    mesh: tuple[tuple[str, int], ...] = ()
    flags: tuple[tuple[str, str], ...] = ()
    """XLA flags of this program."""

    def raw(self) -> dict:
        """The model's config.json."""
        other = {"num_hidden_layers": self.depth} if self.depth else {}
        return MODELS[self.model] | other

    def label(self) -> str:
        """What the table calls it."""
        parts = [self.impl, self.layers, f"remat={self.remat}"]
        parts += [f"depth={self.depth}"] if self.depth else []
        if self.lora:
            parts += [f"lora={self.lora}", self.target]
        parts += [self.quantize] if self.quantize != "none" else []
        parts += [self.matmul] if self.matmul != "default" else []
        parts += [f"{axis}={size}" for axis, size in self.mesh]
        parts += [f"{name.removeprefix('xla_')}={value}" for name, value in self.flags]
        return " ".join(parts)


class Program:
    """A compiled step with its state and batch on the devices."""

    def __init__(self, setting: Setting, batch: Batch | None = None, optim: OptimConfig = OPTIM):
        self.setting = setting
        devices = jax.devices() if setting.mesh else jax.devices()[:1]
        self.mesh = make_mesh(devices, **dict(setting.mesh))
        self.architecture = families.config_from_hf(setting.raw())
        rows = setting.rows * row_shards(self.mesh)
        shape = (self.architecture.vocab_size, rows, setting.microsteps)
        self.batch = WORKS[setting.work].batch(*shape) if batch is None else batch
        adapter = AdapterConfig()
        if setting.lora:
            how = {"target": setting.target, "quantize": setting.quantize}
            adapter = AdapterConfig(kind="lora", rank=setting.lora, **how)
        self.parts = ModelBundle(
            tokenizer=None,
            architecture=self.architecture,
            mesh=self.mesh,
            folder=None,
            options={
                "param_dtype": setting.param_dtype,
                "dtype": setting.dtype,
                "remat": setting.remat,
                "scan_layers": setting.layers == "scan",
                "attention_impl": setting.impl,
            },
            adapter=make_adapter(adapter, self.architecture),
            product=make_product(ModelConfig(matmul=setting.matmul, path="-")),
        )
        with jax.set_mesh(self.mesh):
            _, self.rebuild = abstract_params(self.parts)
            trained, self.frozen = split_trained(open_params(self.parts, 0), self.parts.adapter)
            optimizer = build_optimizer(optim, build_schedule(optim, 1000), trained)
            self.state = init_state(trained, optimizer)
            head = "auto" if setting.impl in ATTENTION_ONLY else setting.impl
            loss = functools.partial(nll_loss, impl=head)
            step = make_step(self.rebuild, loss, {"nll": 1.0}, optimizer, optim.max_grad_norm)
            self.placed = feed(self.batch, self.mesh)
            start = time.perf_counter()
            lowered = step.lower(self.state, self.placed, self.frozen)
            flags = {name: SWITCH.get(value, value) for name, value in setting.flags}
            self.compiled = lowered.compile(compiler_options=flags or None)
            self.compile_s = time.perf_counter() - start

    def run(self):
        """One step; returns its output."""
        self.state, output = self.compiled(self.state, self.placed, self.frozen)
        return output

    def measure(self, timed: int = TIMED) -> dict:
        """Loss of the first step, seconds a step, memory, rates."""
        with jax.set_mesh(self.mesh):
            losses = [float(self.run().metrics["loss"][0]) for _ in range(WARM_UP)]
            jax.block_until_ready(self.state)
            ends, waiting = [], None
            for _ in range(timed + 2):
                output = self.run()
                if waiting is not None:
                    jax.block_until_ready(waiting)
                    ends.append(time.perf_counter())
                waiting = output
            jax.block_until_ready(self.state)
        seconds = np.diff(ends).tolist()
        memory = self.compiled.memory_analysis()
        peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes
        peak += memory.output_size_in_bytes - memory.alias_size_in_bytes
        found = {
            "loss": losses[0],
            "loss_after": losses[-1],
            "step_s": statistics.median(seconds),
            "step_s_min": min(seconds),
            "step_s_max": max(seconds),
            "compile_s": self.compile_s,
            "peak_gib": peak / 2**30,
        }
        return found | self.rates(found["step_s"])

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
        with jax.set_mesh(self.mesh), jax.profiler.trace(str(folder)):
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
    each = itertools.product(
        options.model, options.work, options.impl, options.remat, options.layers
    )
    return [Setting(*one, **shared, matmul=how) for one in each for how in options.matmul]


def run(
    settings: list[Setting],
    asked: list[Setting],
    peers: list[str],
    out: Path | None,
    command: str,
    trace: Path | None,
    eager: bool = False,
) -> dict:
    """Measure each setting, then PyTorch on the work that was asked for; the report is written
    after each."""
    report = start_report(command)
    for index, setting in enumerate(settings):
        add(report, measure_setting(setting, trace and trace / str(index)), out)
    works = dict.fromkeys(
        dataclasses.replace(s, impl="", remat="", layers="", flags=()) for s in asked
    )
    for setting, peer in itertools.product(works, peers):
        add(report, measure_peer(setting, peer, eager), out)
    return report


def measure_setting(setting: Setting, trace: Path | None = None) -> dict:
    """One row of the report; a setting that cannot run says why."""
    row = {"by": "jaxtrain", "how": setting.label()} | dataclasses.asdict(setting)
    try:
        program = Program(setting)
        row |= program.measure()
        if trace is not None:
            program.trace(trace)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as reason:
        row["failed"] = " ".join(str(reason).split())[:300]
    return row


PEERS = ("torch", "torch-full", "torch-branches")


def measure_peer(setting: Setting, peer: str, eager: bool = False) -> dict:
    """One row of the report by PyTorch, for the same model and work; what ran is in `how`. Where
    torch.compile fails, a model with linear attention runs without it."""
    import torch
    import torch_model

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
    options = torch_model.Options(
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
            step = torch_model.build_step(setting.raw(), tuple(frequency), packed, options)
            row |= step.measure()
        except (RuntimeError, ImportError, AttributeError) as reason:
            why = " ".join(str(reason).split())[:300]
            if not (hybrid and options.compile):
                return row | {"failed": why}
            print(f"torch.compile failed, so without it: {why}", flush=True)
            row["compile_failed"] = why
            options = dataclasses.replace(options, compile=False)
            continue
        return row | count_rates(build.abstract(architecture), batch, row["step_s"])


def start_report(command: str) -> dict:
    """A report without rows."""
    return {
        "command": command,
        "hardware": f"{jax.device_count()} {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        "rows": [],
    }


def add(report: dict, row: dict, out: Path | None) -> None:
    """Put a row into the report, print it, and write the files."""
    report["rows"].append(row)
    print(table_line(row), flush=True)
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    out.with_suffix(".txt").write_text(make_table(report))
    draw(report, out.with_suffix(".png"))


HEADER = (
    f"{'model':<12}{'work':<11}{'by':<10}{'step s':>9}{'tok/s':>10}{'MFU':>7}{'peak GiB':>10}"
    f"{'compile s':>11}{'loss':>9}  how"
)


def table_line(row: dict) -> str:
    """One line of the table."""
    start = f"{row['model']:<12}{row['work']:<11}{row['by']:<10}"
    if "failed" in row:
        return f"{start}  failed: {row['how']}: {row['failed']}"
    mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
    return (
        f"{start}{row['step_s']:>9.4f}{row['tokens_per_s']:>10,.0f}{mfu:>7}"
        f"{row['peak_gib']:>10.2f}{row['compile_s']:>11.1f}{row['loss']:>9.4f}  {row['how']}"
    )


def make_table(report: dict) -> str:
    """The report as text."""
    head = f"{report['command']}\n{report['hardware']}, jax {report['jax']}\n\n"
    return head + "\n".join([HEADER, *map(table_line, report["rows"])]) + "\n"


def draw(report: dict, path: Path) -> None:
    """Bars of step time and peak memory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in report["rows"] if "failed" not in row]
    names = [f"{row['model']} {row['work']}\n{row['by']} {row['how']}" for row in rows]
    figure = Figure(figsize=(11, 0.55 * len(rows) + 1.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    colors = ["C2" if row["by"] == "jaxtrain" else "0.6" for row in rows]
    for axes, key, title, style in zip(
        panels,
        ("step_s", "peak_gib"),
        ("seconds a step", "peak memory, GiB"),
        ("{:.3f}", "{:.1f}"),
        strict=True,
    ):
        values = [row[key] for row in rows]
        drawn = axes.barh(range(len(rows)), values, color=colors)
        axes.bar_label(drawn, [style.format(v) for v in values], padding=3, fontsize=8)
        axes.set_title(title, loc="left")
        axes.set_xlim(0, 1.15 * max(values, default=1))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(rows)), names, fontsize=7)
    panels[0].invert_yaxis()
    figure.suptitle(f"One optimizer step, {report['hardware']}", fontsize=10)
    figure.savefig(path)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
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
    parser.add_argument("--out", type=Path, help="path without suffix; .json, .txt, .png")
    return parser


def main(arguments: list[str] | None = None) -> dict:
    options = make_parser().parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    command = "python benchmarks/train_step.py " + " ".join(given).split(" --out")[0]
    print(HEADER)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory, too
    settings = choose_settings(options)
    options.impl = options.impl or [""]
    asked = choose_settings(options)
    files = {"out": options.out, "command": command, "trace": options.trace}
    return run(settings, asked, options.peer, **files, eager=options.eager)


if __name__ == "__main__":
    main()
