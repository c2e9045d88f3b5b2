"""Training steps on one GPU and on several: rates, scaling, memory, at published sizes.

python benchmarks/pod.py --cases 0.6b llama-8b 128k --out benchmarks/results/pod_h200

Random weights and tokens; a row is one document, so attention sees the whole causal half. Every
program is compiled first, side by side, on shapes alone; then each runs WARM_UP + TIMED steps. The
step is that of `jaxtrain.core.loop` without the data pipeline: forward, backward, clipping, AdamW.

step s    median over TIMED steps, each waited for
tok/s/GPU tokens of the step / step s / GPUs
MFU       6 x weights that multiply a token + attention's causal half, over 989 TFLOP/s (H200, bf16
          dense); frozen weights count 4; recomputation is not counted
eff.      tok/s/GPU against that of the same case on the fewest GPUs
peak GiB  most bytes that the allocator of GPU 0 had in use, where that is a new high; "plan"
          is the compiler's own sum of arguments and temporaries
"""

import concurrent.futures
import dataclasses
import gc
import re
import statistics
import time
import zlib
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from harness import (
    Table,
    allocated_gib,
    command_line,
    describe_devices,
    make_parser,
    planned_gib,
    shorten,
)
from step_work import MODELS

from jaxtrain.batch import Batch
from jaxtrain.config import AdapterConfig, OptimConfig
from jaxtrain.core.adapter import make_adapter
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.core.losses.nll import nll_loss
from jaxtrain.core.metrics import count_work, model_flops, peak_flops
from jaxtrain.core.optimizer import build_optimizer, build_schedule
from jaxtrain.core.step import abstract_state, init_state, make_step
from jaxtrain.core.step_metrics import count_matmul_params
from jaxtrain.core.weights import abstract_params, open_params, split_trained
from jaxtrain.distributed.feed import feed, row_shards
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.layers.expert_transport import Transport
from jaxtrain.models import families

WARM_UP, TIMED = 2, 5
OPTIM = OptimConfig(learning_rate=1e-5)


@dataclasses.dataclass(frozen=True)
class Case:
    """A program: model, mesh and how its step runs."""

    name: str
    model: str
    tokens: int
    """Of a row."""
    mesh: dict[str, int]
    rows: int = 1
    """For each row shard."""
    remat: str = "save_attention"
    adapter: dict | None = None
    param_dtype: str = "float32"
    note: str = ""
    layers: int = 0
    """0: all of the model's."""
    transport: Transport = Transport()
    """Of tokens to experts of other devices."""
    scan: bool = True
    """model.scan_layers"""

    @property
    def devices(self) -> int:
        return int(np.prod(list(self.mesh.values())))

    def label(self) -> str:
        mesh = " ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        layers = "" if self.scan else "unrolled"
        return " ".join(filter(None, [mesh, self.remat, layers, self.note]))


