"""Router replay: what is recorded while answers are drawn, and that training goes the same way."""

import base64
import io
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.batch import ROUTED, RouteShape, join_routes, pad_routes
from jaxtrain.generation.engine import Sampling
from jaxtrain.generation.local.sampler import LocalSampler
from jaxtrain.generation.vllm.messages import GENERATE, GarbageAnswer, parse_answer
from jaxtrain.models import build, families
from jaxtrain.models.capabilities import route_shape

sys.path.append(str(Path(__file__).parents[1] / "models"))
from tiny_models import RAW, documents, pack

CONFIG = families.config_from_hf({**RAW["qwen3_moe_mixed"], "initializer_range": 0.3})
SHAPE = route_shape(CONFIG)


@pytest.fixture(scope="module")
def model():
    return build.init(CONFIG, 0)


@jax.jit
def read_notes(model, batch):
    return model.hidden(batch).notes


def test_the_shape_of_a_record_leaves_dense_layers_out():
    assert RouteShape((0, 2, 3), 2, 4) == SHAPE
    assert (SHAPE.width, SHAPE.dtype, SHAPE.missing) == (6, np.uint8, 255)
    assert RouteShape((0,), 8, 256).dtype == np.uint16


@pytest.mark.slow
def test_the_sampler_records_what_the_full_forward_does(model):
    """Prompts that share a batch, are read once or wait for a row; answers over several chunks."""
    sampler = LocalSampler(model, (), max_len=128, max_batch=2, routes=SHAPE)
    prompts = [row.tolist() for row in documents(0, 5, 9)] + [documents(0, 5)[0].tolist()]
    answers = sampler.generate(prompts, Sampling(max_new_tokens=40, seed=3))
    rows = [np.array([*p, *a.tokens], np.int32) for p, a in zip(prompts, answers, strict=True)]
    notes = read_notes(model, pack([[row] for row in rows], 64))
    routed_BTR = np.moveaxis(np.asarray(notes["routed"]), 0, 2).reshape(3, 64, -1)
    for answer, row, wanted_TR in zip(answers, rows, routed_BTR, strict=True):
        assert answer.routed.dtype == np.uint8
        np.testing.assert_array_equal(answer.routed, wanted_TR[: len(row) - 1])
    assert len({tuple(row) for row in routed_BTR[0]}) > 10, "all tokens go alike"


@pytest.mark.slow
def test_training_goes_where_it_is_told(model):
    """Any experts but those of the router's choice; where they are missing or twice the same, it
    chooses. In layers before the first difference the choice is that of the plain pass."""
    batch = pack([[documents(1, 20)[0]]], 24)
    plain = np.asarray(read_notes(model, batch)["routed"])
    rng = np.random.default_rng(0)
    provided = np.stack([rng.permutation(4)[:2] for _ in range(24 * 3)]).reshape(1, 24, 6)
    provided[0, 5] = SHAPE.missing
    provided[0, 6] = 1
    stream = {ROUTED: jnp.asarray(provided, jnp.uint8)}
    notes = read_notes(model, batch._replace(streams=stream))
    actual = np.moveaxis(np.asarray(notes["routed"]), 0, 2).reshape(1, 24, 6)
    messages = np.ones(24, bool)
    messages[[5, 6]] = False
    np.testing.assert_array_equal(actual[0, messages], provided[0, messages])
    np.testing.assert_array_equal(actual[0, ~messages, :2], plain[0, 0, ~messages])
    assert np.asarray(notes["given"]).tolist() == [[19]] * 3  # of the 20 tokens of the document
    remote_result = np.arange(20) != 5
    local_value, second = plain[0, 0, :20][remote_result], provided[0, :20, :2][remote_result]
    same = [len(set(a) & set(b)) / 2 for a, b in zip(local_value, second, strict=True)]
    assert float(notes["given_same"][0, 0]) == pytest.approx(sum(same))


def test_records_are_joined_by_place():
    """The first record of a token stays; what it does not know comes from the second."""
    gap = SHAPE.missing
    recorded = np.array([[1, 2], [gap, gap]], np.uint8)
    array = np.array([[3, 0], [0, 1], [2, 3]], np.uint8)
    assert join_routes(recorded, array).tolist() == [[1, 2], [0, 1], [2, 3]]
    assert join_routes(array, recorded).tolist() == array.tolist()
    assert join_routes(None, array) is array and join_routes(recorded, None) is recorded
    shape = RouteShape((0,), 2, 4)
    assert pad_routes(recorded, 3, shape).tolist() == [[1, 2], [gap, gap], [gap, gap]]
    assert pad_routes(None, 1, shape).tolist() == [[gap, gap]]


def answer_with(array) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    routed = base64.b64encode(file.getvalue()).decode()
    logprobs = {"content": [{"token_id": 7, "logprob": -0.5}] * 2}
    choice = {"token_ids": [7, 7], "finish_reason": "stop", "logprobs": logprobs}
    return json.dumps({"choices": [{**choice, "routed_experts": routed}]}).encode()


def test_a_servers_record_is_read_by_layer():
    array = np.arange(4 * 4 * 2).reshape(4, 4, 2).astype(np.uint8) % 4
    array[2] = 200  # no expert of this model
    answer = parse_answer(GENERATE, answer_with(array), 4, 3, SHAPE)
    expected = array[:, [0, 2, 3]].reshape(4, 6)
    expected[2] = SHAPE.missing
    np.testing.assert_array_equal(answer.routed, expected)
    assert parse_answer(GENERATE, answer_with(array), 4).routed is None


@pytest.mark.parametrize(
    "array",
    [np.zeros((5, 4, 2), np.uint8), np.zeros((4, 3, 2), np.uint8), np.zeros((4, 4, 2), np.float32)],
    ids=["tokens", "layers", "dtype"],
)
def test_another_record_is_garbage(array):
    with pytest.raises(GarbageAnswer, match="routed_experts is"):
        parse_answer(GENERATE, answer_with(array), 4, 3, SHAPE)
    broken = answer_with(array).replace(b'"routed_experts": "', b'"routed_experts": "!')
    with pytest.raises(GarbageAnswer, match="no .npy file"):
        parse_answer(GENERATE, broken, 4, 3, SHAPE)
