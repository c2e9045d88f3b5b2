"""Writes the tables of docs/scale.md: the model of a step beside what was measured, and what it
says of more devices. Run after either changes; tests compare.

python scripts/make_scale_tables.py
"""

import functools
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import jax

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]

from experts_step import MODELS as EXPERTS  # noqa: E402
from step_work import MODELS  # noqa: E402

from jaxtrain.config import AdapterConfig  # noqa: E402
from jaxtrain.core.adapter import make_adapter  # noqa: E402
from jaxtrain.core.bundle import ModelBundle  # noqa: E402
from jaxtrain.core.weights import abstract_params, split_trained  # noqa: E402
from jaxtrain.distributed.mesh import AXES, make_mesh  # noqa: E402
from jaxtrain.models import build, families  # noqa: E402
from jaxtrain.runs.estimate.devices import DEVICES  # noqa: E402
from jaxtrain.runs.estimate.estimate import Estimate, Sizes, StepRows, estimate  # noqa: E402
from jaxtrain.runs.estimate.search import SearchTarget, find_meshes, name_mesh  # noqa: E402
from jaxtrain.runs.estimate.work import StepWork, read_work  # noqa: E402

PAGE = ROOT / "docs" / "scale.md"
RESULTS = ("pod_h200", "expert_parallel_h200")
SHAPES = {
    **MODELS,
    **EXPERTS,
    "llama-70b": MODELS["llama-8b"]
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
COUNTS = (8, 64, 256, 1024)
PLANS = (
    ("llama-8b", 8192, 1),
    ("qwen3-30b-a3b", 4096, 4),
    ("llama-70b", 8192, 1),
)
"""(model, tokens of a row, rows of a forward pass)."""


@functools.cache
def describe(
    model: str, layers: int, adapter: str, param_dtype: str, remat: str, slots: float = 8.0
) -> StepWork:
    raw = dict(SHAPES[model])
    raw["num_hidden_layers"] = layers or raw["num_hidden_layers"]
    raw["max_position_embeddings"] = 2**17
    if "layer_types" in raw:
        raw["layer_types"] = raw["layer_types"][: raw["num_hidden_layers"]]
    architecture = families.config_from_hf(raw)
    spec = make_adapter(AdapterConfig(**json.loads(adapter)), architecture)
    options = {"param_dtype": param_dtype, "dtype": "bfloat16", "remat": remat}
    parts = ModelBundle(None, architecture, make_mesh(jax.devices()[:1]), None, options, spec)
    with jax.set_mesh(parts.mesh):
        shapes, rebuild = abstract_params(parts)
        trained, _ = split_trained(shapes, spec)
        plain, model_ = build.abstract(architecture), rebuild(shapes)
        options = {"remat": remat, "dtype": "bfloat16", "slots": slots}
        return read_work(plain, model_, shapes, set(trained), **options)


def measured() -> Iterator[tuple[dict, Estimate]]:
    """(a row of the benchmarks' results, what the model says of it)."""
    for name in RESULTS:
        measurement = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
        for run in measurement if isinstance(measurement, list) else [measurement]:
            for row in run["rows"]:
                # The model is of a loop over layers.
                if row.get("note") or "failed" in row or not row.get("scan", True):
                    continue
                work = describe(
                    row["model"],
                    row.get("layers", 0),
                    json.dumps(row["adapter"] or {}),
                    row["param_dtype"],
                    row["remat"],
                )
                mesh = Sizes({axis: row["mesh"].get(axis, 1) for axis in AXES})
                rows = StepRows(row["tokens"], row["rows"])
                yield row, estimate(work, mesh, rows, DEVICES["h200"])


def compare() -> list[str]:
    lines = [
        "| model, tokens of a row | mesh | step, s | estimate | | GiB | estimate | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    times, memories = [], []
    for row, measurement in measured():
        times.append(measurement.seconds / row["step_s"] - 1)
        memories.append(measurement.memory / row["plan_gib"] - 1)
        adapter = row["adapter"] or {}
        how = ", NF4 + LoRA" if "quantize" in adapter else ", LoRA" if adapter else ""
        cut = f", {row['layers']} layers" if row.get("layers") else ""
        time, memory = f"{times[-1]:+.0%}", f"{memories[-1]:+.0%}"
        lines.append(
            f"| {row['model']}{cut}, {row['rows']} x {row['tokens']}{how}, {row['remat']} |"
            f" {name_mesh(row['mesh'])} | {row['step_s']:.3f} | {measurement.seconds:.3f} |"
            f" {time} | {row['plan_gib']:.1f} | {measurement.memory:.1f} | {memory} |"
        )
    for name, errors in [("time", times), ("memory", memories)]:
        sizes = [abs(error) for error in errors]
        lines += [
            "",
            f"{name}: median error {statistics.median(sizes):.1%}, largest {max(sizes):.1%}",
        ]
    return lines


def compare_unfitted() -> list[str]:
    """Our rows of a benchmark in bfloat16, to which no number was fitted."""
    lines = ["| | step, s | estimate | | GiB | estimate | |", "|---|---|---|---|---|---|---|"]
    run = json.loads((ROOT / "benchmarks/results/experts_step_h200.json").read_text())
    for row in run["rows"]:
        if row["by"] != "jaxtrain" or "step_s" not in row:
            continue
        adapter = {}
        if row["lora"]:
            adapter = {"kind": "lora", "rank": row["lora"]}
            adapter |= {name: row[name] for name in ("target", "quantize")}
        # Moments are what the trained weights are: float32 of adapters, bfloat16 of the rest.
        name = row["model"], row["layers"], json.dumps(adapter), "bfloat16", row["remat"]
        work = describe(*name, 8.0 if adapter else 4.0)
        rows = StepRows(row["tokens"] // row["rows"], row["rows"])
        step_estimate = estimate(work, Sizes(dict.fromkeys(AXES, 1)), rows, DEVICES["h200"])
        time, memory = (
            step_estimate.seconds / row["step_s"] - 1,
            step_estimate.memory / row["peak_gib"] - 1,
        )
        lines.append(
            f"| {row['model']}, {row['how']}, {row['rows']} x {rows.tokens} |"
            f" {row['step_s']:.3f} | {step_estimate.seconds:.3f} | {time:+.0%} |"
            f" {row['peak_gib']:.1f} | {step_estimate.memory:.1f} | {memory:+.0%} |"
        )
    return lines


def plan(device: str) -> list[str]:
    lines = [
        f"| {DEVICES[device].name}s | "
        + " | ".join(f"{shape[0]}, {shape[1]}" for shape in PLANS)
        + " |",
        "|---|" + "---|" * len(PLANS),
    ]
    for count in COUNTS:
        cells = []
        for model, tokens, rows in PLANS:
            work = describe(model, 0, "{}", "float32", "save_attention")
            choices = find_meshes(work, SearchTarget(tokens, rows, None), DEVICES[device], count)
            if not choices:
                cells.append("does not fit")
                continue
            mesh, shape = choices[0]
            rate, gib = (
                f"{shape.tokens_per_second:,.0f} ({shape.mfu:.0%})",
                f"{shape.memory:.0f} GiB",
            )
            cells.append(f"{rate}, {name_mesh(mesh)}, {gib}")
        lines.append(f"| {count} | " + " | ".join(cells) + " |")
    return lines


def tables() -> dict[str, list[str]]:
    """Lines between the marks of the page."""
    return {"measured": compare(), "unfitted": compare_unfitted()} | {
        name: plan(name) for name in ("h200", "h100", "v5p")
    }


def render(page: str) -> str:
    for name, lines in tables().items():
        head, mark, rest = page.partition(f"<!-- {name} -->\n")
        assert mark, f"docs/scale.md has no mark {name}"
        _, end, tail = rest.partition(f"<!-- end of {name} -->")
        page = head + mark + "\n".join(lines) + "\n" + end + tail
    return page


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
