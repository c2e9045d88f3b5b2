"""The samples of a conversation as one tree: the same tokens, weights, loss and gradients."""

import json
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.batch import check_batch
from jaxtrain.config.data import DataConfig, DatasetConfig
from jaxtrain.core.losses.nll import nll_loss
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.data.chat.tokenize import RowTokenizer
from jaxtrain.data.packing.branches import list_branches
from jaxtrain.data.packing.pack import Fields, build_batch, lay_out
from jaxtrain.data.packing.prefixes import group_samples, share_prefixes
from jaxtrain.data.packing.tree import Tree
from jaxtrain.data.preview import probe_samples
from jaxtrain.data.sample import Dropped, Sample, to_tree, to_trees
from jaxtrain.data.sequences import Sequences
from jaxtrain.models import build, families
from jaxtrain.models.parameters import split_model

QWEN3 = str(Path(__file__).with_name("qwen3.jinja"))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("builtin", QWEN3)


def make_talk(turns, thoughts=True, tools=True):
    talk = [{"role": "system", "content": "S"}]
    for number in range(turns):
        talk.append({"role": "user", "content": f"question {number}"})
        thought = {"reasoning_content": f"thought {number}"} if thoughts else {}
        talk.append({"role": "assistant", "content": f"answer {number}", **thought})
        if tools and number % 2:
            talk.append({"role": "tool", "content": f"result {number}"})
            talk.append({"role": "assistant", "content": f"so {number}", **thought})
    return talk


def both(tokenizer, row, length=4096, too_long="drop"):
    """(flat samples and drops, trees and drops) of a row."""
    dataset = DatasetConfig(path="x")
    created = [RowTokenizer(dataset, tokenizer, length, too_long, trees) for trees in (False, True)]
    return [entry(row, "x row 1") for entry in created]


def sequences(items):
    """{tokens: weights} of all branches, those that are alike added up."""
    actual = {}
    for item in items:
        if isinstance(item, Dropped):
            continue
        tree = item if isinstance(item, Tree) else to_tree(item)
        for branch in list_branches(tree):
            tokens = tuple(branch.tokens.tolist())
            actual[tokens] = actual.get(tokens, 0) + 1
    return actual


def total_weights(items):
    trees = [item if isinstance(item, Tree) else to_tree(item) for item in items]
    return sum(node.weights["nll"].sum() for tree in trees for node in tree.nodes)


@pytest.mark.parametrize("thoughts", [False, True])
def test_a_conversation_is_one_tree_of_its_samples(tokenizer, thoughts):
    flat, shared = both(tokenizer, {"messages": make_talk(5, thoughts)})
    assert len(flat) > 4 and all(isinstance(item, Sample) for item in flat)
    [tree] = shared
    assert sequences(shared) == sequences(flat)
    assert tree.flat_tokens == sum(len(sample.tokens) for sample in flat) > 1.5 * tree.num_tokens
    assert total_weights(shared) == sum(sample.weights.sum() for sample in flat)


def test_a_template_that_keeps_history_gives_the_sample_as_ever():
    flat, shared = both(load_tokenizer("builtin"), {"messages": make_talk(4)})
    [first], [right] = flat, shared
    assert isinstance(right, Sample) and (first.tokens == right.tokens).all()


SIZES = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_the_flat_samples(tokenizer):
    """In float64 they differ by the order of sums alone."""
    flat, shared = both(tokenizer, {"messages": make_talk(3)})
    with jax.enable_x64(True):
        architecture = families.config_from_hf(SIZES)
        options = {"param_dtype": "float64", "dtype": "float64", "attention_impl": "reference"}
        params, rebuild = split_model(build.init(architecture, 0, **options))

        @jax.jit
        @jax.value_and_grad
        def loss(params, batch):
            sums, _ = nll_loss(rebuild(params), batch, "reference")
            return sums["nll"] / batch.weights["nll"].sum()

        results = []
        assert Sequences.held_out_normalize == Sequences.normalize
        length = sum(len(sample.tokens) for sample in flat)
        for items in (flat, shared):
            row = [lay_out(tree, Sequences.normalize) for tree in to_trees(items, length)]
            batch = build_batch([row], length, Fields(dtype=np.float64))
            check_batch(batch)
            results.append(jax.device_get(loss(params, batch)))
        (first, left_grads), (right, right_grads) = results
    np.testing.assert_allclose(right, first, rtol=1e-13)
    largest = max(np.abs(grad).max() for grad in left_grads.values())
    for path, grad in left_grads.items():
        np.testing.assert_allclose(right_grads[path], grad, rtol=0, atol=1e-12 * largest)


@pytest.mark.parametrize("too_long", ["drop", "truncate"])
@pytest.mark.parametrize("length", [40, 90, 130, 200, 400])
def test_nothing_is_lost_that_fits_flat(tokenizer, length, too_long):
    flat, shared = both(tokenizer, {"messages": make_talk(6)}, length, too_long)
    assert sum(sequences(shared).values()) == sum(sequences(flat).values())
    assert sequences(shared) == sequences(flat)
    drops = [[i.reason for i in items if isinstance(i, Dropped)] for items in (flat, shared)]
    assert drops[0] == drops[1]
    trees = to_trees(shared, length)
    assert not any(isinstance(t, Dropped) and "row" in t.reason for t in trees)
    retained = [items for items in shared if not isinstance(items, Dropped)]
    assert total_weights(retained) == sum(s.weights.sum() for s in flat if isinstance(s, Sample))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 2), min_size=2, max_size=8), min_size=1, max_size=6),
    st.integers(8, 20),
)
def test_any_samples_keep_their_tokens_and_weights(drawn, limit):
    samples = [
        Sample(np.array(t, np.int32), np.array([0, *[1.0] * (len(t) - 1)], np.float32))
        for t in drawn
    ]
    created = share_prefixes(samples, limit)
    assert sequences(created) == sequences(samples)
    assert total_weights(created) == sum(sample.weights.sum() for sample in samples)
    sizes = [item.num_tokens if isinstance(item, Tree) else len(item.tokens) for item in created]
    assert max(sizes) <= limit and sum(sizes) <= sum(len(sample.tokens) for sample in samples)
    assert [entry for group in group_samples(samples, limit) for entry in group] == samples


def test_a_long_conversation_takes_a_moment(tokenizer):
    row = {"messages": make_talk(60, tools=False)}
    began = time.process_time()
    flat, [tree] = both(tokenizer, row, 1 << 16)
    assert time.process_time() - began < 8  # two of well below a second
    assert tree.flat_tokens > 15 * tree.num_tokens and tree.num_branches == len(flat) == 60


def test_the_saving_is_told(tokenizer, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": make_talk(5)}) + "\n")
    data = DataConfig(sequence_len=2048)
    actual = probe_samples(DatasetConfig(path=str(path)), tokenizer, data, True)
    assert "shared prefixes save " in str(actual)
    assert "shared" not in str(probe_samples(DatasetConfig(path=str(path)), tokenizer, data))
