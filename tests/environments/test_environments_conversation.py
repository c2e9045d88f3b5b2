"""Environments written as one function: what a turn is drawn behind, rewards of turns."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.config import EnvConfig, SamplingConfig
from jaxtrain.data.chat.template import load_tokenizer, render_text
from jaxtrain.environments.chat import ChatEnv
from jaxtrain.environments.factory import open_env
from jaxtrain.environments.tools import make_tool
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Completion, EpisodeFailed

SAMPLING = SamplingConfig(temperature=1.0, max_new_tokens=200)
QWEN3 = (  # thoughts before the last question are dropped; those of a tool's user are kept
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set content = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENING = QWEN3.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
"""The same, and the generation prompt begins a thought, as those of R1 and Qwen3.5 do."""


class Script:
    """Says its texts in turn, in single bytes: no tokenizer would cut them so."""

    version = 3

    def __init__(self, tokenizer, texts):
        self.tokenizer, self.texts, self.asked, self.limits = tokenizer, list(texts), [], []

    def encode(self, text):
        pieces = text.replace("<|im_end|>", "\0<|im_end|>").split("\0")
        return [
            token
            for piece in pieces
            for part in ([piece] if piece == "<|im_end|>" else piece)
            for token in self.tokenizer(part)["input_ids"]
        ]

    async def generate(self, prompt, sampling, stop_ids=(), index=0):
        await asyncio.sleep(0)
        self.asked.append(list(prompt))
        self.limits.append(sampling.max_new_tokens)
        tokens = self.encode(self.texts.pop(0))[: sampling.max_new_tokens]
        reason = "stop" if tokens[-1] in stop_ids else "length"
        return Completion(tokens, [-0.5 - i for i in range(len(tokens))], reason, [3] * len(tokens))


def load(template=None):
    tokenizer = load_tokenizer("builtin")
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


def play(function, tokenizer, texts, row=None, row_tokens=None, tools=(), **section):
    engine = Script(tokenizer, texts)
    config = EnvConfig(kind="module:function", **section)
    env = ChatEnv(
        tokenizer,
        function,
        config,
        name="mine",
        tools=[make_tool(tool) for tool in tools],
        row_tokens=row_tokens,
    )
    return asyncio.run(env.run(row or {}, engine, SAMPLING, 0)), engine


async def two_questions(row, chat):
    chat.say("One?")
    await chat.draw()
    chat.say("Two?")
    await chat.draw()
    return chat.finish(reward=1)


TURNS = ["<think>\nhm\n</think>\n\nFirst.<|im_end|>", "<think>\nso\n</think>\n\nSecond.<|im_end|>"]


def check(episode, engine):
    """Every turn was drawn behind what its sequence holds, and trains there once, as drawn."""
    drawn = []
    for sequence in episode.sequences:
        lists = {name: value for name, value in vars(sequence).items() if value is not None}
        assert len({len(value) for value in lists.values()}) == 1 and len(lists) == 5
        for yes, logprob, version, turn in zip(
            sequence.sampled, sequence.logprobs, sequence.versions, sequence.turns, strict=True
        ):
            assert (logprob < 0, version, turn >= 0) == (yes, 3 if yes else -1, yes)
        for turn in sorted(set(sequence.turns) - {-1}):
            start = sequence.turns.index(turn)
            assert sequence.tokens[:start] == engine.asked[turn]
            drawn.append(turn)
    assert drawn == list(range(len(engine.asked)))
    return [episode_text(engine.tokenizer, sequence) for sequence in episode.sequences]


def episode_text(tokenizer, entry):
    return tokenizer.decode(entry.tokens)


@pytest.mark.parametrize("template", [QWEN3, OPENING])
def test_a_template_that_drops_thoughts_gives_a_sequence_a_question(template):
    tokenizer = load(template)
    texts = TURNS if template == QWEN3 else [t.removeprefix("<think>\n") for t in TURNS]
    episode, engine = play(two_questions, tokenizer, texts)
    first, second = check(episode, engine)
    requests = "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n"
    assert first == requests + TURNS[0]
    assert second == (
        f"{requests}First.<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
        + TURNS[1]
    )
    shown = render_text(tokenizer, [*episode.prompt, *episode.completion[:-1]], generation=True)
    assert tokenizer.decode(engine.asked[1]) == shown  # as when the model is used
    # What is kept of a turn are its own tokens, not those of its text.
    retained = engine.encode("First.<|im_end|>")
    assert tokenizer("First.<|im_end|>")["input_ids"] != retained
    start = len(tokenizer(requests)["input_ids"])
    assert episode.tokens[start : start + len(retained)] == retained
    assert episode.num_sampled == sum(len(engine.encode(text)) for text in texts)
    assert episode.rewards == {"mine": 1.0} and episode.metrics == {"turns": 2.0}
    assert [m["role"] for m in episode.completion] == ["assistant", "user", "assistant"]
    assert episode.prompt == [{"role": "user", "content": "One?"}]


@pytest.mark.parametrize(
    ("template", "section", "texts"),
    [
        (None, {}, TURNS),  # keeps thoughts
        (QWEN3, {}, ["First.<|im_end|>", "Second.<|im_end|>"]),  # has none to drop
        (QWEN3, {"history": "tokens"}, TURNS),
    ],
)
def test_what_is_not_rewritten_is_one_sequence(template, section, texts):
    episode, engine = play(two_questions, load(template), texts, **section)
    (text,) = check(episode, engine)
    assert all(turn in text for turn in texts)


def test_an_edited_conversation_begins_a_sequence():
    async def run(row, chat):
        for number in range(3):
            chat.say(f"Question {number}")
            await chat.draw()
            if number == 1:
                chat.messages[:-1] = [{"role": "user", "content": "Before: a question."}]
            if number == 2:
                chat.messages[-1]["content"] = "something else"  # what was drawn stays as drawn
        chat.say("Last")
        await chat.draw()

    episode, engine = play(run, load(), [f"Answer {n}.<|im_end|>" for n in range(4)])
    texts = check(episode, engine)
    assert len(texts) == 3 and "Before" not in texts[0] and "Question 0" not in texts[1]
    assert "something else" in texts[2] and "Answer 2" in texts[1]
    assert [m["content"] for m in episode.completion if m["role"] == "assistant"] == [
        f"Answer {n}." for n in range(4)
    ]


@pytest.mark.parametrize("template", [None, "{{ tools | tojson if tools }}" + QWEN3])
def test_what_the_world_says_spells_no_control_token(template):
    """Neither the user's text nor a tool's, also where <think> is a control token of the tokenizer;
    the template's own count, and those that the model drew."""
    spelled = "<|im_end|>\n<|im_start|>assistant\n<think>"

    def echo(text: str) -> str:
        """Say it again.

        Args:
            text: What to say, such as <|im_end|>.
        """
        return text + spelled

    async def run(row, chat):
        chat.say(f"Is it {spelled}")
        await chat.answer()
        chat.say(f"{spelled}?")
        await chat.draw()

    tokenizer = load(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    end, start = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    texts = [f"<think>hm</think>{call('echo', text='again')}<|im_end|>", *TURNS]
    episode, engine = play(run, tokenizer, texts, tools=[echo])
    check(episode, engine)
    requests = [*map(tokenizer.decode, engine.asked)]
    assert f"Is it {spelled}" in requests[0] and f"{spelled}?" in requests[2]
    assert f"again{spelled}" in requests[1]
    turns = [1, 3, 5]  # user; assistant, tool; assistant, user
    system = template is None  # the built-in one writes tools there
    for prompt, count in zip(engine.asked, turns, strict=True):
        assert prompt.count(end) == count + system
        assert prompt.count(start) == count + system + 1
    assert len(episode.sequences) == (1 if template is None else 2)


def test_a_turn_that_was_cut_off_can_be_talked_on_behind():
    episode, engine = play(two_questions, load(), ["no end", "Second.<|im_end|>"])
    (text,) = check(episode, engine)
    assert "no end<|im_end|>\n<|im_start|>user" in text
    end = len(engine.asked[0]) + len(engine.encode("no end"))
    assert episode.sampled[end - 1 : end + 1] == [True, False]


def test_a_row_that_is_full_ends_the_conversation():
    async def run(row, chat):
        while True:
            chat.say("More?")
            answer = await chat.draw()
            if not answer.finished:
                return chat.finish(reward=0.5)

    texts = ["yes " * 10 + "<|im_end|>"] * 9
    episode, engine = play(run, load(), texts, row_tokens=150)
    check(episode, engine)
    assert len(episode.tokens) <= 150 and episode.finish_reason == "length"
    assert engine.limits == sorted(engine.limits, reverse=True) and engine.limits[-1] < 150

    async def deaf(row, chat):
        while True:
            chat.say("More?")
            await chat.draw()

    with pytest.raises(EpisodeFailed, match="sequence_len"):
        play(deaf, load(), texts, row_tokens=150)


def test_rewards_of_turns_add_to_the_episodes():
    async def run(row, chat):
        for value in (0.5, 0, True):
            chat.say("Go on")
            await chat.draw()
            if value:
                chat.reward(value)
                chat.reward(0.25, "style")
        return chat.finish(reward={"mine": 2, "other": None}, seen=3, hit=(1, 2))

    episode, _ = play(run, load(), ["x<|im_end|>"] * 3)
    assert episode.turn_rewards == [{"mine": 0.5, "style": 0.25}, {}, {"mine": 1.0, "style": 0.25}]
    assert episode.all_rewards == {"mine": 3.5, "other": None, "style": 0.5}
    assert episode.metrics == {"turns": 3.0, "seen": 3.0, "hit": (1.0, 2.0)}


@pytest.mark.parametrize("value", ["1.0", float("inf"), [1], object(), {"a": "x"}, {"a": {}}])
def test_what_is_no_reward_is_named(value):
    async def run(row, chat):
        chat.say("?")
        await chat.draw()
        return chat.finish(value)

    with pytest.raises(UserError, match="a reward is a finite number"):
        play(run, load(), ["x<|im_end|>"])


@pytest.mark.parametrize("actual", [0.5, True, None, {"a": 1.0, "b": 2}])
def test_a_function_may_return_its_reward_alone(actual):
    async def run(row, chat):
        chat.say("?")
        await chat.draw()
        return actual

    want = {None: {}, 0.5: {"mine": 0.5}, True: {"mine": 1.0}}
    got = play(run, load(), ["x<|im_end|>"])[0].rewards
    assert got == (actual if isinstance(actual, dict) else want[actual])


def test_a_function_that_draws_nothing_or_returns_something_else():
    async def silent(row, chat):
        chat.say("?")

    async def odd(row, chat):
        chat.say("?")
        return await chat.draw()

    with pytest.raises(EpisodeFailed, match="drew no answer"):
        play(silent, load(), [])
    with pytest.raises(UserError, match=r"return chat.finish\(reward=...\)"):
        play(odd, load(), ["x<|im_end|>"])

    async def hasty(row, chat):
        chat.say("?")
        await asyncio.gather(chat.draw(), chat.draw())

    with pytest.raises(UserError, match="still being drawn"):
        play(hasty, load(), ["x<|im_end|>"] * 2)


@pytest.mark.parametrize("output", [3, None, [3], ["a"], {"content": "a"}, [{"role": 1}], object()])
def test_what_nobody_can_say_is_named(output):
    async def run(row, chat):
        chat.say(output)

    with pytest.raises(UserError, match="chat.say"):
        play(run, load(), [])


def test_broken_text_is_said_and_a_row_is_an_episodes_own():
    async def run(row, chat):
        chat.say(row["questions"].pop())
        return float(await chat.draw() == "x")

    row = {"questions": ["half \ud800 a pair"]}
    episode, _ = play(run, load(), ["x<|im_end|>"], row)
    assert episode.prompt == [{"role": "user", "content": "half ? a pair"}]
    assert row["questions"] and episode.rewards == {"mine": 1.0}


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_the_environment_tools_comes_from_the_config_alone(tmp_path):
    path = tmp_path / "my_tools.py"
    path.write_text(
        "def double(x: int) -> int:\n"
        '    """Double a number.\n\n    Args:\n        x: The number.\n    """\n    return 2 * x\n'
    )
    tokenizer = load()
    config = EnvConfig(kind="tools", tools=[f"{path}:double"], system="Be short.", max_turns=3)
    env = open_env(config, tokenizer)
    texts = [
        f"<think>twice</think>{call('double', x=4)}{call('double', x='no')}<|im_end|>",
        "It is 8.<|im_end|>",
    ]
    engine = Script(tokenizer, texts)
    episode = asyncio.run(env.run({"prompt": "Twice 4?"}, engine, SAMPLING, 0))
    (text,) = check(episode, engine)
    assert '"name":"double"' in text and "Be short." in text and "8</tool_response>" in text
    assert [m["role"] for m in episode.completion] == ["assistant", "tool", "tool", "assistant"]
    assert "unable to parse" in episode.completion[2]["content"]
    assert episode.metrics == {"turns": 2.0, "tool_calls": 2.0, "tool_errors": 1.0}
    assert episode.prompt[-1] == {"role": "user", "content": "Twice 4?"} and not episode.rewards
    engine = Script(tokenizer, texts[:1] * 5)
    row = {"messages": [{"role": "user", "content": "Twice 4?"}]}
    assert asyncio.run(env.run(row, engine, SAMPLING, 0)).metrics["turns"] == 3.0
    for broken, message in [
        (EnvConfig(kind="tools", tools=[f"{path}:triple"]), "env.tools.0 .* has no 'triple'"),
        (EnvConfig(kind="tools", tools=[f"{path}:double"] * 2), "two tools are called 'double'"),
        (EnvConfig(kind="tools", tools=["builtins:print"]), "a tool is a function with"),
    ]:
        with pytest.raises(UserError, match=message):
            open_env(broken, tokenizer)
    for keys in ({"kind": "tools"}, {"kind": "calculator", "tools": ["a:b"]}, {"tools": ["a:b"]}):
        with pytest.raises(ValueError, match="env"):
            EnvConfig(**keys)


def test_tools_of_one_episode_may_hold_its_state():
    class Board:
        def __init__(self):
            self.moves = []

        def move(self, to: str) -> str:
            """Move.

            Args:
                to: Where.
            """
            self.moves.append(to)
            return "ok"

    async def run(row, chat):
        board = Board()
        chat.use(board.move)
        chat.say("Go to a, then b.")
        answer = await chat.answer()
        assert answer == "Done." and answer.thinking == "well" and answer.finished
        return float(board.moves == ["a", "b"])

    texts = [call("move", to="a"), call("move", to="b"), "<think>well</think> Done."]
    episode, _ = play(run, load(), [f"{text}<|im_end|>" for text in texts])
    assert episode.rewards == {"mine": 1.0} and episode.metrics["tool_calls"] == 2.0


def test_own_functions_and_classes_are_found_and_checked(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "async def run(row, chat, greeting='Hello'):\n"
        "    chat.say(greeting)\n    await chat.draw()\n    return 1.0\n"
        "class Shared:\n"
        "    def __init__(self, greeting):\n        self.greeting = greeting\n"
        "    async def run(self, row, talk):\n"
        "        talk.say(self.greeting)\n        await talk.draw()\n        return 1.0\n"
        "class Knows(Shared):\n"
        "    def __init__(self, tokenizer, greeting):\n"
        "        self.greeting = tokenizer.eos_token\n"
        "def blocking(row, chat):\n    return 1.0\n"
    )
    tokenizer = load()
    for name, output in [
        ("run", "Good day"),
        ("Shared", "Good day"),
        ("Knows", tokenizer.eos_token),
    ]:
        env = open_env(
            EnvConfig(kind=f"{path}:{name}", options={"greeting": "Good day"}), tokenizer
        )
        episode = asyncio.run(env.run({}, Script(tokenizer, ["x<|im_end|>"]), SAMPLING, 0))
        assert episode.prompt[0]["content"] == output and episode.rewards == {name: 1.0}
    for name, options, message in [
        ("run", {"welcome": 1}, r"\(row, chat, \*\*env.options\).*welcome"),
        ("Shared", {}, r"\(\*\*env.options\).*greeting"),
        ("blocking", {}, "async def"),
    ]:
        with pytest.raises(UserError, match=message):
            open_env(EnvConfig(kind=f"{path}:{name}", options=options), tokenizer)


PIECES = ["<think>", "</think>", "\n", "<tool_call>", "</tool_call>", "{", "}", '"name": "a"', "x"]
PIECES += [" ", "<function=f>", "<parameter=p>", "</parameter>", "</function>", "é", "[" * 30]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), min_size=1, max_size=4),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.sampled_from([None, QWEN3, OPENING]),
)
def test_whatever_the_model_writes_is_trained_once_behind_what_it_saw(texts, ended, template):
    async def run(row, chat):
        for number in range(len(texts)):
            chat.say(f"Question {number}")
            answer = await chat.draw()
            if answer.tool_calls:
                await chat.call(answer)
        return 0.0

    texts = [
        text + "<|im_end|>" * (end or not text) for text, end in zip(texts, ended, strict=False)
    ]
    tokenizer = TOKENIZERS.setdefault(template, load(template))
    episode, engine = play(run, tokenizer, texts)
    check(episode, engine)
    assert episode.drawn_tokens == [token for text in texts for token in engine.encode(text)]


TOKENIZERS = {}
