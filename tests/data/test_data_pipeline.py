"""The doorway: from config sections to batches, for plain samples and for trees."""

import json
import os
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.batch import check_batch
from jaxtrain.config import DataConfig, DatasetConfig
from jaxtrain.data.packing.tree import Tree
from jaxtrain.data.pipeline import eval_batches, open_source, plan_steps
from jaxtrain.data.preview import describe_trees
from jaxtrain.data.sequences import Sequences
from jaxtrain.errors import UserError
from jaxtrain.methods.trees.config import TreeTask
from jaxtrain.methods.trees.data import Trees

TREES = DatasetConfig(
    path="builtin:caterpillar",
    options={"num_rows": 7, "think_len": [2, 9], "response_len": [1, 8], "vocab_size": 90},
)
STEP = {"seed": 5, "rows_per_microstep": 2, "microsteps": 1}


def make_data(*datasets, **changes):
    return DataConfig(datasets=list(datasets), **{"sequence_len": 64, **changes})


def read(source, count):
    return [batch for (batch,) in islice(source, count)]


def test_the_builtin_data_become_batches(tokenizer):
    dataset = DatasetConfig(path="builtin:calculator", options={"num_rows": 30})
    data = make_data(dataset, sequence_len=512)
    steps = plan_steps(data, Sequences(data, tokenizer), **STEP)[0]
    source = open_source(data, Sequences(data, tokenizer), **STEP, num_epochs=1)
    batches = read(source, 100)
    assert len(batches) == steps
    for batch in batches:
        check_batch(batch)
        assert batch.tokens.shape == (1, 2, 512)
    assert source.counters()["rows_read"] == 30
    held_out = list(eval_batches(dataset, data, Sequences(data, tokenizer), 2))
    assert sum(np.count_nonzero(b.weights["nll"]) for b in held_out) == sum(
        np.count_nonzero(b.weights["nll"]) for b in batches
    )


@pytest.mark.parametrize("mode", ["tree", "per_branch", "grouped", "current_rl", "flat"])
@pytest.mark.parametrize("packing", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_steps_of_units_resume_and_count(tokenizer, mode, packing):
    task = TreeTask(mode=mode, units_per_step=3)
    data = make_data(TREES, packing=packing, length_buckets=[16, 32, 48])
    source = open_source(data, Trees(task, data, tokenizer), **STEP)
    states, expected = [], []
    for _ in range(6):
        states.append(json.loads(json.dumps(source.state())))
        expected += next(source)
        check_batch(expected[-1])
        assert expected[-1].tokens.shape[-1] in source.lengths
    for cut, state in enumerate(states):
        resumed = open_source(data, Trees(task, data, tokenizer), **STEP)
        resumed.restore(state)
        for first, right in zip(read(resumed, 6 - cut), expected[cut:], strict=True):
            np.testing.assert_array_equal(first.tokens, right.tokens)
            np.testing.assert_array_equal(first.weights["nll"], right.weights["nll"])
        resumed.close()
    finite = open_source(data, Trees(task, data, tokenizer), **STEP, num_epochs=2)
    steps = plan_steps(data, Trees(task, data, tokenizer), **STEP, num_epochs=2)[0]
    assert len(read(finite, 1000)) == steps


def test_a_length_bucket_above_a_row_is_named(tokenizer, capsys):
    data = make_data(TREES, length_buckets=[32, 65])
    open_source(data, Trees(TreeTask(), data, tokenizer), **STEP).close()
    assert "data.length_buckets 65 is above 64" in capsys.readouterr().err
    longer = TreeTask(max_packed_tokens=128)
    open_source(data, Trees(longer, data, tokenizer), **STEP).close()


def test_grouped_steps_hold_the_same_trees_with_the_same_total_weight(tokenizer):
    data = make_data(TREES, sequence_len=128)
    steps = {}
    for mode in ("tree", "grouped"):
        task = TreeTask(mode=mode, units_per_step=2)
        steps[mode] = read(open_source(data, Trees(task, data, tokenizer), **STEP), 5)
    for tree, grouped in zip(steps["tree"], steps["grouped"], strict=True):
        # float32 weights, rounded once each
        total = tree.weights["nll"].sum(dtype=float)
        np.testing.assert_allclose(grouped.weights["nll"].sum(dtype=float), total, rtol=1e-6)
        by_token = [
            np.bincount(b.tokens.ravel(), b.weights["nll"].ravel(), 90) for b in (tree, grouped)
        ]
        np.testing.assert_allclose(*by_token, rtol=1e-5, atol=1e-6)
        assert (grouped.owner >= 0).sum() > (tree.owner >= 0).sum()


def test_normalization_by_tree_gives_each_tree_one_vote(tokenizer):
    task = TreeTask(normalize="tree", units_per_step=4)
    for batch in read(
        open_source(make_data(TREES), Trees(task, make_data(TREES), tokenizer), **STEP), 3
    ):
        np.testing.assert_allclose(batch.weights["nll"].sum(dtype=float), 4, rtol=1e-5)


def test_trees_are_packed_up_to_max_packed_tokens(tokenizer):
    task = TreeTask(max_packed_tokens=100)
    source = open_source(make_data(TREES), Trees(task, make_data(TREES), tokenizer), **STEP)
    (batch,) = next(source)
    check_batch(batch)
    assert batch.tokens.shape == (1, 2, 100)
    assert batch.positions.max() < 64
    held_out = list(eval_batches(TREES, make_data(), Trees(task, make_data(), tokenizer), 2))
    assert {b.tokens.shape for b in held_out} == {(1, 2, 100)}


def test_evaluation_is_on_whole_trees_whatever_the_mode(tokenizer):
    def evaluate(mode):
        return list(
            eval_batches(TREES, make_data(), Trees(TreeTask(mode=mode), make_data(), tokenizer), 2)
        )

    for first, right in zip(evaluate("tree"), evaluate("per_branch"), strict=True):
        np.testing.assert_array_equal(first.tokens, right.tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_row": 3}, r"unknown options \['num_row'\]; allowed: .*num_rows"),
        ({"user_len": [4, 2]}, r"option user_len \[4, 2\]"),
    ],
)
def test_wrong_options_of_the_generator_are_named(tokenizer, options, message):
    dataset = DatasetConfig(path="builtin:caterpillar", options=options)
    with pytest.raises(UserError, match=message):
        Trees(TreeTask(), make_data(dataset), tokenizer).open(dataset)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "does not exist"), ("{", "not JSON"), ("{}", "a list of tool")]
)
def test_wrong_tools_files_are_named(tokenizer, tmp_path, content, message):
    path = tmp_path / "tools.json"
    if content is not None:
        path.write_text(content)
    dataset = TREES.model_copy(update={"tools": str(path)})
    with pytest.raises(UserError, match=message):
        Trees(TreeTask(), make_data(dataset), tokenizer).open(dataset)


