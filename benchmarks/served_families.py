"""Every family's export served by vLLM on a CPU: are its log-probs ours?

JAXTRAIN_VLLM_PYTHON=path/to/vllm/python python benchmarks/served_families.py [NAME ...]
JAXTRAIN_VLLM_PYTHON=path/to/vllm/python python benchmarks/served_families.py --adapter all-linear

For each tiny config of tests/models/families_*.py, in sizes that vLLM's kernels have: a model with
no norm, bias or decay at its neutral value is written by our exporter, opened by vLLM, and asked
for the log-probs of prompts' tokens and of an answer drawn after them (so caches are seen, too).
Those of our own model, read from the same folder, are compared. What was found goes into
benchmarks/results/served_families_cpu.json, from which scripts/make_models_table.py makes a column
of docs/models.md. JAXTRAIN_VLLM_PATH: a folder with what vLLM's environment lacks (torchvision for
Qwen3.5's classes).

--adapter: Linears (adapter.target) that get one with no factor at zero, written as a run publishes
it; vLLM answers with it, and its log-probs are compared with those of our adapted model. "moved" is
how far the adapter moves ours, so that what vLLM leaves out shows. --modules: vLLM is told to
prepare only those that the adapter has (--lora-target-modules). Results go into
served_adapters_cpu.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "models"))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from make_models_table import ADAPTED, CLOSE, SERVED, tiny_configs

from jaxtrain.adapters.attach import attach
from jaxtrain.adapters.peft import write_gathered
from jaxtrain.adapters.spec import Adapter, LoRASpec, choose_slots, find_linears
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.models import build, families, loading, saving
from jaxtrain.models.parameters import split_model

VOCAB, NEW = 512, 12
LENGTHS = (40, 17, 61)
"""Longer than windows, and across blocks of the cache."""

SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "global_head_dim": 64,
    "mamba_head_dim": 32,
    "ssm_state_size": 32,
    "mamba_d_state": 32,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 128,
    "initializer_range": 0.08,
}
"""In the place of a tiny config's own, where it has them: heads of 32, and what vLLM's products of
experts on a CPU divide by."""
LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "q_lora_rank": 48,
}
"""The only sizes of latents that vLLM decodes on a CPU."""
LATENT_EPS = {"rms_norm_eps": 1e-6}
"""transformers norms latents with it whatever config.json says, and vLLM as config.json says."""
PUBLISHED = {
    "afmoe": {"attention_bias": False},
    "deepseek_v2": {**LATENT_EPS, "norm_topk_prob": False, "attention_bias": False},
    "deepseek_v3": {
        **LATENT_EPS,
        "attention_bias": False,
        "rope_interleave": True,
        "tie_word_embeddings": False,
    },
    "ernie4_5": {"use_bias": False},
    "ernie4_5_moe": {"moe_norm_min": 1e-12},
    "falcon_h1": {
        **dict.fromkeys(
            ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"), False
        ),
        "mamba_norm_before_gate": False,
    },
    "glm4_moe_lite": {
        **LATENT_EPS,
        "first_k_dense_replace": 1,
        "tie_word_embeddings": False,
    },
    "gpt_oss": {"swiglu_limit": 7.0, "rms_norm_eps": 1e-5},
    "granitemoe": {"attention_bias": False},
    "lfm2_moe": {"tie_word_embeddings": True},
    "mistral4": LATENT_EPS,
    "olmoe": {"clip_qkv": None, "attention_bias": False, "rms_norm_eps": 1e-5},
    "qwen2_moe": {"use_sliding_window": False},
    "qwen3": {"attention_bias": False},
}
"""Options of a family that vLLM does not read, computing as the published models have them, and one
that published folders alone say."""
UNREAD = {"ernie4_5_moe": "choice_bias"}
"""Parameters that vLLM does not read on a CPU, left at zero: its router there has no such bias for
experts without groups."""
FACTORS = ("short_factor", "long_factor")


def fit_to_vllm(raw: dict) -> dict:
    """A tiny config in sizes that vLLM's kernels on a CPU have."""
    latent = {k: v for k, v in LATENT.items() if k in raw and raw[k] is not None}
    fitted = {**raw, **{k: v for k, v in SIZES.items() if k in raw}, **latent}
    if latent:
        fitted["num_attention_heads"] = raw["num_key_value_heads"]
    elif "head_dim" in raw:
        fitted["head_dim"] = 32
    for key in ("rope_scaling", "rope_parameters"):
        if key in raw:
            fitted[key] = fit_rope(raw[key])
    if raw["model_type"] == "deepseek_v2" and not raw.get("n_group"):  # as published; vLLM asks
        fitted |= {"n_group": 1, "topk_group": 1}
    return {**fitted, **PUBLISHED.get(raw["model_type"], {})}