LORA = {"kind": "lora", "rank": 16}
NF4 = {"quantize": "nf4"}
CASES = [
    *(Case("0.6b", "qwen3-0.6b", 8192, {"fsdp": n}, 2, remat="none") for n in (1, 2, 4, 8)),
    *(Case("llama-8b", "llama-8b", 8192, {"fsdp": n}) for n in (2, 4, 8)),
    *(Case("8b", "qwen3-8b", 8192, {"fsdp": n}) for n in (2, 4, 8)),
    *(Case("4b", "qwen3-4b", 16384, {"fsdp": n}) for n in (1, 4, 8)),
    *(Case("128k", "qwen3-0.6b", 131072, {"context": n}) for n in (4, 8)),
    Case("128k-2", "qwen3-0.6b", 131072, {"context": 2}),
    *(Case("tensor", "llama-8b", 8192, {"fsdp": n, "tensor": 2}) for n in (2, 4)),
    Case("qlora", "qwen3-8b", 2048, {}, adapter=LORA | NF4, param_dtype="bfloat16"),
    Case("lora", "qwen3-8b", 8192, {}, adapter=LORA, param_dtype="bfloat16"),
    Case("qlora-8k", "qwen3-8b", 8192, {}, adapter=LORA | NF4, param_dtype="bfloat16"),
    # With room for what they compute again otherwise.
    *(Case("llama-8b-room", "llama-8b", 8192, {"fsdp": n}, 1, "elementwise") for n in (2, 4, 8)),
    *(Case("8b-room", "qwen3-8b", 8192, {"fsdp": n}, 1, "elementwise") for n in (2, 4, 8)),
    *(Case("4b-room", "qwen3-4b", 16384, {"fsdp": n}, 1, "elementwise") for n in (1, 4, 8)),
    Case("lora-room", "qwen3-8b", 8192, {}, 1, "elementwise", LORA, "bfloat16"),
    Case("lora-whole", "qwen3-8b", 8192, {}, 1, "none", LORA, "bfloat16"),
    Case("lora-unrolled", "qwen3-8b", 8192, {}, 1, "none", LORA, "bfloat16", scan=False),
    Case("qlora-room", "qwen3-8b", 8192, {}, 1, "elementwise", LORA | NF4, "bfloat16"),
    Case("qlora-unrolled", "qwen3-8b", 8192, {}, 1, "none", LORA | NF4, "bfloat16", scan=False),
    Case("tiny", "tiny", 256, {"fsdp": 2}),
    Case("tiny", "tiny", 256, {"fsdp": 2, "context": 2}, note="again"),
    Case("tiny-qlora", "tiny", 256, {}, adapter=LORA | NF4, param_dtype="bfloat16"),
]


class Program:
    """A case's step, compiled on shapes; `measure` allocates, runs and frees."""

    loss = staticmethod(nll_loss)

    def __init__(self, case: Case):
        self.case = case
        self.mesh = make_mesh(jax.devices()[: case.devices], **case.mesh)
        raw = dict(MODELS[case.model])
        raw["num_hidden_layers"] = case.layers or raw["num_hidden_layers"]
        length = max(raw["max_position_embeddings"], case.tokens)
        self.architecture = families.config_from_hf({**raw, "max_position_embeddings": length})
        options = {"param_dtype": case.param_dtype, "dtype": "bfloat16", "remat": case.remat}
        options |= {"transport": case.transport, "scan_layers": case.scan}
        adapter = make_adapter(AdapterConfig(**(case.adapter or {})), self.architecture)
        self.parts = ModelBundle(None, self.architecture, self.mesh, None, options, adapter)
        self.batch = one_document(case.rows * row_shards(self.mesh), case.tokens, raw["vocab_size"])
        with jax.set_mesh(self.mesh):
            self.shapes, self.rebuild = abstract_params(self.parts)
            trained, frozen = split_trained(self.shapes, adapter)
            self.optimizer = build_optimizer(OPTIM, build_schedule(OPTIM, 1000), trained)
            step = make_step(
                self.rebuild, self.loss, {"nll": 1.0}, self.optimizer, OPTIM.max_grad_norm
            )
            placed = feed(self.batch, self.mesh)
            places = {path: shape.sharding for path, shape in self.shapes.items()}
            fill = jax.jit(lambda: fill_params(self.shapes), out_shardings=places)
            self.fill = None if adapter else fill.lower().compile()
            start = time.perf_counter()
            lowered = step.lower(abstract_state(trained, self.optimizer), placed, frozen)
            self.compiled = lowered.compile()
            self.compile_s = time.perf_counter() - start

    def measure(self) -> dict:
        """Rates and memory of this case."""
        before = allocated_gib()
        with jax.set_mesh(self.mesh):
            params = self.fill() if self.fill else open_params(self.parts, 0)
            trained, frozen = split_trained(params, self.parts.adapter)
            del params
            state, placed = init_state(trained, self.optimizer), feed(self.batch, self.mesh)
            del trained
            jax.block_until_ready(state)
            opened = allocated_gib()
            losses, seconds = [], []
            timed = TIMED if self.case.tokens < 100_000 else 2
            for _ in range(WARM_UP + timed):
                start = time.perf_counter()
                state, output = self.compiled(state, placed, frozen)
                losses.append(float(output.metrics["loss"][0]))
                seconds.append(time.perf_counter() - start)
        after = allocated_gib()
        step_s = statistics.median(seconds[WARM_UP:])
        return {
            "step_s": step_s,
            "seconds": seconds,
            "losses": losses,
            "metrics": {name: float(s / w) for name, (s, w) in output.metrics.items()},
            "peak_gib": after if after > before else None,
            "peak_opening_gib": opened if opened > before else None,
            "plan_gib": planned_gib(self.compiled),
            "compile_s": self.compile_s,
            "collectives": count_collectives(self.compiled.as_text()),
        } | self.rates(step_s)

    def rates(self, seconds: float) -> dict:
        _, frozen = split_trained(self.shapes, self.parts.adapter)
        tokens, spans = count_work(self.batch)
        model = self.rebuild(self.shapes)
        mixing = model.stack.mixing_flops(spans)
        flops = model_flops(count_matmul_params(model, frozen), tokens, mixing)
        peak = peak_flops(jax.devices()[0].device_kind, "bfloat16", None)
        devices = self.case.devices
        mfu = flops / seconds / devices / peak if peak else None
        return {"tokens_per_s_per_gpu": tokens / seconds / devices, "mfu": mfu}


