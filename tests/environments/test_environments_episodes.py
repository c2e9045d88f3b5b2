"""Environments with scripted engines: tokens stay as drawn, what the world says is not trained."""

import asyncio
import re

import pytest

from jaxtrain.config import EnvConfig, SamplingConfig
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.data.sources.calculator import CalculatorRows
from jaxtrain.environments.factory import open_env
from jaxtrain.environments.guarded import open_guarded
from jaxtrain.errors import UnusableRow, UserError
from jaxtrain.generation.engine import Completion, EpisodeFailed
from jaxtrain.generation.evaluation.eval_sets import list_turns

SAMPLING = SamplingConfig(max_new_tokens=64, temperature=1.0)


class Script:
    """Says the given texts one after the other, whatever it is asked; keeps what it was asked."""

    version = 3

    def __init__(self, tokenizer, texts, finish_reason="stop", spelling=False):
        self.tokenizer, self.texts, self.finish_reason = tokenizer, list(texts), finish_reason
        self.spelling, self.asked = spelling, []

    def encode(self, text):
        parts = re.findall(r"<\|?\w+\|?>|.", text) if self.spelling else [text]
        ids = [self.tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts]
        return [token for part in ids for token in part]

    async def generate(self, prompt, sampling, stop_ids=(), index=0):
        self.asked.append((list(prompt), tuple(stop_ids), index))
        tokens = self.encode(self.texts.pop(0))
        logprobs = [-0.5 - i for i in range(len(tokens))]
        return Completion(tokens, logprobs, self.finish_reason, [3] * len(tokens))


def play(env, row, engine):
    return asyncio.run(env.run(row, engine, SAMPLING, 11))


def call(expression):
    arguments = f'{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}'
    return f"<think>so</think> <tool_call>{arguments}</tool_call><|im_end|>"


def test_many_turns_train_what_the_policy_drew_and_nothing_else(tokenizer):
    """A policy that spells its call in single bytes reads single bytes back, not merged tokens."""
    row = CalculatorRows(1, seed=3, follow_up=0)[0]
    texts = [call("2 + 2"), f"It is {row['answers'][0]}.<|im_end|>"]
    engine = Script(tokenizer, texts, spelling=True)
    episode = play(open_env(EnvConfig(kind="calculator"), tokenizer), row, engine)
    assert episode.rewards == {"solved": 1.0}
    assert episode.metrics == {"turns": 2.0, "accuracy": (1.0, 1.0)}
    assert len(episode.tokens) == len(episode.sampled) == len(episode.logprobs)
    assert len(episode.versions) == len(episode.tokens)
    drawn = [t for t, yes in zip(episode.tokens, episode.sampled, strict=True) if yes]
    assert drawn == [token for text in texts for token in engine.encode(text)]
    assert drawn != tokenizer("".join(texts))["input_ids"]
    for yes, logprob, version in zip(
        episode.sampled, episode.logprobs, episode.versions, strict=True
    ):
        assert (logprob < 0, version) == (yes, 3 if yes else -1)
    second = engine.asked[1][0]
    assert episode.tokens[: len(second)] == second, "the second turn continues the very tokens"
    assert "4" in tokenizer.decode(second[len(engine.asked[0][0]) :]).split("<tool_response>")[1]
    assert {index for _, _, index in engine.asked} == {11}
    assert [message["role"] for message in episode.completion] == ["assistant", "tool", "assistant"]
    assert list_turns(episode)[0] == ("user", row["messages"][1]["content"])


REWRITING = (
    "{{ tools | tojson }}{% for m in messages %}{% if loop.last or m.role != 'assistant' %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDLESS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize(
    "template, message",
    [(REWRITING, "leaves out"), (ENDLESS, "no end-of-turn"), (None, "has no chat template")],
)
def test_many_turns_need_a_template_that_can_be_continued(template, message):
    second = load_tokenizer("builtin")
    second.chat_template = template
    with pytest.raises(UserError, match=message):
        env = open_env(EnvConfig(kind="calculator", history="tokens"), second)
        play(env, CalculatorRows(1)[0], Script(second, [call("1 + 1")]))


