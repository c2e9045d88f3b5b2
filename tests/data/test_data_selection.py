"""Selection, workload statistics and the outline of a tree."""

from math import inf

import pytest

from jaxtrain.data.packing.tree import build_tree
from jaxtrain.data.packing.workload import describe_tree, describe_workload, measure_tree
from jaxtrain.data.preview import describe_trees, probe_trees
from jaxtrain.data.sources.readers import MixturePart
from jaxtrain.errors import UserError
from jaxtrain.methods.trees.selection import estimate_tokens, score_row, select_rows


def row(reasoning, plain=0, usage=(10, 5), **columns):
    messages = [{"role": "user", "content": "Q"}]
    for index in range(reasoning + plain):
        spoken = {"role": "assistant", "content": "A"}
        if index < reasoning:
            spoken["reasoning_content"] = " thought "
        messages += [spoken, {"role": "user", "content": "more"}]
    final = {"final_input_tokens": usage[0], "final_output_tokens": usage[1]}
    return {"prompt": messages[:1], "completion": messages[1:], "token_usage": final, **columns}


def test_score_of_the_specification():
    score = score_row(row(1, num_turns=3), {}, {})
    assert score.estimate == 15 and score.branching_score == 6
    assert (score.assistant_turns, score.reasoning_turns, score.usable) == (1, 1, True)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"rlm_final_input_tokens": 7, "rlm_final_output_tokens": 8}, 15),
        ({"token_usage": {"final_input_tokens": 1}, "rlm_final_output_tokens": 2}, 3),
        ({"token_usage": {"final_input_tokens": 1, "final_output_tokens": 0}}, inf),
        ({"token_usage": None}, inf),
    ],
)
def test_token_estimates(columns, expected):
    assert estimate_tokens(columns) == expected


ROWS = [row(1), row(3, usage=(90, 20)), row(0, 5), row(3), {"prompt": 3}, row(2, 1)]


def kept(**options):
    chosen = select_rows(ROWS, **options)
    return [ROWS.index(chosen[i]) for i in range(len(chosen))]


def test_branching_score_takes_the_most_branched_first_and_ties_in_order():
    assert kept(metric="branching_score") == [1, 3, 5, 0]
    assert kept(metric="branching_score", max_estimate=50, max_examples=2) == [3, 5]
    assert kept(metric="none", max_estimate=15) == [0, 2, 3, 5]
    assert kept(metric="none", max_examples=2) == [0, 1]


def test_num_turns_takes_the_longest_first():
    rows = [row(1, num_turns=n, example_id=i) for n, i in [(1, 5), (4, 6), (4, 9), (None, 7)]]
    chosen = select_rows(rows, metric="num_turns")
    assert [chosen[i]["example_id"] for i in range(4)] == [9, 6, 5, 7]


def test_a_selection_of_nothing_is_an_error():
    with pytest.raises(UserError, match="x.jsonl: the selection leaves none of 6 rows"):
        select_rows(ROWS, metric="none", max_estimate=3, name="x.jsonl")


BAD = ["abc", "", [], {}, None, True, float("nan"), float("inf"), 1e999, "1e999", "7", -3, 2**80]


@pytest.mark.parametrize("value", BAD)
def test_odd_numbers_never_raise_and_every_row_is_accounted_for(value):
    odd = row(1, num_turns=value, example_id=value, usage=(value, value))
    rows = [odd, row(2, num_turns=2), {"prompt": 3, "num_turns": value}]
    for metric in ("none", "num_turns", "branching_score"):
        for limits in ({}, {"max_estimate": 100}, {"max_examples": 1}):
            chosen = select_rows(rows, metric=metric, **limits)
            assert len(chosen) + sum(chosen.left_out.values()) == len(rows)
    assert score_row(row(1, num_turns="7"), {}, {}).num_turns == 7


def test_what_a_selection_leaves_out_is_told():
    chosen = select_rows(ROWS, metric="branching_score", max_estimate=50, max_examples=2)
    assert chosen.left_out == {
        "with too many tokens": 1,
        "without reasoning": 1,
        "without token_usage": 1,
        "beyond task.max_examples": 1,
    }
    with pytest.raises(UserError, match="none of 1 rows .1 that cannot be read."):
        select_rows([{"prompt": 3}], metric="branching_score")
    part = MixturePart("x", chosen, lambda row, origin: [small_tree()])
    assert "left out 1 rows with too many tokens, 1 rows without" in str(probe_trees(part))
    assert "left out by the selection: without reasoning: 1" in describe_trees(part, None, 0)


@pytest.mark.slow
def test_scoring_in_processes_gives_the_same_rows():
    rows = ROWS * 700
    alone = select_rows(rows, metric="branching_score")
    shared = select_rows(rows, metric="branching_score", workers=2)
    assert [alone[i] for i in range(50)] == [shared[i] for i in range(50)]


def small_tree():
    return build_tree(
        [
            (-1, [1, 2], [False, False], "context"),
            (0, [3, 4], [True, True], "think"),
            (0, [5], [True], "response"),
            (2, [6], [False], "context"),
            (3, [7], [True], "response"),
        ],
        origin="x row 1",
    )


def test_workload_counts_tokens_and_pairs():
    workload = measure_tree(small_tree())
    assert (workload.branches, workload.packed_tokens, workload.path_tokens) == (2, 7, 5)
    assert workload.token_ratio == (4 + 5) / 7
    pairs = (1 + 2) + (3 + 4) + 3 + 4 + 5  # each token sees itself and what is above it
    assert workload.pair_ratio == (4 * 5 / 2 + 5 * 6 / 2) / pairs
    table = describe_workload([small_tree(), small_tree()])
    assert table.splitlines()[1].split() == ["branches", "2.00", "2.00"]


def test_the_outline_shows_roles_sizes_and_what_trains():
    assert describe_tree(small_tree()).splitlines() == [
        "K 2  packed 7  longest path 5  token ratio 1.29  pair ratio 1.14  x row 1",
        "context 2",
        "├─ think 2, 2 trained x 1/2",
        "response 1, 1 trained x 1/2",
        "context 1",
        "response 1, 1 trained x 1/2",
    ]
    with_text = describe_tree(small_tree(), decode=lambda tokens: f"<{tokens}>")
    assert with_text.splitlines()[2].endswith("'<[3, 4]>'")


def test_the_outline_of_a_fork_hangs_both_sides_off_it():
    parts = [(-1, [1], [0], "a"), (0, [2], [0], "b"), (1, [3], [1], "c"), (0, [4], [1], "d")]
    lines = describe_tree(build_tree([*parts, (3, [5], [1], "e")])).splitlines()[1:]
    assert [line.split(" 1")[0] for line in lines] == ["a", "├─ b", "│  c", "└─ d", "   e"]
