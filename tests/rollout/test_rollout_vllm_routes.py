"""A real vLLM server on CPU with a mixture of experts: those that it reports our router chooses.

Asked directly, for whole weights of experts are not published to vLLM on a CPU.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from real_vllm import PYTHON, RealServer, prompts, score

from jaxtrain.data.template import load_tokenizer
from jaxtrain.models import build
from jaxtrain.models.routing import route_shape
from jaxtrain.rollout.types import Sampling
from jaxtrain.rollout.vllm.control import ServerGone, ServerRefused, call
from jaxtrain.rollout.vllm.messages import GENERATE, build_request, parse_answer

sys.path.append(str(Path(__file__).parents[1] / "models"))
from tiny_models import pack

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

RAW = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    if not Path(PYTHON or "/nowhere").is_file():
        pytest.skip("JAXTRAIN_VLLM_PYTHON names no Python with vLLM")
    folder = tmp_path_factory.mktemp("routes")
    config = build.config_from_hf(RAW)
    model = build.init(config, 0, param_dtype="float32")
    build.save(model, config, folder)
    load_tokenizer("builtin").save_pretrained(folder)
    server = RealServer(folder, "full", folder / "server.log", "--enable-return-routed-experts")
    url, end = f"http://127.0.0.1:{server.port}", time.monotonic() + 240
    try:
        while True:
            try:
                call(url, "GET", "/health", timeout=5)
                break
            except (ServerGone, ServerRefused):
                assert server.process.poll() is None and time.monotonic() < end, (
                    server.log.read_text()[-3000:]
                )
                time.sleep(1)
        yield url, folder, config, model
    finally:
        server.kill()


def test_what_a_server_reports_is_where_our_router_sends(served):
    url, folder, config, model = served
    shape, sampling = route_shape(config), Sampling(max_new_tokens=24, seed=1)
    for number, prompt in enumerate(prompts(3)):
        body = build_request(
            GENERATE, prompt, sampling, (), max_tokens=24, seed=number, model=str(folder)
        )
        raw = json.dumps(call(url, "POST", GENERATE, body, timeout=120)).encode()
        answer = parse_answer(GENERATE, raw, 24, len(prompt), shape)
        row = np.array([*prompt, *answer.tokens], np.int32)
        assert answer.routed is not None and answer.routed.shape == (len(row) - 1, shape.width)
        notes = model.hidden(pack([[row]], 64)).notes
        ours = np.moveaxis(np.asarray(notes["routed"]), 0, 2).reshape(64, -1)[: len(row) - 1]
        sort = lambda x: np.sort(x.reshape(len(x), -1, shape.top), -1)  # noqa: E731
        same = (sort(answer.routed) == sort(ours)).all(-1).mean()
        np.testing.assert_allclose(score(model, prompt, answer.tokens), answer.logprobs, atol=0.02)
        assert same > 0.98, same
