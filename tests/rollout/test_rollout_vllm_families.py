"""A real vLLM server on CPU with Mamba layers: it serves what is trained.

Full and delta syncs of every parameter, in the sizes that vLLM's kernels on a CPU have; the models
are those of benchmarks/served_families.py. Mixtures of experts are refused there: vLLM packs their
weights for a CPU when it opens them.
"""

import signal
import sys
from pathlib import Path

import pytest
from real_vllm import PYTHON, RealServer, cast, change, make_config, worst

from jaxtrain.core.assemble import abstract_params, assemble, open_params
from jaxtrain.rollout.vllm.open import open_vllm

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


def follow(server, place, sync, dtype):
    """Three versions of all weights, of which the third is not the second."""
    config = make_config(server, place, sync, weight_dtype="float32")
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"sequence_len": 128})}
    )
    parts = assemble(config)
    rebuild, params = abstract_params(parts)[1], open_params(parts, 0)
    engine, publisher = open_vllm(config, parts)
    try:
        for version in range(3):
            metrics = publisher.publish(version, params, None)
            assert metrics["sync/delta"] == (sync == "delta" and version > 0)
            found = worst(engine, rebuild, cast(params, "float32"), config, version)
            print(f"{sync} version {version}: {found:.1e}")
            assert found < CLOSE[dtype]
            params = change(params, 0.02, version)
        before = worst(engine, rebuild, cast(params, "float32"), config, 2)
        assert before > 10 * CLOSE[dtype], "the test would not notice missing updates"
    finally:
        publisher.close()