def test_single_turn_renders_texts_and_messages_alike(tokenizer):
    env = open_env(EnvConfig(system="Be short."), tokenizer)
    entry = play(env, {"prompt": "What is 1?"}, first := Script(tokenizer, ["1<|im_end|>"]))
    messages = [{"role": "user", "content": "What is 1?"}, {"role": "assistant", "content": "?"}]
    two = play(env, {"messages": messages}, second := Script(tokenizer, ["1<|im_end|>"]))
    assert first.asked == second.asked
    assert "Be short." in tokenizer.decode(entry.tokens) and entry.tokens == two.tokens
    assert entry.completion == "1" and entry.prompt == "What is 1?"
    assert two.completion == [{"role": "assistant", "content": "1"}]
    assert two.prompt == messages[:1]
    assert sum(entry.sampled) == 2 and entry.sampled[-2:] == [True, True]


def test_a_token_without_log_prob_is_context(tokenizer):
    class Gaps(Script):
        async def generate(self, *arguments, **options):
            completion = await super().generate(*arguments, **options)
            logprobs = [float("nan") if n < self.gaps else -0.5 for n in range(2)]
            return completion._replace(logprobs=logprobs)

    env, engine = open_guarded(EnvConfig(), tokenizer), Gaps(tokenizer, ["1<|im_end|>"] * 2)
    engine.gaps = 1
    episode = play(env, {"prompt": "What is 1?"}, engine)
    assert episode.sampled[-2:] == [False, True] and episode.logprobs[-2:] == [0.0, -0.5]
    engine.gaps = 2
    with pytest.raises(EpisodeFailed, match="every log-prob is NaN"):
        play(env, {"prompt": "What is 1?"}, engine)


def test_raw_texts_are_continued_as_they_are(tokenizer):
    env = open_env(EnvConfig(raw=True, prompt_column="text"), tokenizer)
    engine = Script(tokenizer, ["b"], finish_reason="length")
    episode = play(env, {"text": "a"}, engine)
    assert tokenizer.decode(engine.asked[0][0]) == "a" and episode.finish_reason == "length"
    with pytest.raises(UserError, match="chat template"):
        play(env, {"text": [{"role": "user", "content": "a"}]}, engine)


@pytest.mark.parametrize("row", [{"statement": "x"}, {"prompt": ""}, {"prompt": []}, {"prompt": 3}])
def test_a_row_without_a_prompt_is_named(tokenizer, row):
    """A row with an empty one is unusable by itself; a column that is absent is a wrong key."""
    empty = row.get("prompt") in ("", [])
    expected = (UnusableRow, "its prompt is empty") if empty else (UserError, "env.prompt_column")
    with pytest.raises(expected[0], match=expected[1]):
        play(open_env(EnvConfig(), tokenizer), row, None)


def test_an_own_environment_comes_from_a_file(tokenizer, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "class Mine:\n"
        "    def __init__(self, tokenizer, greeting):\n        self.greeting = greeting\n"
        "    async def run(self, row, engine, sampling, index):\n        return self.greeting\n"
        "class Not:\n    def __init__(self, tokenizer):\n        pass\n"
    )
    section = EnvConfig(kind="python", path=f"{path}:Mine", options={"greeting": "hi"})
    assert play(open_env(section, tokenizer), {}, None) == "hi"
    for broken, message in [
        (EnvConfig(kind="python", path=f"{path}:Mine"), "greeting"),
        (EnvConfig(kind="python", path=f"{path}:Not"), "async def run"),
        (EnvConfig(kind="python", path=f"{path}:None_"), "env.path .* has no 'None_'"),
        (EnvConfig(kind="python", path="missing"), "env.path: there is no 'missing'"),
    ]:
        with pytest.raises(UserError, match=message):
            open_env(broken, tokenizer)


def test_a_prompt_with_a_token_of_an_image_is_a_failed_row(tokenizer):
    row = CalculatorRows(1, seed=3, follow_up=0)[0]
    texts = [call("2 + 2"), f"It is {row['answers'][0]}.<|im_end|>"]
    engine = Script(tokenizer, texts)
    play(open_guarded(EnvConfig(kind="calculator"), tokenizer), row, engine)
    first = engine.asked[0][0][0]
    engine = Script(tokenizer, texts)
    env = open_guarded(EnvConfig(kind="calculator"), tokenizer, media={first: "image_token_id"})
    with pytest.raises(EpisodeFailed, match="cannot be played") as failed:
        play(env, row, engine)
    assert f"token {first} (image_token_id) stands for an image" in failed.value.cause
    assert not engine.asked
