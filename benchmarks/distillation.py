"""A step of distillation (GKD's loss) with a large teacher: this project and PyTorch, in one run.

python benchmarks/distillation.py --out benchmarks/results/distillation_h200.json

Random weights, rows of 4,096 tokens of which all but the first train, generalized Jensen-Shannon
divergence over the whole vocabulary with beta 0.5, AdamW with clipping. Student: float32 masters,
bfloat16 compute; teacher: bfloat16. Each side runs in a process of its own, so that neither holds
memory of the other, and one that fails leaves the other's line standing.

jaxtrain    the training code as it runs (core/step.py, methods/distillation/method.py): forward
            pass of the teacher, and the loss in chunks that never hold all logits
trl         transformers' model, autocast, sdpa; the loss in the form of TRL's GKDTrainer, from all
            logits of a row of both models
chunked     the same with the loss in checkpointed chunks of 512 tokens, each compiled

step s    median of the steps after warm-up; tok/s: tokens of a step over it
peak GiB  jaxtrain: arguments, outputs and temporaries of the compiled program; PyTorch: the
          allocator's peak
"""

import argparse
import statistics
import time
from functools import partial

import numpy as np
from harness import (
    Table,
    append_line,
    command_line,
    compile_step,
    make_parser,
    measure_children,
    planned_gib,
)

SIDES = ("jaxtrain", "trl", "chunked")
CHUNK = 512


def make_rows(options, vocabulary: int) -> np.ndarray:
    """Token ids [microsteps, rows, length]."""
    shape = (options.microsteps, options.rows, options.length)
    return np.random.default_rng(0).integers(1, vocabulary, shape, np.int32)


def run_jaxtrain(options) -> dict:
    """The compiled step of the task, on the same batch again and again."""
    import jax
    from step_work import MODELS

    from jaxtrain.config import OptimConfig
    from jaxtrain.core.bundle import ModelBundle
    from jaxtrain.core.optimizer import build_optimizer, build_schedule
    from jaxtrain.core.roles import Role, Roles
    from jaxtrain.core.step import init_state, make_step
    from jaxtrain.core.task import POLICY
    from jaxtrain.data.packing.pack import Fields, build_batch, lay_out, stack_batches
    from jaxtrain.data.packing.tree import chain
    from jaxtrain.distributed.feed import feed
    from jaxtrain.distributed.mesh import make_mesh
    from jaxtrain.methods.distillation.loss import COMPONENT, Distillation
    from jaxtrain.methods.distillation.method import TEACHER, distil
    from jaxtrain.models import families

    mesh = make_mesh(jax.devices()[:1])

    def parts_of(name: str, param_dtype: str) -> ModelBundle:
        how = {
            "param_dtype": param_dtype,
            "dtype": "bfloat16",
            "remat": options.remat if param_dtype == "float32" else "none",
            "scan_layers": True,
            "attention_impl": "auto",
        }
        architecture = families.config_from_hf(MODELS[name])
        return ModelBundle(
            tokenizer=None, architecture=architecture, mesh=mesh, folder=None, options=how
        )

    student, teacher = parts_of(options.student, "float32"), parts_of(options.teacher, "bfloat16")
    fields = Fields((COMPONENT,))
    ones = np.ones(options.length)
    batch = stack_batches(
        [
            build_batch(
                [[lay_out(chain(row, {COMPONENT: ones}), "branch")] for row in micro],
                options.length,
                fields,
            )
            for micro in make_rows(options, student.architecture.vocab_size)
        ]
    )
    numbers = Distillation(beta=options.beta, chunk=options.chunk)
    with jax.set_mesh(mesh):
        roles = Roles({POLICY: Role(student), TEACHER: Role(teacher, "own")})
        trained, frozen, _ = roles.open(0)
        optim = OptimConfig(learning_rate=1e-5)
        optimizer = build_optimizer(optim, build_schedule(optim, 1000), trained)
        state = init_state(trained, optimizer)
        del trained
        loss = partial(distil, numbers=numbers)
        step = make_step(roles.build, loss, {COMPONENT: 1.0}, optimizer, optim.max_grad_norm)
        placed = feed(batch, mesh)
        began = time.perf_counter()
        compiled, largest = compile_step(step, state, placed, frozen)
        compile_s = time.perf_counter() - began
        seconds, losses = [], []
        for _ in range(options.warm_up + options.steps):
            began = time.perf_counter()
            state, output = compiled(state, placed, frozen)
            losses.append(float(output.metrics["loss"][0]))
            jax.block_until_ready(state)
            seconds.append(time.perf_counter() - began)
    memory = largest.memory_analysis()
    return {
        "seconds": seconds,
        "loss": losses[0],
        "peak_gib": planned_gib(largest),
        "temporaries_gib": memory.temp_size_in_bytes / 2**30,
        "compile_s": compile_s,
        "hardware": jax.devices()[0].device_kind,
        "version": f"jax {jax.__version__}",
    }


