"""Every family's export served by vLLM on a CPU: are its log-probs ours?

JAXTRAIN_VLLM_PYTHON=path/to/vllm/python python benchmarks/served_families.py [NAME ...]

For each tiny config of tests/models/families_*.py, in sizes that vLLM's kernels have: a model with
no norm, bias or decay at its neutral value is written by our exporter, opened by vLLM, and asked
for the log-probs of prompts' tokens and of an answer drawn after them (so caches are seen, too).
Those of our own model, read from the same folder, are compared. What was found goes into
benchmarks/results/served_families_cpu.json, from which scripts/make_models_table.py makes a column
of docs/models.md. JAXTRAIN_VLLM_PATH: a folder with what vLLM's environment lacks (torchvision for
Qwen3.5's classes).
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

from make_models_table import CLOSE, SERVED, tiny_configs

from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.models import build, families, loading, saving

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


MOST_WORDS = 120
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
    return line if len(line) <= MOST_WORDS else line[:MOST_WORDS] + "..."


def make_prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 256, length).tolist() for length in LENGTHS]


def served_configs() -> dict[str, dict]:
    """{name: config.json} of all; what vLLM has no class for its transformers backend may run."""
    return {name: fit_to_vllm(raw) for name, (_, raw) in tiny_configs().items()}


def run(names: list[str], work: Path, dtype: str, seconds: float) -> dict[str, dict]:
    """{name: {"dtype", "difference"} or {"dtype", "error"}}."""
    configs, prompts = served_configs(), make_prompts()
    folders = {}
    for name in names:
        if not (work / name / "config.json").exists():
            write_model(configs[name], work / name)
        folders[name] = {"path": str(work / name), "dtype": dtype}
    actual = {}
    for name, answer in ask_vllm(folders, prompts, work, seconds).items():
        if "error" in answer:
            actual[name] = {"error": shorten(answer["error"])}
        else:
            model = loading.load(work / name, param_dtype="float32")
            actual[name] = {"difference": compare(answer, prompts, model)}
        actual[name]["dtype"] = dtype
        print(f"{name}: {actual[name]}", flush=True)
    return actual


def make_parser(about: str) -> argparse.ArgumentParser:
    """Options of a command that asks vLLM about many models."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("names", nargs="*", help="tiny configs; all of them")
    parser.add_argument("--dtype", default="float32", choices=list(CLOSE), help="vLLM's")
    parser.add_argument("--seconds", type=float, default=450, help="for one process of vLLM")
    parser.add_argument("--keep", type=Path, help="write the folders here and leave them")
    parser.add_argument("--dry", action="store_true", help="change no file of results")
    return parser


def main() -> int:
    parser = make_parser(__doc__)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.keep or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        completed = run(args.names or sorted(served_configs()), work, args.dtype, args.seconds)
    if not args.dry:
        recorded = json.loads(SERVED.read_text()) if SERVED.exists() else {}
        SERVED.write_text(json.dumps({**recorded, **completed}, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
