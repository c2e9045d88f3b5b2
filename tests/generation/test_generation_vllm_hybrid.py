"""A real vLLM server on CPU with Qwen3.5: after full and delta syncs it serves what is trained.

Layers of linear attention compute in bfloat16 alone there, so log-probs agree to bfloat16, and the
test is whether they follow the updates. vLLM imports these families with torchvision only.
"""

import os
import signal
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from real_vllm import PYTHON, RealServer, ask, change, make_config, prompts, score

from jaxtrain.core.bundle import build_model_bundle
from jaxtrain.core.weights import abstract_params, open_params
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.generation.vllm.factory import open_vllm
from jaxtrain.models import build, families, saving
from jaxtrain.models.parameters import split_model

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

ROUNDED = 0.03
"""Mean difference of log-probs by bfloat16 activations in 4 layers: 0.02 was seen, and 0.5 and more
of weights that an update had not reached."""
RAW = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "mamba_ssm_dtype": "float32",
}


def can_import() -> bool:
    """Return whether that environment can import the family."""
    if not Path(PYTHON or "/nowhere").is_file():
        return False
    code = "import vllm.model_executor.models.qwen3_5"
    env = {**os.environ, "PYTHONPATH": os.environ.get("JAXTRAIN_VLLM_PATH", "")}
    return not subprocess.run([PYTHON, "-c", code], env=env, capture_output=True).returncode


@pytest.fixture(scope="module", params=["delta", "lora"])
def server(request, tmp_path_factory):
    if not can_import():
        pytest.skip("JAXTRAIN_VLLM_PYTHON names no environment whose vLLM can import Qwen3.5")
    folder = tmp_path_factory.mktemp("hybrid")
    tokenizer = load_tokenizer("builtin")
    config = families.config_from_hf({**RAW, "eos_token_id": tokenizer.eos_token_id})
    params, rebuild = split_model(build.init(config, 0, param_dtype="float32"))
    rng = np.random.default_rng(0)
    for name, value in params.items():
        if name.endswith("A_log"):  # else nothing is remembered from token to token
            params[name] = jnp.asarray(rng.uniform(-4.6, 0.4, value.shape), value.dtype)
    saving.save(rebuild(params), config, folder / "model")
    tokenizer.save_pretrained(folder / "model")
    real_server = RealServer(
        folder / "model",
        request.param,
        folder / "server.log",
        "--no-enable-prefix-caching",  # which needs prompts to be read in chunks, and that fails
        dtype="bfloat16",
    )
    yield real_server
    real_server.kill(signal.SIGTERM)


@pytest.mark.parametrize("sync", ["full", "delta"])
def test_a_served_hybrid_follows_the_trainer(server, tmp_path, sync):
    if server.sync == "lora":
        pytest.skip("this server takes adapters")
    config = make_config(server, tmp_path, sync)
    parts = build_model_bundle(config)
    rebuild, params = abstract_params(parts)[1], open_params(parts, 0)
    engine, publisher = open_vllm(config, parts)
    wide = {name.rsplit(".", 2)[-2] for name in publisher.publisher.wide if name.endswith("A_log")}
    assert wide == {"linear_attn"}
    try:
        for version in range(3):
            metrics = publisher.publish(version, params, None)
            assert metrics["sync/delta"] == (sync == "delta" and version > 0)
            actual = compare(engine, rebuild(params), config, version)
            print(f"{sync} version {version}: mean and largest difference {actual}, {metrics}")
            assert actual[0] < ROUNDED
            params = change(params, 0.02, version)
        assert compare(engine, rebuild(params), config, 2)[0] > 5 * ROUNDED
    finally:
        publisher.close()


def test_served_adapters_follow_the_trainer(server, tmp_path):
    """Linear attention, gates and MLP are adapted, too."""
    if server.sync != "lora":
        pytest.skip("this server takes whole weights")
    config = make_config(server, tmp_path, "lora")
    parts = build_model_bundle(config)
    rebuild, params = abstract_params(parts)[1], open_params(parts, 0)
    assert any("linear.attention.qkv" in path for path in parts.adapter.slots)
    engine, publisher = open_vllm(config, parts)
    try:
        for version in range(3):
            publisher.publish(version, params, None)
            actual = compare(engine, rebuild(params), config, version)
            print(f"lora version {version}: mean and largest difference {actual}")
            assert actual[0] < ROUNDED
            rng = np.random.default_rng(version)
            params = {
                name: array + 0.1 * rng.normal(size=array.shape).astype(np.float32)
                if ".adapter." in name
                else array
                for name, array in params.items()
            }
        assert compare(engine, rebuild(params), config, 2)[0] > 5 * ROUNDED
    finally:
        publisher.close()


def compare(engine, model, config, version):
    """(mean, largest) difference between served log-probs and ours."""
    off = []
    for prompt, answer in zip(prompts(), ask(engine, prompts(), config.sampling), strict=True):
        assert set(answer.versions) == {version}
        off.append(np.abs(score(model, prompt, answer.tokens) - answer.logprobs))
    off = np.concatenate(off)
    return float(off.mean()), float(off.max())
