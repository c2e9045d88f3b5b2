r"""Expert parallelism beside sharded weights: whole steps, and the collectives alone.

python benchmarks/expert_parallel.py --out benchmarks/results/expert_parallel_h200
python benchmarks/expert_parallel.py --gpus 8
XLA_FLAGS=--xla_force_host_platform_device_count=8 \
    python benchmarks/expert_parallel.py --tiny --gpus 8

Steps are those of pod.py with weights drawn at random, rows of one document: on two GPUs
Qwen3-30B-A3B cut to 12 layers with float32 masters, on four and eight all of its layers and
gpt-oss-20b, weights and moments in bfloat16. All cases of a size read the same tokens, so their
losses should agree. Rounds: what the slowest device of a group needed, mean over layers; load:
tokens of the busiest expert over the mean expert's. The cost of rounds is seen where the buffer is
small, that of the loop itself where it is so large that there is none. Collectives: bytes that a
device receives a second, of one layer's tokens in bfloat16.
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
import pod
import train_step
from harness import command_line, make_parser, write_json
from jax import lax
from jax.sharding import PartitionSpec as P
from train_step import Setting

from jaxtrain.core.losses.balance import OutputCollector
from jaxtrain.core.losses.nll import nll_loss
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.layers.expert_transport import Transport


def loss(model, batch, **options):
    """nll_loss with what its experts note among the metrics."""
    watched = OutputCollector(model)
    sums, metrics = nll_loss(watched, batch, **options)
    (noted,) = [output.notes for output in watched.outputs]
    total_LE = noted["expert_load"].sum(1)
    notes = {"load": (total_LE.max(-1) / total_LE.mean(-1)).mean()}
    if "expert_rounds" in noted:
        notes["rounds"] = noted["expert_rounds"].mean()
    return sums, {**metrics, **{name: (value, 1.0) for name, value in notes.items()}}


class Program(train_step.Program):
    loss = staticmethod(loss)


def cases(tiny: bool, gpus: int) -> list[tuple[str, Setting]]:
    """Steps, those that say most first."""
    if gpus > 2:
        return whole_models(tiny, gpus)
    model, work, depth = ("tiny-moe", "tiny-doc", 2) if tiny else ("qwen3-30b-a3b", "doc4k", 12)
    make = functools.partial(Setting, model, work, depth=depth, remat="save_attention")
    fsdp, expert = (("fsdp", gpus),), (("expert", gpus),)
    large = functools.partial(make, mesh=expert, rows=4)
    return [
        ("16k", make(mesh=fsdp, rows=4)),
        ("16k", large()),
        ("16k", large(transport=Transport(buffer=float(gpus)), note="one round, no loop")),
        ("16k", large(transport=Transport("gather", buffer=0.6), note="buffer .6")),
        ("16k", large(transport=Transport(chunks=2), note="2 chunks")),
        ("16k", large(transport=Transport(wide_sums=True), note="wide sums")),
        ("16k", large(transport=Transport("exchange"), note="exchange")),
        ("4k", make(mesh=fsdp)),
        ("4k", make(mesh=expert)),
    ]


def whole_models(tiny: bool, gpus: int) -> list[tuple[str, Setting]]:
    """Return cases of all layers with 16k tokens a GPU: documents of 4k and 16k, experts and
    weights sharded in every way."""
    qwen, oss = ("tiny-moe", "tiny-gpt-oss") if tiny else ("qwen3-30b-a3b", "gpt-oss-20b")
    short, long = ("tiny-doc16", "tiny-doc") if tiny else ("doc4k", "doc16k")
    make = functools.partial(Setting, param_dtype="bfloat16", remat="save_attention")
    expert, spread = (("expert", gpus),), ((("expert", gpus),), (("fsdp", gpus),))
    mixed = [(("fsdp", n), ("expert", gpus // n)) for n in (2, 4) if n < gpus]
    return [
        *(("4k", make(qwen, short, mesh=mesh, rows=4)) for mesh in spread),
        ("4k", make(qwen, short, mesh=expert, rows=4, remat="elementwise")),
        *(("16k", make(qwen, long, mesh=mesh)) for mesh in spread),
        ("16k", make(qwen, long, mesh=expert, remat="elementwise")),
        *(("gpt-oss", make(oss, short, mesh=mesh, rows=4)) for mesh in spread),
        *(("4k", make(qwen, short, mesh=mesh, rows=4)) for mesh in mixed),
        *(
            ("4k", make(qwen, short, mesh=expert, rows=4, transport=Transport(kind), note=kind))
            for kind in ("gather", "exchange")
        ),
    ]


def time_collectives(mesh, tokens: int, features: int, repeats: int = 20) -> list[dict]:
    """Seconds and received GB/s of a device for what a layer sends of its tokens."""
    n = mesh.size
    kinds = {
        "all-gather": (lambda x: lax.all_gather(x, "expert", tiled=True), 1, n - 1),
        "reduce-scatter": (
            lambda x: lax.psum_scatter(x, "expert", scatter_dimension=0, tiled=True),
            n,
            n - 1,
        ),
        "all-to-all": (lambda x: lax.all_to_all(x, "expert", 0, 0, tiled=True), n, n - 1),
    }
    actual = []
    for kind, (entry, factor, parts) in kinds.items():
        shape = (n * factor * tokens, features)
        named_sharding = jax.NamedSharding(mesh, P("expert"))
        x = jax.device_put(jnp.ones(shape, jnp.bfloat16), named_sharding)
        run = jax.jit(jax.shard_map(entry, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")))
        jax.block_until_ready(run(x))
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            for _ in range(repeats):
                y = run(x)
            jax.block_until_ready(y)
            seconds.append((time.perf_counter() - start) / repeats)
        received = parts * tokens * features * 2
        second = statistics.median(seconds)
        actual.append({"kind": kind, "ms": second * 1e3, "gb_per_s": received / second / 1e9})
    return actual


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to see that it works")
    parser.add_argument("--gpus", type=int, default=2, choices=[2, 4, 8])
    options = parser.parse_args()
    mesh = make_mesh(jax.devices()[: options.gpus], expert=options.gpus)
    collectives = time_collectives(mesh, *((64, 32) if options.tiny else (16384, 2048)))
    for row in collectives:
        print(f"{row['kind']:<16}{row['ms']:>9.3f} ms{row['gb_per_s']:>9.1f} GB/s", flush=True)
    table = pod.run(cases(options.tiny, options.gpus), options.out, command_line(), Program)
    for row in table.rows:
        if "metrics" in row:
            rounds, load = (row["metrics"].get(name) for name in ("rounds", "load"))
            print(f"{row['name']:<6}{row['how']:<44} rounds {rounds} load {load:.2f}")
    if options.out is not None:
        table.extra["collectives"] = collectives
        write_json(options.out.with_suffix(".json"), table.report)


if __name__ == "__main__":
    main()
