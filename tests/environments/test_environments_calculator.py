import asyncio
import json

import pytest

from jaxtrain.config import SamplingConfig
from jaxtrain.data.chat.messages import read_messages
from jaxtrain.data.sources.calculator import CalculatorRows
from jaxtrain.environments import calculator
from jaxtrain.environments.calculator import CalculatorEnv, evaluate
from jaxtrain.environments.tool_calls import ToolCallError
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Completion
from jaxtrain.generation.episode_metrics import average_env_metrics


@pytest.mark.parametrize(
    "expression, value",
    [
        ("12 + 34", 46),
        ("7*(8-3)", 35),
        ("-5 + +2", -3),
        ("9 / 4", 2.25),
        ("9 // 4", 2),
        ("9 % 4", 1),
        (" 3 ", 3),
        ("1.5*2", 3.0),
    ],
)
def test_evaluate(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')",
        "a + 1",
        "2 ** 9",
        "(1).real",
        "[1]",
        "1 if 2 else 3",
        "'a' * 3",
        "True + 1",
        "1 +",
        "",
        "1/0",
        "9999999999999999 * 9",
        "1e999",
        "1e999 - 1e999",
        "(" * 80 + "1" + ")" * 80,
        "1 + " * 30 + "1",
        "\0",
        "1j",
    ],
)
def test_evaluate_refuses(expression):
    with pytest.raises(ToolCallError):
        evaluate(expression)


@pytest.mark.parametrize(
    "value, text", [(46, "46"), (3.0, "3"), (2.25, "2.25"), (-7, "-7"), (1 / 3, "0.333333")]
)
def test_format_number(value, text):
    assert calculator.format_number(value) == text


def call(expression, name="calculator"):
    body = {"name": name, "arguments": {"expression": expression}}
    return f"<tool_call>{json.dumps(body)}</tool_call>"


@pytest.mark.parametrize(
    "text, content",
    [
        ("<think>I need 1 + 2.</think>\n" + call("1 + 2"), "3"),
        ("<tool_call>\n" + call("1 + 2")[11:-12] + "\n</tool_call>", "3"),
        (call("1 + x"), "error: not an arithmetic expression"),
        (call("1/0"), "error: division by zero"),
        (call("1", name="shell"), "error: no tool named shell"),
        ("<tool_call>{oops}</tool_call>", "error: tool call is not valid JSON"),
        ("<tool_call>[1]</tool_call>", "error: tool call needs name and arguments"),
        ('<tool_call>{"name": "calculator"', "error: unfinished tool call"),
        (
            '<tool_call>{"name": "calculator", "arguments": {}}</tool_call>',
            "error: argument expression is missing",
        ),
    ],
)
def test_answer_tool_call(text, content):
    assert calculator.answer_tool_call(text) == {
        "role": "tool",
        "name": "calculator",
        "content": content,
    }


def test_no_tool_call():
    assert calculator.answer_tool_call("The answer is 3.") is None
    assert calculator.answer_tool_call(f"<think>maybe {call('1')}</think>No.") is None


@pytest.mark.parametrize(
    "text, right",
    [
        ("The answer is 46.", True),
        ("12 + 34 = 46", True),
        ("46.0", True),
        ("<think>46</think>The answer is 45.", False),
        ("The answer is 46 or 47.", False),
        ("No idea.", False),
        ("-46", False),
        ("<think>46", False),
    ],
)
def test_check_answer(text, right):
    assert calculator.check_answer(text, "46") is right


class Player:
    """An engine that plays the rows' own conversations, found by their first question."""

    version = 0

    def __init__(self, tokenizer, rows, change=lambda turn, text: text):
        self.tokenizer, self.change = tokenizer, change
        self.scripts = {}
        for row in rows:
            head = "<|im_start|>assistant\n"
            turns = [part.partition("<|im_end|>")[0] for part in render(tokenizer, row).split(head)]
            self.scripts[row["messages"][1]["content"]] = turns[1:]

    async def generate(self, prompt, sampling, stop_ids=(), index=0):
        text = self.tokenizer.decode(prompt)
        assert text.endswith("<|im_start|>assistant\n")
        question = text.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        turn = text.count("<|im_start|>assistant\n") - 1
        output = self.change(turn, self.scripts[question][turn] + "<|im_end|>")
        tokens = self.tokenizer(output)["input_ids"]
        return Completion(tokens, [-0.5] * len(tokens), "stop", [0] * len(tokens))


