"""A real vLLM server as a child, small models for it, and what our own model says of its answers.

JAXTRAIN_VLLM_PYTHON names the Python of an environment with vLLM, JAXTRAIN_VLLM_PATH a folder with
what that environment lacks, if anything.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from smolvlm_text import QWEN_TEMPLATE

from jaxtrain.config import validate_config
from jaxtrain.data.chat.control_tokens import add_tokens
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.models import build, families, saving

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("JAXTRAIN_VLLM_PYTHON", "")

CLOSE = 1e-3
"""float32 on both sides; sums in another order give 1e-5, another weight or position 1e-1."""


def make_model(folder: Path, seed: int, tied: bool) -> Path:
    tokenizer = load_tokenizer("builtin")
    raw = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "tie_word_embeddings": tied,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = families.config_from_hf(raw)
    saving.save(build.init(config, seed, param_dtype="float32"), config, folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_vision_model(folder: Path) -> Path:
    """Write a Qwen3-VL of three layers with a tower of three, and all files of its processor."""
    tokenizer = load_tokenizer("builtin")
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    add_tokens(tokenizer, (), tokens)
    tokenizer.chat_template = QWEN_TEMPLATE
    raw = {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        **dict(zip(names, tokenizer.convert_tokens_to_ids(list(tokens)), strict=True)),
        "text_config": {
            "model_type": "qwen3_vl_text",
            "vocab_size": 528,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 512,
            "initializer_range": 0.2,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "hidden_size": 64,
            "intermediate_size": 96,
            "depth": 3,
            "num_heads": 2,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "initializer_range": 0.2,
            "deepstack_visual_indexes": [0, 2],
        },
    }
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": 8,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 1024, "longest_edge": 16384},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    config = families.config_from_hf(raw)
    saving.save(build.init(config, 0, param_dtype="float32"), config, folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    settings["video_processor_type"] = "Qwen3VLVideoProcessor"
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as actual:
        return actual.getsockname()[1]


class RealServer:
    """`python -m jaxtrain_vllm.serve` as a child."""

    def __init__(self, model: Path, sync: str, log: Path, *extra: str, dtype: str = "float32"):
        """extra: options of vLLM's."""
        self.model, self.sync, self.log = model, sync, log
        self.extra = ["--dtype", dtype, *extra]
        self.port = free_port()
        self.start()

    def start(self) -> None:
        command = [PYTHON, "-m", "jaxtrain_vllm.serve", "--model", str(self.model)]
        command += ["--port", str(self.port), "--sync", self.sync, "--"]
        command += ["--enforce-eager", "--max-model-len", "512", *self.extra]
        paths = [str(ROOT), *filter(None, [os.environ.get("JAXTRAIN_VLLM_PATH")])]
        env = {**os.environ, "PYTHONPATH": ":".join(paths), "VLLM_CPU_KVCACHE_SPACE": "1"}
        self.process = subprocess.Popen(
            command, env=env, stdout=self.log.open("ab"), stderr=subprocess.STDOUT,
            cwd=self.log.parent, start_new_session=True,
        )  # fmt: skip

    def kill(self, sign=signal.SIGKILL) -> None:
        """The whole group: API server, engine core, workers."""
        try:
            os.killpg(self.process.pid, sign)
            self.process.wait(30)
        except ProcessLookupError:
            pass


def make_config(server, output_dir, sync, model=None, **vllm):
    table = {
        "run": {"max_steps": 1, "output_dir": str(output_dir)},
        "task": {"kind": "rl"},
        "model": {"path": str(model or server.model), "compute_dtype": "float32"},
        "data": {"datasets": [{"path": "builtin:calculator"}], "sequence_len": 512},
        "env": {"kind": "calculator"},
        "sampling": {"temperature": 1.0, "max_new_tokens": 40, "seed": 5},
        "rollout": {
            "engine": "vllm",
            "vllm": {
                "servers": [f"http://127.0.0.1:{server.port}"],
                "sync": sync,
                "health_seconds": 1.0,
                "wait_seconds": 180.0,
                **vllm,
            },
        },
    }
    if sync == "lora":
        table["adapter"] = {"kind": "lora", "rank": 4, "alpha": 8.0}
    return validate_config(table, "test")