def fit_rope(rope: dict) -> dict:
    """Numbers for each pair of longer heads, YaRN for as many positions as the model has, for vLLM
    has a table of no more. No growing queries: vLLM reads those of Mistral's own files alone."""
    if all(isinstance(entry, dict) for entry in rope.values()):
        return {kind: fit_rope(entry) for kind, entry in rope.items()}
    rope = {k: [f for f in v for _ in range(4)] if k in FACTORS else v for k, v in rope.items()}
    if rope.get("rope_type") == "yarn":
        length = SIZES["max_position_embeddings"] / rope["factor"]
        rope["original_max_position_embeddings"] = int(length)
    if "llama_4_scaling_beta" in rope:
        rope["llama_4_scaling_beta"] = 0.0
    return rope


def write_model(raw: dict, folder: Path, seed: int = 0) -> None:
    """The folder that a run would export, with weights drawn."""
    tokenizer = load_tokenizer("builtin")
    config = families.config_from_hf({**raw, "eos_token_id": tokenizer.eos_token_id})
    model = build.init(config, seed, param_dtype="float32")
    graphdef, state = nnx.split(model)
    rng = np.random.default_rng(seed)

    def move(path, leaf):
        value = np.asarray(leaf)
        name = "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
        if "A_log" in name:  # as drawn, heads forget within a token or two
            return jnp.asarray(rng.uniform(-4.6, 0.4, value.shape), value.dtype)
        if raw["model_type"] in UNREAD and UNREAD[raw["model_type"]] in name:
            return leaf
        if value.size > 1 and (value == value.flat[0]).all():
            return jnp.asarray(value + 0.1 * rng.normal(size=value.shape), value.dtype)
        return leaf

    state = jax.tree_util.tree_map_with_path(move, state)
    saving.save(nnx.merge(graphdef, state), config, folder)
    tokenizer.save_pretrained(folder)


def score(model: Any, texts: list[list[int]]) -> list[np.ndarray]:
    """Our log-prob of each token of the texts behind its first."""
    from tiny_models import pack

    length = max(map(len, texts))
    batch = pack([[np.array(text, np.int32)] for text in texts], length)
    run = jax.jit(lambda model, batch: jax.nn.log_softmax(model.logits(model.hidden(batch).hidden)))
    logp = np.asarray(run(model, batch))
    return [
        np.array([row[i, token] for i, token in enumerate(text[1:])])
        for row, text in zip(logp, texts, strict=True)
    ]


def ask_vllm(folders: dict[str, dict], prompts: list, work: Path, seconds: float) -> dict:
    """{name: what served_logprobs.py says}, as far as it comes in time; what work/answers.jsonl
    has already is not asked again. A process that dies under a folder is started anew."""
    end = time.monotonic() + seconds
    paths = filter(None, [os.environ.get("JAXTRAIN_VLLM_PATH")])
    env = {**os.environ, "PYTHONPATH": ":".join(paths), "VLLM_PLUGINS": ""}
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
        env.pop(name, None)
    while remaining := {n: f for n, f in folders.items() if n not in read_answers(work)}:
        job, log = work / "job.json", (work / "vllm.log").open("ab")
        job.write_text(json.dumps({"prompts": prompts, "new": NEW, "folders": remaining}))
        command = [os.environ["JAXTRAIN_VLLM_PYTHON"], str(CHILD), str(job), str(work / ANSWERS)]
        child = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=work)
        try:
            code = child.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            break
        finally:
            child.kill()
            child.wait()
        if missing := next((name for name in remaining if name not in read_answers(work)), None):
            with (work / ANSWERS).open("a") as file:
                file.write(json.dumps({"name": missing, "error": f"it ended with {code}"}) + "\n")
    return {name: entry for name, entry in read_answers(work).items() if name in folders}


def read_answers(work: Path) -> dict[str, dict]:
    file = work / ANSWERS
    lines = file.read_text().splitlines() if file.exists() else []
    return {entry["name"]: entry for entry in map(json.loads, lines)}


MAX_WORDS = 120
CHILD, ANSWERS = Path(__file__).parent / "served_logprobs.py", "answers.jsonl"