def run_torch(options, chunked: bool) -> dict:
    """transformers' models, and the loss whole or in chunks."""
    import torch
    import transformers
    from step_work import MODELS
    from torch.utils.checkpoint import checkpoint

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def open_model(name: str, dtype):
        config = transformers.AutoConfig.for_model(**MODELS[name])
        with torch.device(device):
            return transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="sdpa"
            )

    torch.manual_seed(0)
    student = open_model(options.student, torch.float32).train()
    teacher = open_model(options.teacher, torch.bfloat16).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5, fused=device == "cuda")
    rows = torch.from_numpy(make_rows(options, MODELS[options.student]["vocab_size"])).long()
    rows = rows.to(device)
    count = options.microsteps * options.rows * (options.length - 1)
    diverge = partial(torch_divergence, beta=options.beta)
    if chunked and device == "cuda":
        diverge = torch.compile(diverge, dynamic=False)

    def of_logits(micro):
        with torch.autocast(device, torch.bfloat16):
            actual_values = student(input_ids=micro, use_cache=False).logits[:, :-1]
            with torch.no_grad():
                reference = teacher(input_ids=micro, use_cache=False).logits[:, :-1]
        return diverge(actual_values, reference)

    def of_chunks(micro):
        with torch.autocast(device, torch.bfloat16):
            actual_values = student.model(input_ids=micro, use_cache=False).last_hidden_state[
                :, :-1
            ]
            with torch.no_grad():
                reference = teacher.model(input_ids=micro, use_cache=False).last_hidden_state[
                    :, :-1
                ]

            def part(x, y):
                return diverge(student.lm_head(x), teacher.lm_head(y))

            total = 0.0
            for x, y in zip(
                actual_values.flatten(0, 1).split(CHUNK),
                reference.flatten(0, 1).split(CHUNK),
                strict=True,
            ):
                total = total + checkpoint(part, x, y, use_reentrant=False)
        return total

    loss_of = of_chunks if chunked else of_logits
    seconds, losses = [], []
    for _ in range(options.warm_up + options.steps):
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for micro in rows:
            loss = loss_of(micro) / count
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        losses.append(total)
    cuda = device == "cuda"
    return {
        "seconds": seconds,
        "loss": losses[0],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "hardware": torch.cuda.get_device_name() if cuda else "cpu",
        "version": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }


def torch_divergence(actual_values, reference, beta: float):
    """Sum over tokens of the generalized Jensen-Shannon divergence, from logits."""
    import torch
    import torch.nn.functional as F

    lq, lp = F.log_softmax(actual_values.float(), -1), F.log_softmax(reference.float(), -1)
    lm = torch.logaddexp(lp + float(np.log(beta)), lq + float(np.log1p(-beta)))
    of_teacher = F.kl_div(lm, lp, reduction="sum", log_target=True)
    of_student = F.kl_div(lm, lq, reduction="sum", log_target=True)
    return beta * of_teacher + (1 - beta) * of_student


COLUMNS = (
    ("by", "by", "<10"),
    ("step s", "step_s", ">9.4f"),
    ("tok/s", "tokens_per_s", ">10,.0f"),
    ("peak GiB", "peak_gib", ">10.1f"),
    ("loss", "loss", ">10.5f"),
    ("process s", "wall_s", ">11.0f"),
)


def main() -> None:
    parser = make_parser(__doc__, out="JSON file")
    parser.add_argument("--student", default="qwen3-0.6b")
    parser.add_argument("--teacher", default="qwen3-8b")
    parser.add_argument("--rows", type=int, default=1, help="rows of a microstep")
    parser.add_argument("--microsteps", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--beta", type=float, default=0.5)
    parser.add_argument("--chunk", type=int, help="jaxtrain: tokens of a chunk; default: its own")
    parser.add_argument("--remat", default="none", help="jaxtrain: of the student")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of one side")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        side, path = options.child
        actual_values = side == "jaxtrain"
        row = run_jaxtrain(options) if actual_values else run_torch(options, side == "chunked")
        return append_line(path, row)
    tokens = options.rows * options.microsteps * options.length
    print(f"{tokens} tokens a step: {options.student} follows {options.teacher}")

    def derive(row: dict) -> dict:
        row["step_s"] = statistics.median(row["seconds"][options.warm_up :])
        row["tokens_per_s"] = tokens / row["step_s"]
        return row | {"how": f"{row['hardware']}, {row['version']}"}

    cases = {(side,): {"by": side} for side in options.sides}
    table = Table(COLUMNS, options.out, command_line())
    measure_children(__file__, table, cases, options.seconds, derive)


if __name__ == "__main__":
    main()
