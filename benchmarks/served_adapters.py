"""Every family's LoRA folder served by vLLM on a CPU: does it apply all of it?

JAXTRAIN_VLLM_PYTHON=path/to/vllm/python python benchmarks/served_adapters.py [NAME ...]

The models are those of served_families.py. Beside each an adapter with no factor at zero is written
as a run publishes it, vLLM answers with it, and its log-probs are compared with those of our
adapted model; "moved" is how far the adapter moves ours, so that what vLLM leaves out shows.
--target: which Linears have one (adapter.target); --modules: vLLM is told to prepare only those
that the adapter has (--lora-target-modules).
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import served_families as served
from make_models_table import ADAPTED

from jaxtrain.adapters.attach import attach
from jaxtrain.adapters.peft import write_gathered
from jaxtrain.adapters.spec import Adapter, LoRASpec, choose_slots, find_linears
from jaxtrain.models import build, families, loading
from jaxtrain.models.parameters import split_model

RANK = LoRASpec(4, 8.0)
PLACE = "adapter"


def write_adapter(folder: Path, target: list[str]) -> tuple[Any, list[str]]:
    """(the adapted model of a folder, the modules with a pair); written into folder/adapter."""
    config = families.read_config(folder)
    linears = find_linears(config)
    adapter = Adapter(choose_slots(linears, target, RANK, {}, {}))
    shapes, rebuild = split_model(attach(build.abstract(config), adapter))
    params = dict(split_model(loading.load(folder, param_dtype="float32"))[0])
    rng = np.random.default_rng(2)
    for path in sorted(path for path in shapes if ".adapter." in path):
        shape = shapes[path].shape
        size = 0.1 if path.endswith(".b") else shape[-2] ** -0.5
        params[path] = jnp.asarray(size * rng.normal(size=shape), "float32")
    (folder / PLACE).mkdir(exist_ok=True)
    write_gathered(params, config, adapter, folder / PLACE, None)
    modules = {name.rpartition(".")[2] for path in adapter.slots for name in linears[path].modules}
    return rebuild(params), sorted(modules)


def run(
    names: list[str], work: Path, dtype: str, seconds: float, target: list[str], narrow: bool
) -> dict[str, dict]:
    """{name: {"dtype", "difference", "moved"} or {"dtype", "error"}}."""
    configs, prompts = served.served_configs(), served.make_prompts()
    folders, models = {}, {}
    for name in names:
        if not (work / name / "config.json").exists():
            served.write_model(configs[name], work / name)
        models[name], modules = write_adapter(work / name, target)
        folders[name] = {
            "path": str(work / name),
            "dtype": dtype,
            "adapter": str(work / name / PLACE),
            **({"modules": modules} if narrow else {}),
        }
    actual = {}
    for name, answer in served.ask_vllm(folders, prompts, work, seconds).items():
        if "error" in answer:
            output = answer["error"].replace(str(work / name / PLACE), "it")
            actual[name] = {"error": served.shorten(output)}
        else:
            texts = [p + a for p, a in zip(prompts, answer["answers"], strict=True)]
            base = served.score(loading.load(work / name, param_dtype="float32"), texts)
            actual_values = served.score(models[name], texts)
            actual[name] = {
                "difference": served.compare(answer, prompts, models[name]),
                "moved": max(
                    float(abs(o - b).max()) for o, b in zip(actual_values, base, strict=True)
                ),
            }
        actual[name]["dtype"] = dtype
        print(f"{name}: {actual[name]}", flush=True)
    return actual


def main() -> int:
    parser = served.make_parser(__doc__)
    parser.add_argument("--target", nargs="+", default=["all-linear"], help="adapter.target")
    parser.add_argument("--modules", action="store_true", help="vLLM prepares these modules alone")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.keep or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        names = args.names or sorted(served.served_configs())
        completed = run(names, work, args.dtype, args.seconds, args.target, args.modules)
    if not args.dry:
        kind = " ".join(args.target)
        recorded = json.loads(ADAPTED.read_text()) if ADAPTED.exists() else {}
        recorded[kind] = {**recorded.get(kind, {}), **completed}
        ADAPTED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
