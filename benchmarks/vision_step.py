"""Training on pictures on one GPU: this project and transformers, on the same rows.

python benchmarks/vision_step.py --out benchmarks/results/vision_step_h200
python benchmarks/vision_step.py --size tiny --budget 900        # on a CPU, to see that it works

The shape of Qwen3-VL-2B with random weights, all of them trained; rows of 4 pictures of 768 x 768
and about 300 tokens of text. Parts, each in a process of its own:

jaxtrain       the ordinary command: JPEG files are decoded beside the step, rows are packed
transformers   Qwen3VLForConditionalGeneration with SDPA in several settings (peers/vision_step.py);
               pictures are prepared and on the GPU before the first step, and all rows have one
               length, so nothing is padding
tower          our tower and projector alone, forward and backward, on the pictures of one batch

Both: float32 masters and bf16 products, unless the row says otherwise; AdamW; clipping.

tok/s      tokens of text and of pictures (a token for 2 x 2 patches) a second
mfu        FLOPs of the weights and of attention, without recomputation, over the card's peak
wait       share of a step in which it waits for data
"""

import argparse
import json
import random
import statistics
import string
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import numpy as np
from harness import (
    PEAK_TFLOPS,
    Table,
    append_line,
    command_line,
    jax_ms,
    make_parser,
    query_gpu,
    read_lines,
    run_limited,
    shorten,
)
from PIL import Image

HERE = Path(__file__).parent
WARM_UP = 4
SPECIAL = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
FIRST_SPECIAL = 512
"""The built-in tokenizer's first free token."""
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}"
)
PICTURES, TEXT = 4, 300
"""Of a row."""

SIZES = {
    "full": {
        "side": 768,
        "rows": 160,
        "length": 10752,
        "text": (2048, 6144, 28, 16, 8, 128),
        "tower": (1024, 4096, 24, 16),
    },
    "tiny": {
        "side": 64,
        "rows": 40,
        "length": 1408,
        "text": (64, 96, 2, 4, 2, 16),
        "tower": (32, 64, 2, 2),
    },
}
"""length: tokens of our packed rows. text: features, MLP, layers, heads, of keys, of a head; tower:
features, MLP, layers, heads."""