def fill_params(shapes: dict) -> dict:
    """Numbers that look random enough for matrix units and routers, of any sharding, from a program
    that compiles at once: hashes of their indices."""

    def fill(path: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
        if path.endswith("scale"):
            return jnp.ones(shape.shape, shape.dtype)
        index, stride = jnp.full(shape.shape, zlib.crc32(path.encode()), jnp.uint32), 1
        for dim in reversed(range(len(shape.shape))):
            position = jax.lax.broadcasted_iota(jnp.uint32, shape.shape, dim)
            index, stride = index + position * np.uint32(stride % 2**32), stride * shape.shape[dim]
        for factor, shift in ((0x7FEB352D, 16), (0x846CA68B, 15), (0x9E3779B1, 16)):
            index = (index ^ (index >> shift)) * np.uint32(factor)
        unit = (index >> 8).astype(jnp.float32) / 2**23 - 1
        return (0.02 * 3**0.5 * unit).astype(shape.dtype)

    return {path: fill(path, shape) for path, shape in shapes.items()}


def one_document(rows: int, length: int, vocabulary: int) -> Batch:
    """Batch [1, B, T] of rows that are one document each."""
    shape = (1, rows, length)
    index = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
    tokens = np.random.default_rng(0).integers(0, vocabulary, shape).astype(np.int32)
    weights = {"nll": (index > 0).astype(np.float32)}
    until = np.full(shape, length, np.int32)
    return Batch(tokens, index.copy(), (index - 1).astype(np.int32), until, weights)


def count_collectives(text: str) -> dict[str, int]:
    """Collectives in a compiled program by kind; those of one device do not count."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return dict(Counter(re.findall(rf" ({kinds})(?:-start)?\(", text)))


COLUMNS = (
    ("case", "name", "<12"),
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
    cases: list[Case], out: Path | None, command: str, program: type[Program] = Program
) -> Table:
    """Compile all cases, run each, and write the report after each."""
    table = Table(COLUMNS, out, command, **describe_devices())
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        programs = [pool.submit(program, case) for case in cases]
        concurrent.futures.wait(programs)  # nothing compiles while steps are timed
        for case in cases:
            row = dataclasses.asdict(case) | {"devices": case.devices, "how": case.label()}
            try:
                row |= programs.pop(0).result().measure()
                rows = [*table.rows, row]
                base = next(r for r in rows if r["name"] == case.name and "failed" not in r)
                rate = row["tokens_per_s_per_gpu"]
                row |= {"efficiency": rate / base["tokens_per_s_per_gpu"]}
                row |= {"loss": row["losses"][0]}
            except Exception as reason:  # the other cases still count
                row["failed"] = shorten(reason)
            gc.collect()
            table.add(row)
    return table


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="+", default=["0.6b", "llama-8b", "8b", "4b", "128k"])
    options = parser.parse_args()
    chosen = [case for name in options.cases for case in CASES if case.name == name]
    fits = [case for case in chosen if case.devices <= jax.device_count()]
    run(fits, options.out, command_line())


if __name__ == "__main__":
    main()