def render(tokenizer, row):
    messages = read_messages(row["messages"], {}, {})
    return tokenizer.apply_chat_template(messages, tools=row["tools"], tokenize=False)


def unique_rows(count, **options):
    rows = {row["messages"][1]["content"]: row for row in CalculatorRows(count, **options)}
    return list(rows.values())


def play(tokenizer, engine, rows, **options):
    env = CalculatorEnv(tokenizer, **options)
    return [asyncio.run(env.run(row, engine, SamplingConfig(), 0)) for row in rows]


def test_right_player_solves_all(tokenizer):
    rows = unique_rows(40, split="test")
    episodes = play(tokenizer, Player(tokenizer, rows), rows)
    assert average_env_metrics(episodes)["env/accuracy"] == 1.0
    for episode, row in zip(episodes, rows, strict=True):
        assert episode.rewards == {"solved": 1.0}
        assert episode.metrics["turns"] == 2 * len(row["answers"])
        # The world's part and the model's make the very tokens that training sees.
        assert tokenizer(render(tokenizer, row))["input_ids"][:-1] == episode.tokens


@pytest.mark.parametrize(
    "change, turns",
    [
        (lambda turn, text: text.replace("answer is ", "answer is 9"), 2),
        (lambda turn, text: text.replace("<|im_end|>", ""), 1),
        (lambda turn, text: "<tool_call>{}</tool_call><|im_end|>", 4),
        (lambda turn, text: "", 1),
    ],
    ids=["wrong answer", "unfinished turn", "too many turns", "nothing said"],
)
def test_wrong_players(tokenizer, change, turns):
    rows = unique_rows(5, follow_up=0)
    player = Player(tokenizer, rows, change)
    player.scripts = {question: turns * 2 for question, turns in player.scripts.items()}
    for episode in play(tokenizer, player, rows, max_turns=4):
        assert episode.rewards == {"solved": 0.0} and episode.metrics["accuracy"] == (0.0, 1.0)
        assert episode.metrics["turns"] == turns


def test_accuracy_counts_questions_and_the_reward_conversations(tokenizer):
    rows = unique_rows(60)
    two = [row for row in rows if len(row["answers"]) == 2][:3]
    three = next(row for row in rows if len(row["answers"]) == 3)
    entry = next(row for row in rows if len(row["answers"]) == 1)
    rows = [*two, three, entry]
    player = Player(tokenizer, rows, lambda turn, text: text if turn < 3 else "0<|im_end|>")
    episodes = play(tokenizer, player, rows)
    assert [e.rewards["solved"] for e in episodes] == [0.5, 0.5, 0.5, pytest.approx(1 / 3), 1.0]
    actual = average_env_metrics(episodes)
    assert actual["env/accuracy"] == 5 / 10 and actual["env/turns"] == (4 * 4 + 2) / 5
    assert average_env_metrics([]) == {}


def test_a_row_without_answers_is_played_and_not_judged(tokenizer):
    row = next(row for row in unique_rows(60) if len(row["answers"]) == 2)
    bare = {"messages": [m for m in row["messages"] if m["role"] == "user"]}
    requests = play(tokenizer, Player(tokenizer, [row]), [row])
    [episode] = play(tokenizer, Player(tokenizer, [row]), [bare])
    assert episode.tokens == requests[0].tokens, "the agent's own system message and tool"
    assert episode.rewards == {} and episode.metrics == {"turns": 4.0}
    with pytest.raises(UserError, match="1 answers to 2 questions"):
        play(tokenizer, Player(tokenizer, [row]), [{**row, "answers": ["3"]}])
    with pytest.raises(UserError, match="has only prompt"):
        play(tokenizer, Player(tokenizer, [row]), [{"prompt": "What is 1 + 1?"}])