def make_architecture(size: str) -> dict:
    """Return the config.json of the model."""
    features, mlp, layers, heads, kv_heads, head_dim = SIZES[size]["text"]
    width, tower_mlp, depth, tower_heads = SIZES[size]["tower"]
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    third = head_dim // 2 // 3
    return {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "tie_word_embeddings": True,
        **{name: FIRST_SPECIAL + index for index, name in enumerate(names)},
        "text_config": {
            "model_type": "qwen3_vl_text",
            "vocab_size": 151936 if size == "full" else 528,
            "hidden_size": features,
            "intermediate_size": mlp,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [head_dim // 2 - 2 * third, third, third],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "hidden_size": width,
            "intermediate_size": tower_mlp,
            "depth": depth,
            "num_heads": tower_heads,
            "patch_size": 16 if size == "full" else 8,
            "spatial_merge_size": 2,
            "out_hidden_size": features,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [5, 11, 17] if size == "full" else [0],
        },
    }


def write_rows(folder: Path, size: str) -> Path:
    """Write smooth random pictures and rows of them; return the file of rows."""
    draw, rng, side = random.Random(0), np.random.default_rng(0), SIZES[size]["side"]
    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for row in range(SIZES[size]["rows"]):
            parts = []
            for index in range(PICTURES):
                name = f"{row}_{index}.jpg"
                coarse = Image.fromarray(rng.integers(0, 256, (24, 24, 3), np.uint8))
                coarse.resize((side, side), Image.Resampling.BICUBIC).save(folder / name)
                parts.append({"type": "image", "path": name})
            letters = "".join(draw.choices(string.ascii_lowercase + " ", k=TEXT))
            half = TEXT // 2
            user = {"role": "user", "content": [*parts, {"type": "text", "text": letters[:half]}]}
            answer = {"role": "assistant", "content": letters[half:]}
            file.write(json.dumps({"messages": [user, answer]}) + "\n")
    return path


def make_config(folder: Path, args: argparse.Namespace) -> dict:
    """Return our run."""
    tiny = args.size == "tiny"
    return {
        "run": {"max_steps": 1000, "export": False, "output_dir": str(folder / "run")},
        "model": {
            "tokenizer": "builtin",
            "chat_template": str(folder / "template.jinja"),
            "special_tokens": {"additional_special_tokens": SPECIAL},
            "architecture": make_architecture(args.size),
            "compute_dtype": "float32" if tiny else "bfloat16",
            "remat": "elementwise",
            "vision": {"train": "all"},
        },
        "data": {
            "sequence_len": SIZES[args.size]["length"],
            "datasets": [{"path": str(folder / "rows.jsonl")}],
            "prefetch": 4,
        },
        "task": {"kind": "sft"},
        "optim": {"learning_rate": 1e-6},
        "checkpoint": {"every": 10**6, "every_minutes": None},
        "log": {"plot": False, "console": "off"},
    }


def run_ours(folder: Path, args: argparse.Namespace, limit: float) -> list[dict]:
    """Return a row of the ordinary command."""
    config, path = folder / "config.json", folder / "run" / "metrics.jsonl"
    config.write_text(json.dumps(make_config(folder, args)))

    def read_steps() -> list[dict]:
        return [line for line in read_lines(path) if "loss" in line and "tokens" in line]

    command = [sys.executable, "-m", "jaxtrain.main", "--config", str(config), *args.words]
    start, expected = time.perf_counter(), WARM_UP + args.steps
    output, late = run_limited(command, limit, lambda: len(read_steps()) >= expected)
    steps = read_steps()[:expected]
    if len(steps) < WARM_UP + 3:
        return [{"failed": shorten(f"{late}: {output}", 600)}]
    timed = steps[WARM_UP:]
    seconds = [b["time"] - a["time"] for a, b in zip(timed, timed[1:], strict=False)]
    tokens = sum(line["tokens"] for line in timed[1:])
    return [
        {
            "how": "packed, elementwise remat",
            "tokens_per_s": tokens / sum(seconds),
            "step_s": statistics.median(seconds),
            "step_s_min": min(seconds),
            "step_s_max": max(seconds),
            "mfu": statistics.median(line.get("mfu", 0.0) for line in timed),
            "wait": sum(line.get("data_seconds", 0.0) for line in timed[1:]) / sum(seconds),
            "peak_gib": timed[-1].get("peak_memory_gib"),
            "loss": [steps[0]["loss"], steps[-1]["loss"]],
            "first_s": time.perf_counter() - start - sum(seconds),
        }
    ]


def run_peer(folder: Path, args: argparse.Namespace, limit: float) -> list[dict]:
    """Return a row for each setting of transformers."""
    tiny, rows = args.size == "tiny", folder / "peer.jsonl"
    job = {
        "architecture": make_architecture(args.size),
        "side": SIZES[args.size]["side"],
        "pictures": PICTURES,
        "text": TEXT,
        "steps": 2 if tiny else args.steps,
        "rows": str(rows),
        "deadline": time.time() + limit,
    }
    (folder / "job.json").write_text(json.dumps(job))
    script = [sys.executable, str(HERE / "peers/vision_step.py"), str(folder / "job.json")]
    output, late = run_limited(script, limit)
    lines = read_lines(rows)
    if late or not lines:
        lines.append({"how": "the rest", "failed": shorten(f"{late}: {output}", 600)})
    return lines


def run_tower(folder: Path, args: argparse.Namespace, limit: float) -> list[dict]:
    """Return a row of tower and projector alone, measured in a child."""
    rows = folder / "tower.jsonl"
    config = folder / "tower.json"
    config.write_text(json.dumps(make_config(folder, args)))
    script = [sys.executable, __file__, "--child", str(config), str(rows)]
    output, late = run_limited(script, limit)
    return read_lines(rows) or [{"failed": shorten(f"{late}: {output}", 600)}]


def measure_tower(config_path: str, rows: str) -> None:
    """Time the tower of a config on the pictures of its first batch."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxtrain.config.load import validate_config
    from jaxtrain.methods.registry import make_task
    from jaxtrain.models import build

    config = validate_config(json.loads(Path(config_path).read_text()), "vision_step")
    task = make_task(config)
    (trained,) = [role.bundle for role in task.roles.values()]
    batch = next(iter(task.data.eval_batches(config.data.datasets[0], trained)))
    images = jax.tree.map(lambda x: x[0], batch.images)
    with jax.set_mesh(task.mesh):
        model = build.init(trained.architecture, 0, mesh=task.mesh, **trained.options)
        graph, params = nnx.split(model.vision)
        work = model.vision.forward_flops(images)

        def loss(params, images):
            features, deep = nnx.merge(graph, params)(images, None)
            return sum(jnp.square(x.astype(jnp.float32)).mean() for x in (features, *deep))

        row = jax_ms(jax.value_and_grad(loss), params, jax.tree.map(jnp.asarray, images))
    patches = int((np.asarray(images.until) - np.asarray(images.since) > 1).sum())
    append_line(
        rows,
        {
            "how": f"{patches} patches of {images.since.size}",
            "step_s": row["ms"] / 1e3,
            "tokens_per_s": patches / 4 / row["ms"] * 1e3,
            "mfu": 3 * sum(work.values()) / row["ms"] / 1e9 / PEAK_TFLOPS,
            "first_s": row["compile_s"],
        },
    )


PARTS = {"jaxtrain": run_ours, "transformers": run_peer, "tower": run_tower}
COLUMNS = (
    ("part", "part", "<14"),
    ("tok/s", "tokens_per_s", ">9,.0f"),
    ("x best", "x_best", ">8.2f"),
    ("step s", "step_s", ">9.4f"),
    ("mfu", "mfu", ">7.3f"),
    ("wait", "wait", ">7.3f"),
    ("peak GiB", "peak_gib", ">10.2f"),
    ("first s", "first_s", ">9.1f"),
)


def compare(rows: list[dict]) -> None:
    """Set "x_best": tokens/s over the best of transformers' settings."""
    measured = [row for row in rows if "failed" not in row and row["part"] != "tower"]
    peers = [row["tokens_per_s"] for row in measured if row["part"] == "transformers"]
    for row in measured if peers else ():
        row["x_best"] = row["tokens_per_s"] / max(peers)


def find_versions() -> str:
    """Return the versions of what is compared."""
    names = ("jax", "torch", "transformers")
    return ", ".join(f"{name} {metadata.version(name)}" for name in names)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--size", default="full", choices=[*SIZES])
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=[*PARTS])
    parser.add_argument("--steps", type=int, default=16, help="timed ones")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all parts")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help="further keys for our run, section.key=value")
    args = parser.parse_args()
    if args.child:
        measure_tower(*args.child)
        return
    deadline = time.monotonic() + args.budget
    hardware = f"{query_gpu()}; {find_versions()}"
    table = Table(COLUMNS, args.out, command_line(), hardware=hardware)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        write_rows(folder, args.size)
        (folder / "template.jinja").write_text(TEMPLATE)
        for name in args.parts:
            seconds = deadline - time.monotonic()
            for row in PARTS[name](folder, args, seconds if name == "tower" else seconds / 2):
                row["part"] = name
                compare([*table.rows, row])
                table.add(row)
    print("\n" + table.text(), flush=True)


if __name__ == "__main__":
    main()
