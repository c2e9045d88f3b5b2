import json

import pytest

from jaxtrain.data.calculator import CalculatorRows
from jaxtrain.data.messages import read_messages
from jaxtrain.data.template import load_tokenizer
from jaxtrain.envs import calculator
from jaxtrain.envs.calculator import CalculatorError, accuracy, evaluate, solve_problems
from jaxtrain.errors import UserError


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
    with pytest.raises(CalculatorError):
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


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("builtin")


class Player:
    """A sampler that plays the rows' own conversations, found by their first question."""

    def __init__(self, tokenizer, rows, change=lambda turn, text: text):
        self.tokenizer, self.change, self.sizes = tokenizer, change, []
        self.scripts = {}
        for row in rows:
            messages = read_messages(row["messages"], {}, {})
            text = tokenizer.apply_chat_template(messages, tools=row["tools"], tokenize=False)
            head = "<|im_start|>assistant\n"
            turns = [part.partition("<|im_end|>")[0] for part in text.split(head)[1:]]
            self.scripts[messages[1]["content"]] = turns

    def __call__(self, prompts):
        self.sizes.append(len(prompts))
        return [self.play(self.tokenizer.decode(prompt)) for prompt in prompts]

    def play(self, text):
        assert text.endswith("<|im_start|>assistant\n")
        question = text.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        turn = text.count("<|im_start|>assistant\n") - 1
        said = self.change(turn, self.scripts[question][turn] + "<|im_end|>")
        return self.tokenizer(said)["input_ids"]


def unique_rows(count, **options):
    rows = {row["messages"][1]["content"]: row for row in CalculatorRows(count, **options)}
    return list(rows.values())


def test_right_player_solves_all(tokenizer):
    rows = unique_rows(40, split="test")
    player = Player(tokenizer, rows)
    episodes = solve_problems(player, tokenizer, rows)
    assert accuracy(episodes) == 1.0 and {e.stop for e in episodes} == {"solved"}
    # Side by side: a round for each turn of the longest conversation, over those still open.
    assert player.sizes[0] == len(rows) and len(player.sizes) == max(e.num_turns for e in episodes)
    for episode, row in zip(episodes, rows, strict=True):
        messages = read_messages(row["messages"], {}, {})
        text = tokenizer.apply_chat_template(messages, tools=row["tools"], tokenize=False)
        # The world's part and the model's make the very tokens that training sees.
        assert tokenizer(text)["input_ids"][:-1] == episode.tokens
        assert len(episode.tokens) == len(episode.generated)


def test_what_the_model_wrote_is_kept_token_for_token(tokenizer):
    """A model that spells its call in single bytes reads single bytes back, not merged tokens."""
    row = CalculatorRows(1, follow_up=0)[0]
    spelled = []
    for character in f"{call(row['problems'][0])}":
        spelled += tokenizer(character)["input_ids"]
    end = tokenizer.eos_token_id
    seen = []

    def generate(prompts):
        seen.append(prompts[0])
        final = f"The answer is {row['answers'][0]}."
        return [[*spelled, end] if len(seen) == 1 else [*tokenizer(final)["input_ids"], end]]

    [episode] = solve_problems(generate, tokenizer, [row])
    assert episode.stop == "solved"
    start = len(seen[0])
    assert seen[1][start : start + len(spelled) + 1] == [*spelled, end]
    written = [t for t, mine in zip(episode.tokens, episode.generated, strict=True) if mine]
    assert written[: len(spelled) + 1] == [*spelled, end]
    assert f"<tool_response>{row['answers'][0]}</tool_response>" in episode.transcript


@pytest.mark.parametrize(
    "change, stop",
    [
        (lambda turn, text: text.replace("answer is ", "answer is 9"), "wrong answer"),
        (lambda turn, text: text.replace("<|im_end|>", ""), "unfinished turn"),
        (lambda turn, text: "<tool_call>{}</tool_call><|im_end|>", "too many turns"),
        (lambda turn, text: "", "unfinished turn"),
    ],
)
def test_wrong_players(tokenizer, change, stop):
    rows = unique_rows(5)

    def generate(prompts):
        if stop == "too many turns":
            return [tokenizer(change(0, ""))["input_ids"] for _ in prompts]
        return Player(tokenizer, rows, change)(prompts)

    episodes = solve_problems(generate, tokenizer, rows, max_turns=4)
    assert {e.stop for e in episodes} == {stop} and accuracy(episodes) == 0.0


def test_partly_right(tokenizer):
    rows = [row for row in unique_rows(60) if len(row["answers"]) == 2][:3]
    player = Player(tokenizer, rows, lambda turn, text: text if turn < 3 else "0<|im_end|>")
    episodes = solve_problems(player, tokenizer, rows)
    assert [e.share_right for e in episodes] == [0.5] * 3 and accuracy(episodes) == 0.5


def test_accuracy_of_nothing():
    assert accuracy([]) == 0.0


def test_template_that_rewrites_history_is_refused(tokenizer):
    other = load_tokenizer("builtin")
    other.chat_template = (
        "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rows = unique_rows(3)
    with pytest.raises(UserError, match="rewrites"):
        solve_problems(
            lambda ps: [tokenizer(call("1 + 1") + "<|im_end|>")["input_ids"] for _ in ps],
            other,
            rows,
        )


def test_turn_without_end_is_refused():
    other = load_tokenizer("builtin")
    other.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(UserError, match="end-of-turn"):
        solve_problems(lambda ps: [[1] for _ in ps], other, unique_rows(1))
