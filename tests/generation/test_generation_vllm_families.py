"""A real vLLM server on CPU with Mamba layers: it serves what is trained.

Full and delta syncs of every parameter and adapters of every Linear, in the sizes that vLLM's
kernels on a CPU have; the models are those of benchmarks/served_families.py. Mixtures of experts
are refused there: vLLM packs their weights for a CPU when it opens them, and has no kernels there
for a mixture with an adapter (test_generation_lora_limits.py).
"""

import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from real_vllm import PYTHON, RealServer, cast, change, make_config, worst

from jaxtrain.core.bundle import build_model_bundle
from jaxtrain.core.weights import abstract_params, open_params
from jaxtrain.generation.vllm.factory import open_vllm

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(
        not Path(PYTHON or "/nowhere").is_file(),
        reason="JAXTRAIN_VLLM_PYTHON does not name the Python of an environment with vLLM",
    ),
]

CLOSE = {"float32": 2e-4, "bfloat16": 0.3}
"""Largest difference of log-probs, of activations in that dtype."""
FAMILIES = {"nemotron_h": "float32", "granitemoehybrid_dense": "float32"}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_served_family_follows_the_trainer(name, tmp_path):
    from served_families import served_configs, write_model

    dtype, folder = FAMILIES[name], tmp_path / "model"
    write_model(served_configs()[name], folder)
    options = ("--max-model-len", "128", "--no-enable-prefix-caching")
    server = RealServer(folder, "delta", tmp_path / "server.log", *options, dtype=dtype)
    try:
        for sync in ("full", "delta"):
            follow(server, tmp_path / sync, sync, dtype)
    finally:
        server.kill(signal.SIGTERM)


def follow(server, position, sync, dtype):
    """Three versions of all weights, of which the third is not the second."""
    config = short(make_config(server, position, sync, weight_dtype="float32"))
    parts = build_model_bundle(config)
    rebuild, params = abstract_params(parts)[1], open_params(parts, 0)
    engine, publisher = open_vllm(config, parts)
    try:
        for version in range(3):
            metrics = publisher.publish(version, params, None)
            assert metrics["sync/delta"] == (sync == "delta" and version > 0)
            actual = worst(engine, rebuild, cast(params, "float32"), config, version)
            print(f"{sync} version {version}: {actual:.1e}")
            assert actual < CLOSE[dtype]
            params = change(params, 0.02, version)
        before = worst(engine, rebuild, cast(params, "float32"), config, 2)
        assert before > 10 * CLOSE[dtype], "the test would not notice missing updates"
    finally:
        publisher.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_served_family_follows_the_adapter(name, tmp_path):
    """Every Linear is adapted, including those of the Mamba layers."""
    from served_families import served_configs, write_model

    dtype, folder = FAMILIES[name], tmp_path / "model"
    write_model(served_configs()[name], folder)
    options = ("--max-model-len", "128", "--no-enable-prefix-caching")
    server = RealServer(folder, "lora", tmp_path / "server.log", *options, dtype=dtype)
    try:
        follow_adapter(server, tmp_path / "lora", dtype)
    finally:
        server.kill(signal.SIGTERM)


def follow_adapter(server, position, dtype):
    """Three versions of an adapter, of which the third is not the second."""
    config = short(make_config(server, position, "lora"))
    parts = build_model_bundle(config)
    assert any(path.endswith(".in_proj") for path in parts.adapter.slots)
    rebuild, params = abstract_params(parts)[1], open_params(parts, 0)
    engine, publisher = open_vllm(config, parts)
    rng = np.random.default_rng(0)
    try:
        for version in range(3):
            publisher.publish(version, params, None)
            actual = worst(engine, rebuild, params, config, version)
            print(f"lora version {version}: {actual:.1e}")
            assert actual < CLOSE[dtype]
            params = {
                path: value + 0.1 * rng.normal(size=value.shape).astype("float32")
                if ".adapter." in path
                else value
                for path, value in params.items()
            }
        before = worst(engine, rebuild, params, config, 2)
        assert before > 10 * CLOSE[dtype], "the test would not notice missing updates"
    finally:
        publisher.close()


def short(config):
    """The config with texts no longer than the models take."""
    data = config.data.model_copy(update={"sequence_len": 128})
    return config.model_copy(update={"data": data})