def test_group_by_an_unknown_column_names_those_there_are(tokenizer):
    dataset = DatasetConfig(path="builtin:calculator", options={"num_rows": 3})
    with pytest.raises(UserError, match="task.group_by 'task' is no column .* messages"):
        Trees(TreeTask(group_by="task"), make_data(dataset), tokenizer).open(dataset)


def test_calculator_conversations_branch_where_the_agent_thinks(tokenizer):
    dataset = DatasetConfig(path="builtin:calculator", options={"num_rows": 20})
    for rendering in ("template", "chatml"):
        task = TreeTask(rendering=rendering)
        part = Trees(task, make_data(dataset, sequence_len=512), tokenizer).open(dataset)
        for index in range(20):
            tree, *notes = part.tokenize(part.rows[index], "")
            assert {note.reason for note in notes} == {"column 'answers'", "column 'problems'"}
            thoughts = sum(
                bool(message.get("reasoning_content")) for message in part.rows[index]["messages"]
            )
            assert isinstance(tree, Tree) and tree.num_branches == thoughts + 1


def shared_data():
    default = Path(__file__).parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("JAXTRAIN_TEST_DATA", default))
    if not (folder / "tau_airline_trajectories.jsonl").is_file():
        pytest.skip(f"no trajectories in {folder}; set JAXTRAIN_TEST_DATA")
    return folder


@pytest.mark.parametrize("rendering", ["template", "chatml"])
def test_trials_of_a_task_share_their_beginning(tokenizer, rendering):
    folder = shared_data()
    dataset = DatasetConfig(
        path=str(folder / "tau_airline_trajectories.jsonl"),
        tools=str(folder / "tau_airline_tools.json"),
        max_rows=12,
    )
    data = make_data(dataset, sequence_len=60_000)
    task = TreeTask(rendering=rendering, max_packed_tokens=120_000)
    part = Trees(task, data, tokenizer).open(dataset)
    chains = [part.tokenize(part.rows[i], "")[0] for i in range(4)]
    assert [tree.num_branches for tree in chains] == [1] * 4
    grouped = task.model_copy(update={"group_by": "task_id"})
    part = Trees(grouped, data, tokenizer).open(dataset)
    trial_rows = part.rows[0]["group"]
    assert [row["trial"] for row in trial_rows] == [0, 1]
    tree, *notes = part.tokenize(part.rows[0], "")
    assert "column 'task_id'" not in {note.reason for note in notes}  # rows are grouped by it
    assert tree.num_branches == 2 and len(tree.nodes[0].tokens) > 1000  # the policy is shared
    assert sum(tree.branch_lengths()) - tree.num_tokens == len(tree.nodes[0].tokens)


def test_a_probe_says_how_the_data_branch_or_why_they_do_not(tokenizer):
    actual = Trees(TreeTask(mode="grouped"), make_data(), tokenizer).probe(TREES)
    assert str(actual) == (
        "builtin:caterpillar: 7 rows, the first 28 trees have 1.0 branches on average"
    )
    assert "have 4.0 branches" in str(Trees(TreeTask(), make_data(), tokenizer).probe(TREES))
    dataset = DatasetConfig(path="builtin:calculator", options={"num_rows": 30})
    assert "format chat" in str(Sequences(make_data(sequence_len=512), tokenizer).probe(dataset))
    with pytest.raises(
        UserError, match="none of the rows looked at gives a tree:\n  16 x too long"
    ):
        Trees(TreeTask(), make_data(sequence_len=16), tokenizer).probe(dataset)


def test_preprocess_shows_outlines_workload_and_drops(tokenizer):
    dataset = DatasetConfig(path="builtin:calculator", options={"num_rows": 30})
    part = Trees(TreeTask(), make_data(sequence_len=120), tokenizer).open(dataset)
    text = describe_trees(part, tokenizer, num_samples=2)
    assert text.count("├─ think") >= 2 and "<think>" in text
    assert "30 rows" in text and "pair ratio" in text and "dropped: too long: " in text
