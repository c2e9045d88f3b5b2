import json
import pickle

import pytest

from jaxtrain.data.sources.calculator import (
    HELD_OUT_SHARE,
    LARGEST_RESULT,
    SPLITS,
    CalculatorProblem,
    CalculatorRows,
)
from jaxtrain.environments.calculator import answer_tool_call, check_answer, evaluate
from jaxtrain.errors import UserError


def statement(expression: str) -> tuple:
    """Operator and operands, in either order where the order does not matter."""
    a, op, b = expression.split()
    return (op, *sorted([int(a), int(b)])) if op in "+*" else (op, int(a), int(b))


def test_row_depends_on_seed_split_and_index_only():
    short, long = CalculatorRows(5, seed=3), CalculatorRows(50, seed=3)
    assert [short[i] for i in range(5)] == [long[i] for i in range(5)]
    assert pickle.loads(pickle.dumps(long))[7] == long[7]
    assert CalculatorRows(50, seed=4)[7] != long[7]
    assert CalculatorRows(50, seed=3, split="test")[7] != long[7]


def test_first_row_is_what_it_always_was():
    row = CalculatorRows(1)[0]
    assert row["messages"][1] == {"role": "user", "content": "How much is 74 + 15?"}
    assert row["problems"] == ["74 + 15"] and row["answers"] == ["89"]


def test_no_statement_is_in_both_splits():
    seen = {
        split: {
            statement(expression)
            for seed in range(3)
            for row in CalculatorRows(2000, seed=seed, split=split, max_value=30)
            for expression in row["problems"]
        }
        for split in SPLITS
    }
    assert len(seen["train"]) > 1000 and len(seen["test"]) > 100
    assert not seen["train"] & seen["test"]


@pytest.mark.parametrize("op", ["+", "*"])
def test_both_orders_of_a_statement_share_a_split(op):
    assert all(
        CalculatorProblem(a, op, b).split == CalculatorProblem(b, op, a).split
        for a in range(40)
        for b in range(40)
    )


def test_held_out_share():
    problems = [CalculatorProblem(a, "+", b) for a in range(100) for b in range(a, 100)]
    share = sum(problem.split == "test" for problem in problems) / len(problems)
    # 5050 statements, each held out with chance 1/10: five standard deviations are 0.021.
    assert abs(share - 1 / HELD_OUT_SHARE) < 0.021


def test_conversations_are_consistent():
    for row in CalculatorRows(300, split="test"):
        messages, answers = row["messages"], row["answers"]
        assert [m["role"] for m in messages] == ["system"] + [
            "user",
            "assistant",
            "tool",
            "assistant",
        ] * len(answers)
        for turn, (answer, expression) in enumerate(zip(answers, row["problems"], strict=True)):
            user, call, tool, final = messages[1 + 4 * turn : 5 + 4 * turn]
            function = call["tool_calls"][0]["function"]
            assert json.loads(function["arguments"]) == {"expression": expression}
            assert tool["content"] == answer and 0 <= int(answer) <= LARGEST_RESULT
            text = f'<tool_call>{{"name": "calculator", "arguments": {function["arguments"]}}}'
            reply = answer_tool_call(text + "</tool_call>")
            assert reply is not None and reply["content"] == answer
            assert check_answer(final["content"], answer)
            assert expression.split()[2] in user["content"]
            if turn:
                assert expression.split()[0] == answers[turn - 1]


def test_some_conversations_go_on():
    turns = [len(row["answers"]) for row in CalculatorRows(500)]
    assert set(turns) == {1, 2, 3}
    assert {len(row["answers"]) for row in CalculatorRows(50, follow_up=0)} == {1}


def test_max_value_bounds_what_users_name():
    for row in CalculatorRows(200, max_value=12, follow_up=0):
        a, _, b = row["problems"][0].split()
        assert int(a) <= 12 and int(b) <= 12


@pytest.mark.parametrize(
    "options, message",
    [
        ({"split": "validation"}, "train, test"),
        ({"num_rows": 0}, "num_rows"),
        ({"max_value": 5000}, "max_value"),
        ({"follow_up": "often"}, "follow_up"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(UserError, match=message):
        CalculatorRows(**{"num_rows": 10, **options})


def test_index_out_of_range():
    with pytest.raises(IndexError):
        CalculatorRows(3)[3]


def test_all_kinds_of_problems():
    rows = CalculatorRows(num_rows=400, all_kinds=True, follow_up=0.0, split="test")
    problems = [row["problems"][0].split() for row in rows]
    assert {op for _, op, _ in problems} == set("+-*/")
    operands = [(int(a), op, int(b)) for a, op, b in problems]
    assert all(1 <= a <= 99 and 1 <= b <= 99 for a, _, b in operands)
    assert any(op == "*" and b > 9 for _, op, b in operands)
    assert any(op == "-" and a < b for a, op, b in operands)
    for row in rows:
        assert evaluate(row["problems"][0]) == int(row["answers"][0])
    with pytest.raises(UserError, match="all_kinds is 1, not true or false"):
        CalculatorRows(all_kinds=1)
