"""A family with recurrent layers, defined in toy_recurrent.py alone, does what all others do:
trees, packing, shared prompts, decoding and continuous batching."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import toy_recurrent
from hypothesis import given, settings
from tiny_models import RAW, SIZES, check_decoding

from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Sampling
from jaxtrain.generation.local.sampler import LocalSampler
from jaxtrain.layers.attention import Attention
from jaxtrain.models import ARCHITECTURES, build, families
from jaxtrain.models.capabilities import require_trees
from jaxtrain.models.parameters import split_model

sys.path.append(str(Path(__file__).parents[1] / "methods"))
sys.path.append(str(Path(__file__).parents[1] / "generation"))
import test_generation_local as local
import test_methods_labels as labels
import test_methods_tree_exactness as trees

TOY = {"architectures": ["ToyForCausalLM"], "num_hidden_layers": 5, "sliding_window": 6}
# Of 5 layers four are two rounds of a scan.


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "ToyForCausalLM", "toy_recurrent")
    monkeypatch.setitem(trees.MODELS, "toy", TOY)


@settings(trees.RANDOM, max_examples=10)
@given(forest=trees.FORESTS)
def check_forests(forest):
    trees.check_forest("toy", "xla", forest)


@pytest.mark.slow
def test_packed_trees_and_documents_equal_their_branches_alone():
    """Logits, loss and gradients in float64; two trees in a row, chains among them."""
    trees.check_forest("toy", "xla", trees.FIXED["k_of_4_beside_k_of_1"])
    check_forests()


@pytest.mark.slow
def test_shared_prompts_equal_flat_rows(monkeypatch):
    """Loss and gradients of a policy-gradient batch in float64."""
    raw = {**labels.ARCHITECTURE, **TOY}
    with jax.enable_x64(True):
        model = build.init(families.config_from_hf(raw), 0, param_dtype="float64", dtype="float64")
        parts = split_model(model)
    monkeypatch.setattr(labels, "start", lambda: parts)
    labels.test_a_group_tree_is_its_flat_rows("token", labels.make_groups)


@pytest.mark.slow
def test_prefill_and_steps_equal_full_forward():
    check_decoding({**SIZES, **TOY})


@pytest.mark.slow
@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(TOY, marks=pytest.mark.thorough),
        pytest.param(RAW["mistral"], marks=pytest.mark.thorough),
        RAW["qwen3_5"],
    ],
    ids=["toy", "mistral", "hybrid"],
)
def test_the_sampler_draws_what_the_full_forward_says(raw):
    """States that are grown and given to new rows while others run; answers and one prompt are
    longer than the windows, so that rings go round."""
    raw = {**SIZES, **raw, "initializer_range": 0.3}
    model = build.init(families.config_from_hf(raw), 0)
    sampler = LocalSampler(model, eos_ids=(), max_len=128, max_batch=2)
    rng = np.random.default_rng(0)
    requests = [
        sampler.request(rng.integers(1, 97, length).tolist(), Sampling(max_new_tokens=new))
        for length, new in [(3, 40), (9, 4), (35, 50), (4, 5)]
    ]
    for late in (requests[:1], requests[1:]):
        for request in late:
            sampler.add(request)
        sampler.step()
    while sampler.busy:
        sampler.step()
    for request in requests:
        row = np.zeros((1, 96), np.int32)  # what stands behind the answer changes nothing
        start, count = len(request.prompt) - 1, len(request.tokens)
        row[0, : start + 1 + count] = [*request.prompt, *request.tokens]
        logits = local.next_logits(model, row)[0, start : start + count]
        assert request.tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("layer", [toy_recurrent.Recurrent, Attention])
def test_a_layer_that_does_not_follow_trees_is_refused(layer, monkeypatch):
    config = families.config_from_hf({**SIZES, **TOY})
    require_trees(config, "data.packing true", "set it to false")
    monkeypatch.setattr(layer, "follows_trees", False)
    with pytest.raises(UserError, match=r"data.packing true, but model.path is ToyFor.*to false"):
        require_trees(config, "data.packing true", "set it to false")
