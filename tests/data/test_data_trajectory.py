"""Trajectories: both renderings against texts written by hand, and rows that must be refused."""

from types import SimpleNamespace

import pytest

from jaxtrain.data.chat.messages import MalformedRow
from jaxtrain.data.chat.rows import Row
from jaxtrain.data.chat.template import Renderer, load_tokenizer
from jaxtrain.methods.trees.rendering import (
    read_row,
    render_chatml,
    render_template,
    split_thinking,
)


class Characters:
    """A tokenizer of one token a character, as far as control.Encoder asks."""

    added_tokens_decoder = {}
    all_special_tokens = all_special_ids = ()

    @property
    def backend_tokenizer(self):
        return self

    def encode(self, text, add_special_tokens):
        return SimpleNamespace(ids=[ord(c) for c in text])


def text_of(tokens):
    return "".join(map(chr, tokens))


def call(name, **arguments):
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


AGENT = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Add."},
    {
        "role": "assistant",
        "content": "Sure.",
        "reasoning_content": " I add. ",
        "tool_calls": [call("add", a=1, b=[True, None], c="ü"), call("noop")],
    },
    {"role": "tool", "content": "3"},
    {"role": "tool", "content": "ok"},
    {"role": "assistant", "content": "It is 3."},
    {"role": "user", "content": "Thanks"},
]


def read(messages, **row):
    conversation = read_row(Row({"messages": messages, **row}))
    return conversation.messages, conversation.tools


def test_chatml_is_the_published_form():
    messages, _ = read(AGENT)
    first, second = render_chatml(messages, Characters())
    assert text_of(first.prompt) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text_of(first.reasoning) == "<think>I add.</think>"
    assert text_of(first.response) == (
        "Sure.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
        "<parameter=b>\n[true, null]\n</parameter>\n<parameter=c>\nü\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=noop>\n</function>\n</tool_call>"
        "<|im_end|>\n"
    )
    seen = text_of(first.prompt) + text_of(first.response)
    assert text_of(second.prompt) == seen + (
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n"
        "<tool_response>\nok\n</tool_response>\n<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(second.reasoning) == 0
    assert text_of(second.response) == "It is 3.\n<|im_end|>\n"


def test_chatml_of_an_empty_answer_is_its_end():
    messages, _ = read([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}])
    (turn,) = render_chatml(messages, Characters())
    assert text_of(turn.response) == "<|im_end|>\n"


def test_template_shows_what_the_model_sees_and_hides_thoughts_from_later_turns():
    tokenizer = load_tokenizer("builtin")
    messages, _ = read(AGENT)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    turns = render_template(messages, tools, Renderer(tokenizer))
    plain = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]
    for turn, index in zip(turns, (2, 5), strict=True):
        expected = tokenizer.apply_chat_template(
            plain[:index], tools=tools, add_generation_prompt=True, tokenize=False
        )
        assert tokenizer.decode(turn.prompt) == expected
        assert "I add" not in expected and '"add"' in expected
        shown = tokenizer.apply_chat_template(plain[: index + 1], tools=tools, tokenize=False)
        assert shown.startswith(expected + tokenizer.decode(turn.response))
        assert turn.response[-1] == tokenizer.eos_token_id
    spoken = {**messages[2], "reasoning_content": "I add."}
    with_thought = tokenizer.apply_chat_template(
        [*messages[:2], spoken], tools=tools, tokenize=False
    )
    thought = tokenizer.decode(turns[0].reasoning)
    assert with_thought.startswith(tokenizer.decode(turns[0].prompt) + thought)
    assert "I add." in thought and thought.endswith("</think>")
    assert len(turns[1].reasoning) == 0


def test_prompt_and_completion_are_joined_with_default_roles():
    row = {"prompt": ["Hi", {"content": "there"}], "completion": [{"content": "Hello"}]}
    messages = read_row(Row(row)).messages
    assert [m["role"] for m in messages] == ["user", "user", "assistant"]


@pytest.mark.parametrize("question", [{"question": "Q"}, {"instruction": "Q"}, {"input": "Q"}])
def test_questions_and_answers_have_the_names_of_other_readers(question):
    columns = Row({**question, "output": "A"})
    assert [m["content"] for m in read_row(columns).messages] == ["Q", "A"]
    assert not columns.unread


def broken(arguments):
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    spoken = {"role": "assistant", "content": "", "tool_calls": calls}
    return [{"role": "user", "content": "x"}, spoken]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "Hi"}, "non-empty completion"),
        ({"prompt": [], "completion": []}, "non-empty completion"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant message"),
        ({"messages": [3]}, "message is a number"),
        ({"messages": broken("{")}, "broken JSON"),
        ({"messages": broken("[1]")}, "no object"),
        (
            {"messages": [{"role": "assistant", "content": "a", "reasoning_content": 4}]},
            "reasoning",
        ),
    ],
)
def test_rows_that_cannot_be_read_say_why(row, reason):
    with pytest.raises(MalformedRow, match=reason):
        read_row(Row(row))


def test_a_conversation_must_not_start_with_the_assistant():
    messages, _ = read([{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "x"}])
    with pytest.raises(MalformedRow, match="starts with an assistant"):
        render_chatml(messages, Characters())
    with pytest.raises(MalformedRow, match="starts with an assistant"):
        render_template(messages, None, Renderer(load_tokenizer("builtin")))


def think_row(content, user="Why <think>not</think>?"):
    return [{"role": "user", "content": user}, {"role": "assistant", "content": content}]


def test_thinking_is_split_from_the_answer_and_never_from_the_question():
    tokenizer = load_tokenizer("builtin")
    messages = think_row("<think>Because<b>.</think>\nSo.")
    (turn,) = split_thinking(messages, None, tokenizer)
    assert tokenizer.decode(turn.reasoning).startswith("<think>")
    assert "Because<b>." in tokenizer.decode(turn.reasoning)
    assert tokenizer.decode(turn.reasoning).endswith("</think>")
    assert "Why <think>not</think>?" in tokenizer.decode(turn.prompt)
    assert tokenizer.decode(turn.response).strip().startswith("So.")
    full = tokenizer.apply_chat_template(messages, tokenize=False)
    parts = [turn.prompt, turn.reasoning, turn.response]
    assert "".join(map(tokenizer.decode, parts)) == full


@pytest.mark.parametrize("content", ["So.", "<think>open", "</think>odd<think>"])
def test_answers_without_thinking_are_refused(content):
    with pytest.raises(MalformedRow, match="no answer has <think>...</think>"):
        split_thinking(think_row(content), None, load_tokenizer("builtin"))


def test_reasoning_content_counts_as_thinking_and_what_follows_is_left_out():
    tokenizer = load_tokenizer("builtin")
    messages, _ = read(AGENT)
    (turn,) = split_thinking(messages, None, tokenizer)
    assert tokenizer.decode(turn.reasoning) == "<think>\nI add.\n</think>"
    assert "Sure." in tokenizer.decode(turn.response)
    assert "It is 3." not in tokenizer.decode(turn.response)
