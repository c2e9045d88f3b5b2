"""The solver and the verifier, by scripts."""

import asyncio
import re
from pathlib import Path

import pytest

from jaxtrain.config import EnvConfig, SamplingConfig
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.data.sources.calculator import CalculatorRows
from jaxtrain.environments.guarded import open_guarded
from jaxtrain.environments.scripted import ScriptedEngine

CALL = '<tool_call>{{"name": "calculator", "arguments": {{"expression": "{}"}}}}</tool_call>'
ROW = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "answers": ["5"]}


@pytest.fixture(scope="module")
def env():
    kind = "jaxtrain.environments.solver_verifier:solve_and_verify"
    return open_guarded(EnvConfig(kind=kind), load_tokenizer("builtin"))


def play(env, solver, verifier, row=ROW):
    tokenizer = load_tokenizer("builtin")
    engine = ScriptedEngine(tokenizer, solver, {"verifier": ScriptedEngine(tokenizer, verifier)})
    return asyncio.run(env.run(row, engine, SamplingConfig(max_new_tokens=400), 0))


@pytest.mark.parametrize(
    ("claim", "verdict", "rewards"),
    [
        ("5", "It is right.", (1.0, 1.0)),
        ("5", "It is wrong.", (1.0, 0.0)),
        ("6", "It is wrong.", (0.0, 1.0)),
        ("6", "It is right, not wrong.", (0.0, 0.0)),
    ],
)
def test_each_is_rewarded_for_its_own(env, claim, verdict, rewards):
    solver = [CALL.format("2 + 3"), f"The answer is {claim}."]
    first = play(env, solver, [CALL.format("2 + 3"), verdict])
    (second,) = first.others
    assert (first.policy, second.policy) == ("", "verifier")
    assert (first.all_rewards, second.all_rewards) == (
        {"solved": rewards[0]},
        {"verified": rewards[1]},
    )
    right, agrees = rewards
    assert second.metrics["trusted"] == (right * agrees, right)
    assert second.metrics["caught"] == ((1 - right) * agrees, 1 - right)
    requests = f"What is 2 + 3? Somebody says {claim}. Right or wrong?"
    assert second.prompt[-1]["content"] == requests
    drawn = load_tokenizer("builtin").decode(second.drawn_tokens)
    assert verdict in drawn and "Somebody" not in drawn


def test_the_duet_of_the_page(tmp_path):
    page = (Path(__file__).parents[2] / "docs/policies.md").read_text()
    (code,) = re.findall(r"```python\n(# duet.py.*?)```", page, re.DOTALL)
    (tmp_path / "duet.py").write_text(code)
    env = open_guarded(EnvConfig(kind=f"{tmp_path}/duet.py:duet"), load_tokenizer("builtin"))
    for answer, verdict, rewards in (
        ("5.", "Right.", [{"solved": 1.0}, {"agrees": 1.0}]),
        ("6.", "Right.", [{"solved": 0.0}, {"agrees": 0.0}]),
    ):
        first = play(env, [answer], [verdict], {"question": "What is 2 + 3?", "answer": "5"})
        assert [entry.all_rewards for entry in (first, *first.others)] == rewards


def test_without_a_number_nothing_is_verified(env):
    assert play(env, ["I cannot."], []).others == []


def test_rows_that_check_claims():
    rows = CalculatorRows(num_rows=200, follow_up=0.0, claims=0.5)
    actual = {"right": 0, "wrong": 0}
    for row, plain in zip(rows, CalculatorRows(num_rows=200), strict=True):
        (answer,), question = row["answers"], row["messages"][1]["content"]
        if "Somebody" not in question:
            continue
        actual[answer] += 1
        claim = int(question.split("says ")[1].split(".")[0])
        assert (claim == eval(row["problems"][0])) == (answer == "right")
        assert row["messages"][-1]["content"] == f"It is {answer}."
        assert "Somebody" not in plain["messages"][1]["content"]
    assert min(actual.values()) > 30