def compare(answer: dict, prompts: list[list[int]], model: Any) -> float:
    """The largest difference between vLLM's log-probs and our model's."""
    texts = [p + a for p, a in zip(prompts, answer["answers"], strict=True)]
    reference = [p + d for p, d in zip(answer["prompts"], answer["drawn"], strict=True)]
    actual_values = score(model, texts)
    off = [
        np.abs(o[-len(t) :] - np.array(t)).max()
        for o, t in zip(actual_values, reference, strict=True)
    ]
    return float(np.max(off))


def shorten(error: str) -> str:
    """The first sentence of vLLM's, as a cell of a table."""
    line = " ".join(error.split()).replace("|", "/")
    return line if len(line) <= MAX_WORDS else line[:MAX_WORDS] + "..."


def make_prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 256, length).tolist() for length in LENGTHS]


def served_configs() -> dict[str, dict]:
    """{name: config.json} of all; what vLLM has no class for its transformers backend may run."""
    return {name: fit_to_vllm(raw) for name, (_, raw) in tiny_configs().items()}


def write_adapter(folder: Path, target: list[str]) -> tuple[Any, list[str]]:
    """(the adapted model of a folder, the modules with a pair); written into folder/adapter."""
    config = families.read_config(folder)
    linears = find_linears(config)
    adapter = Adapter(choose_slots(linears, target, LoRASpec(4, 8.0), {}, {}))
    shapes, rebuild = split_model(attach(build.abstract(config), adapter))
    params = dict(split_model(loading.load(folder, param_dtype="float32"))[0])
    rng = np.random.default_rng(2)
    for path in sorted(path for path in shapes if ".adapter." in path):
        shape = shapes[path].shape
        size = 0.1 if path.endswith(".b") else shape[-2] ** -0.5
        params[path] = jnp.asarray(size * rng.normal(size=shape), "float32")
    (folder / "adapter").mkdir(exist_ok=True)
    write_gathered(params, config, adapter, folder / "adapter", None)
    modules = {name.rpartition(".")[2] for path in adapter.slots for name in linears[path].modules}
    return rebuild(params), sorted(modules)


def run(
    names: list[str],
    work: Path,
    dtype: str,
    seconds: float,
    target: list[str] | None = None,
    narrow: bool = False,
) -> dict[str, dict]:
    """{name: {"dtype", "difference"} or {"dtype", "error"}}; with a target, of models with an
    adapter, and then "moved", too."""
    configs, prompts = served_configs(), make_prompts()
    folders, adapted, results = {}, {}, {}
    for name in names:
        if not (work / name / "config.json").exists():
            write_model(configs[name], work / name)
        folders[name] = {"path": str(work / name), "dtype": dtype}
        if target:
            adapted[name], modules = write_adapter(work / name, target)
            folders[name] |= {"adapter": str(work / name / "adapter")}
            folders[name] |= {"modules": modules} if narrow else {}
    for name, answer in ask_vllm(folders, prompts, work, seconds).items():
        if "error" in answer:
            error = answer["error"].replace(str(work / name / "adapter"), "it")
            results[name] = {"error": shorten(error)}
        else:
            base = loading.load(work / name, param_dtype="float32")
            model = adapted.get(name, base)
            results[name] = {"difference": compare(answer, prompts, model)}
            if target:
                texts = [p + a for p, a in zip(prompts, answer["answers"], strict=True)]
                pairs = zip(score(model, texts), score(base, texts), strict=True)
                results[name]["moved"] = max(float(abs(a - b).max()) for a, b in pairs)
        results[name]["dtype"] = dtype
        print(f"{name}: {results[name]}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="tiny configs; all of them")
    parser.add_argument("--adapter", nargs="+", metavar="TARGET", help="adapter.target")
    parser.add_argument("--modules", action="store_true", help="vLLM prepares these modules alone")
    parser.add_argument("--dtype", default="float32", choices=list(CLOSE), help="vLLM's")
    parser.add_argument("--seconds", type=float, default=450, help="for one process of vLLM")
    parser.add_argument("--keep", type=Path, help="write the folders here and leave them")
    parser.add_argument("--dry", action="store_true", help="change no file of results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.keep or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        names = args.names or sorted(served_configs())
        completed = run(names, work, args.dtype, args.seconds, args.adapter, args.modules)
    if args.dry:
        return
    path = ADAPTED if args.adapter else SERVED
    recorded = json.loads(path.read_text()) if path.exists() else {}
    if args.adapter:
        kind = " ".join(args.adapter)
        completed = {kind: {**recorded.get(kind, {}), **completed}}
    path.write_text(json.dumps({**recorded, **completed}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