def score(model, prompt, answer, temperature=1.0):
    """float [len(answer)] log-probs by our model, in one causal pass."""
    tokens = np.array([[*prompt, *answer]], np.int32)
    cache = model.init_cache(1, tokens.shape[1])
    hidden, *_ = model.decode(jnp.asarray(tokens), cache)
    logp = jax.nn.log_softmax(model.logits(hidden[0]).astype(jnp.float32) / temperature)
    start = len(prompt) - 1
    return np.array([logp[start + i, token] for i, token in enumerate(answer)])


def ask(engine, prompts, sampling, stop_ids=()):
    async def run():
        try:
            return await asyncio.gather(
                *(engine.generate(p, sampling, stop_ids, i) for i, p in enumerate(prompts))
            )
        finally:
            await engine.close()

    return asyncio.run(run())


def prompts(count=4, length=20):
    rng = np.random.default_rng(1)
    return [rng.integers(0, 256, length).tolist() for _ in range(count)]


def change(params, share, seed):
    """Some entries of every parameter moved by a step that bfloat16 sees."""
    rng = np.random.default_rng(seed)
    return {
        name: array
        + jnp.asarray(
            (rng.random(array.shape) < share) * rng.normal(size=array.shape) * 0.1, array.dtype
        )
        for name, array in params.items()
    }


def cast(params, dtype):
    return {n: jnp.asarray(a, dtype).astype(jnp.float32) for n, a in params.items()}


def worst(engine, rebuild, params, config, version):
    """Largest difference between served log-probs and ours."""
    model = rebuild(params)
    actual = 0.0
    for prompt, answer in zip(prompts(), ask(engine, prompts(), config.sampling), strict=True):
        assert set(answer.versions) == {version}
        actual_values = score(model, prompt, answer.tokens)
        actual = max(actual, float(np.abs(actual_values - answer.logprobs).max()))
    return actual


RUN = """
[run]
max_steps = 12
export = false
output_dir = "OUT"
[model]
path = "MODEL"
compute_dtype = "float32"
[parallel]
data = 1
fsdp = -1
[data]
sequence_len = 128
micro_batch_size = 1
[[data.datasets]]
path = "builtin:calculator"
options = { num_rows = 200 }
[task]
kind = "rl"
num_minibatches = 2
[rollout]
engine = "ENGINE"
mode = "async"
max_lag = 2
streaming = true
prompts_per_step = 4
group_size = 4
[rollout.vllm]
servers = ["http://127.0.0.1:PORT"]
weight_dtype = "float32"
wait_seconds = 180.0
[env]
kind = "python"
path = "ENV:EvenTokens"
[sampling]
temperature = 1.0
max_new_tokens = 24
[optim]
learning_rate = 1e-3
lr_scheduler = "constant"
[[eval.sets]]
path = "builtin:calculator"
options = { num_rows = 12 }
temperature = 0.0
[log]
plot = false
"""


def write_run(server, folder, engine="vllm", model=None) -> Path:
    """A config file whose run samples from the server, or in its own process."""
    text = RUN.replace("OUT", str(folder / "run")).replace("MODEL", str(model or server.model))
    text = text.replace("ENV", str(ROOT / "tests" / "methods" / "rl_toy_env.py"))
    text = text.replace("ENGINE", engine).replace("PORT", str(server.port))
    if engine == "local":
        retained = [line for line in text.splitlines() if not line.startswith(LOCAL_HAS_NO)]
        text = "\n".join(retained)
    (folder / "run.toml").write_text(text)
    return folder / "run.toml"


LOCAL_HAS_NO = ("[rollout.vllm]", "servers", "weight_dtype", "wait_seconds", "mode", "streaming")


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def descendants(pid: int) -> list[int]:
    """Processes below one, by /proc."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
        except (OSError, ValueError):
            continue
        parents[int(status.parent.name)] = int(lines["PPid"])
    actual = [pid]
    for parent in actual:
        actual += [child for child, its in parents.items() if its == parent]
    return actual[1:]
