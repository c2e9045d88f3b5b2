"""Conversations of many turns: what is rendered once is what rendering every beginning gives."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data.chat import template
from jaxtrain.data.chat.template import (
    Renderer,
    RetokenizationError,
    TemplateFailed,
    TemplateOmission,
    load_tokenizer,
)
from jaxtrain.errors import UserError
from jaxtrain.huggingface import chat_template
from jaxtrain.huggingface.chat_template import render, render_prefixes
from jaxtrain.huggingface.plain_template import mark_template

QWEN3 = (Path(__file__).parent / "qwen3.jinja").read_text()
# Qwen2.5's way: a default system message, and tool answers that look at both neighbors.
QWEN2 = """
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'Be kind.' }}
{%- endif %}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{{- "<|im_end|>\\n" }}
{%- else %}{%- if messages[0]['role'] == 'system' %}
{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{%- endif %}{%- endif %}
{%- for message in messages %}
{%- if (message.role == "user") or (message.role == "system" and not loop.first) or
    (message.role == "assistant" and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == "assistant" %}
{{- '<|im_start|>' + message.role }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- if loop.last %}{{- ' ' }}{%- endif %}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == "tool" %}
{%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
{%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# The last message is shown otherwise than before; messages of one kind end all the text.
LAST = """{% for message in messages %}{% set x = x | default('new') %}
{{- '<|im_start|>' ~ x ~ message.role ~ '\\n' }}{% set x = 'old' %}
{%- if loop.nextitem is defined %}{{ loop.nextitem.role }}{% endif %}
{{- message.content }}{% if loop.last and message.role == 'user' %}?{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>newassistant
{% else %}{{ messages[0].role[:0] }}{% endif %}"""


def with_template(text):
    tokenizer = load_tokenizer("builtin")
    if text is not None:
        tokenizer.chat_template = text
    return tokenizer


TOKENIZERS = {
    name: with_template(text)
    for name, text in {"builtin": None, "qwen2": QWEN2, "last": LAST, "qwen3": QWEN3}.items()
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
TEXTS = st.sampled_from(["", "a", " b ", "<|im_end|>", "x\ny", "</think>", "ä", "user"])
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "system"]), "content": TEXTS}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": TEXTS},
        optional={"tool_calls": st.just([CALL]), "reasoning_content": st.sampled_from(["", "hm"])},
    ),
)
TALK = st.lists(MESSAGE, min_size=1, max_size=7)


@pytest.mark.parametrize("name", ["builtin", "qwen2", "last"])
@settings(max_examples=40, deadline=None)
@given(talk=TALK, tools=st.sampled_from([None, TOOLS]))
def test_every_beginning_is_as_it_renders_alone(name, talk, tools):
    tokenizer = TOKENIZERS[name]
    actual = render_prefixes(tokenizer, talk, tools)
    for count in range(1, len(talk) + 1):
        for generation in (False, True):
            try:
                alone = render(tokenizer, talk[:count], tools, generation)
            except TemplateFailed:
                assert actual is None
                return
            assert actual is not None and actual.render(count, generation) == alone
    assert actual.text == actual.render(len(talk))


def outcome(renderer, talk, tools, expected):
    try:
        return [(list(part.tokens), list(part.author)) for part in renderer(talk, tools, expected)]
    except (TemplateFailed, RetokenizationError, TemplateOmission, UserError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=40, deadline=None)
@given(talk=TALK, tools=st.sampled_from([None, TOOLS]), data=st.data())
def test_turns_lie_where_rendering_each_of_them_puts_them(name, talk, tools, data):
    """Marks, errors and further renderings are those of the slow way, for any template."""
    expected = sorted(data.draw(st.sets(st.integers(0, len(talk) - 1), min_size=1)))
    renderer = Renderer(TOKENIZERS[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template, "FEW", 10**9)
        slow = outcome(renderer, talk, tools, expected)
        patch.setattr(template, "FEW", 0)
        assert outcome(renderer, talk, tools, expected) == slow


@pytest.mark.parametrize(
    "text",
    [
        QWEN3,
        "{% for m in messages[1:] %}{{ m.content }}{% endfor %}",
        "{% set messages = messages %}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{{ messages[-1].role }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{{ messages[1].role }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ loop.length }}{% endfor %}",
        "{% for m in messages %}{{ loop.revindex }}{% endfor %}",
        "{% for m in messages %}{{ loop['last'] }}{% endfor %}",
        "{% for m in messages %}{{ loop.changed(m.role) }}{% endfor %}",
        "{% for m in messages %}{{ messages[loop.index0 + 2].role }}{% endfor %}",
        "{% for m in messages %}{% for c in 'ab' %}{{ messages[loop.index0 - 1] }}{% endfor %}"
        "{% endfor %}",
        "{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}",
        "{% for m in messages if m.content %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% else %}none{% endfor %}",
        "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{{ n.x }}"
        "{% endfor %}",
        "{% set j = joiner(',') %}{% for m in messages %}{{ j() }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ add_generation_prompt }}{% endfor %}",
        "{{ add_generation_prompt }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages | length }}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ m }}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{% for m in messages %}x{% endfor %}",
        "{% if true %}{% for m in messages %}{{ m.content }}{% endfor %}{% endif %}",
        "{% macro f() %}{{ messages[-1] }}{% endmacro %}"
        "{% for m in messages %}{{ f() }}{% endfor %}",
    ],
)
def test_other_templates_are_rendered_turn_by_turn(text):
    assert mark_template(text) is None


def test_a_look_back_from_the_first_message_is_not_guessed():
    """There messages[-1] is the last of all."""
    text = "{% for m in messages %}{{ messages[loop.index0 - 1].role }}{% endfor %}"
    assert mark_template(text) is not None
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert render_prefixes(with_template(text), talk, None) is None


def test_a_thousand_turns_are_rendered_four_times_not_two_thousand_times(monkeypatch):
    tokenizer, count = TOKENIZERS["qwen2"], []
    talk = [
        {"role": role, "content": f"{role} {number} " * 5}
        for number in range(1000)
        for role in ("user", "assistant")
    ]
    request = chat_template._request
    monkeypatch.setattr(chat_template, "_request", lambda *a: count.append(1) or request(*a))
    expected = range(1, 2000, 2)
    (actual,) = Renderer(tokenizer)(talk, None, expected)
    assert len(count) == 4  # twice more with other values, for what the template leaves out
    Renderer(tokenizer)(talk, None, expected)
    assert len(count) == 6
    assert set(np.unique(actual.author)) == {-1, *expected}
    with pytest.raises(TemplateFailed, match="more than 1,000 messages for a chat template"):
        Renderer(TOKENIZERS["qwen3"])(talk, None, expected)
