"""Untrusted chat templates: those that end render as in transformers, the others are stopped."""

# ruff: noqa: E501  (templates are written in long lines)

import copy
import resource
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.errors import UserError
from jaxtrain.huggingface import chat_template
from jaxtrain.huggingface.chat_template import TemplateFailed, render

CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": ["é", None]}}}
MESSAGES = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Q <think>"},
    {"role": "assistant", "content": "A", "reasoning_content": "why", "tool_calls": [CALL]},
    {"role": "tool", "content": "5", "name": "f"},
    {"role": "assistant", "content": "B"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]


def with_template(tokenizer, text):
    changed = copy.copy(tokenizer)
    changed.chat_template = text
    return changed


# Of the kinds of things that published templates do.
TEMPLATES = {
    "builtin": None,
    "namespace and slices": """{%- set ns = namespace(last=-1, seen='') %}
{%- for m in messages[::-1] %}{% set ns.last = loop.index0 %}{% if m.role == 'user' %}{% break %}{% endif %}{% endfor %}
{%- for m in messages %}{% set ns.seen = ns.seen ~ m['role'] + ';' %}
{{- '<|' + m.role + '|>' }}{{ m.content | trim }}{{ loop.last and eos_token or '' }}{% endfor %}
{{- ns.seen.rstrip(';').split(';') | length }}{{ ns.last % 7 * 2 }}{{ 2 ** 3 }}{{ 'ab' * 2 }}""",
    "macros": """{%- macro row(m, depth=1) %}{{ m.role ~ ':' ~ depth }}{{ caller(m) if caller else '' }}{% endmacro %}
{%- for m in messages %}{% call(x) row(m, depth=loop.index) %}[{{ x.content | upper }}]{% endcall %}{{ row(m) }}{% endfor %}""",
    "json and filters": """{% set keys = ['a', 'b'] + ['c'] %}{{ keys | join(', ') }}{{ tools | tojson(indent=4) }}
{%- for k, v in {'x': 1, 'y': (2, 3)}.items() %}{{ k }}={{ v | string | indent(2) }}{% endfor %}
{{- messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | tojson }}
{{- messages | map(attribute='role') | map('upper') | join('-') }}{{ 'a-b'.replace('-', '+') }}{{ '%s/%03d' % ('a', 7) }}
{{- '{:>6}|{}'.format('r', 1700000000) }}{{ none is defined }}{{ 3.7 | round(1) }}{{ 'x' in keys }}{{ keys == keys }}""",
    "generation": """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}
{%- else %}{{ m.content }}{% endif %}{% set body %}<{{ m.role }}>{% endset %}{{ body }}{% filter upper %}q{% endfilter %}{% endfor %}""",
}


@pytest.mark.parametrize(
    "files, starts",
    [
        ({"chat_template.jinja": "{{ messages }}"}, True),
        ({"tokenizer_config.json": '{"chat_template": "{{ messages }}"}'}, True),
        ({"tokenizer_config.json": "{}"}, False),
        ({"chat_template.jinja": sorted(chat_template.shipped_templates())[0]}, False),
        ({}, False),
    ],
)
def test_the_process_starts_early_for_a_folder_with_a_template_of_others(
    tmp_path, monkeypatch, files, starts
):
    worker = chat_template.TemplateWorker()
    monkeypatch.setattr(worker, "_open", lambda: opened.append(1))
    monkeypatch.setattr(chat_template, "_worker", worker)
    opened = []
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    chat_template.start_worker(tmp_path)
    assert opened == [1] * starts


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_that_end_are_rendered_as_by_transformers(tokenizer, name):
    if TEMPLATES[name]:
        tokenizer = with_template(tokenizer, TEMPLATES[name])
    for tools in (None, TOOLS):
        for generation in (False, True):
            expected = tokenizer.apply_chat_template(
                MESSAGES, tools=tools, add_generation_prompt=generation, tokenize=False
            )
            assert render(tokenizer, MESSAGES, tools, generation) == expected


GROW = (
    "{%% set ns = namespace(x='a', l=[1]) %%}{%% for i in range(99) %%}%s{%% endfor %%}{{ ns.l }}"
)
BIG = "{% set x = ['a' * 9000000] * 100000 %}{% set y = ['a' * 8999999 ~ 'a'] * 100000 %}"
BOMBS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{{ 'a' * 10**10 }}",
    "{{ [1] * 10**10 }}",
    "{{ (10**9) ** (10**9) }}",
    "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    GROW % "{% set ns.x = ns.x ~ ns.x %}",
    GROW % "{% set ns.x = ns.x + ns.x %}",
    GROW % "{% set ns.x = [ns.x, ns.x] | join %}",
    GROW % "{% set ns.x = ns.x.replace('a', 'a' * 1000) %}",
    GROW % "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}",
    GROW % "{% set ns.x = '%s%s' % (ns.x, ns.x) %}",
    GROW % "{% set ns.x = '{}{}'.format(ns.x, ns.x) %}",
    GROW % "{% set ns.l = ns.l + ns.l %}",
    GROW % "{% set ns.l = [ns.l, ns.l] %}",
    GROW % "{% set ns.l = {1: ns.l, 2: ns.l} %}",
    GROW % "{% set ns.l = dict(a=ns.l, b=ns.l) %}",
    BIG + "{{ x }}",
    BIG + "{{ x | join }}",
    BIG + "{{ x | tojson }}",
    BIG + "{{ x | string }}",
    BIG + "{{ x == y }}",
    BIG + "{{ x is eq y }}",
    BIG + "{{ [x] | map('upper') | list }}",
    "{{ ('a' * 1000000).join(['b'] * 100000) }}",
    "{{ (['b'] * 100000) | join('a' * 1000000) }}",
    "{{ 'a' | center(10**10) }}",
    "{{ 'a' | attr('center')(10**10) }}",
    "{% set f = 'a'.zfill %}{{ f(10**10) }}",
    "{{ 'a\n' | indent(10**9) }}",
    "{{ ('x' * 1000000) | wordwrap(1, wrapstring='y' * 1000000) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10**10, 1) }}",
    "{{ '%10000000000d' | format(1) }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ '{:>{w}}'.format(1, w=10**10) }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ 'abc' | batch(10**9, 'x') | list }}",
    "{% for m in messages %}{{ 'a' * 3000000 }}{% endfor %}",
    "{{ lipsum(n=10**7) }}",
    "{{ range(99999) | map('center', 1000000) | list }}",
    "{{ (1).to_bytes(10**10, 'big') }}",
]
ENDS = [
    "{% for a in range(10**9) %}x{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ '\t'.expandtabs(10**10) }}",
    "{{ 1 / 0 }}",
    "{{ nothing.x }}",
    "{% include 'x' %}",
    "{{ raise_exception('\x1b[2J no') }}",
]
BROKEN = [
    "{{" * 3000,
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "{% for i in [1] %}" * 60 + "{% endfor %}" * 60,
    "{% nonsense %}",
    "{% filter center(10**9) %}a{% endfilter %}",
    "x" * 10**6,
]


@pytest.fixture
def little_time(monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.1)


def try_render(tokenizer, text, messages=MESSAGES[-1:]):
    """Return the rendering or the error; this process spends neither time nor memory on it."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.thread_time()
    try:
        return render(with_template(tokenizer, text), messages, TOOLS, True)
    except (UserError, TemplateFailed) as error:
        assert len(str(error)) < 1000 and "\x1b" not in str(error)
        return error
    finally:
        assert time.thread_time() - start < 2
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 2**16, "KiB"


@pytest.mark.parametrize(
    "text",
    [pytest.param(text, marks=[pytest.mark.slow] * (i % 3 > 0)) for i, text in enumerate(BOMBS)],
)
def test_templates_without_end_are_stopped(tokenizer, little_time, text):
    # A few with tool calls, whose form up to four more renderings look for.
    error = try_render(tokenizer, text, MESSAGES if text in BOMBS[::10] else MESSAGES[-1:])
    assert isinstance(error, UserError) and "is stopped" in str(error)
    assert "model.chat_template" in str(error)


@pytest.mark.parametrize("text", ENDS)
def test_exceptions_of_templates_are_reported_for_the_row(tokenizer, text):
    assert isinstance(try_render(tokenizer, text), TemplateFailed)


@pytest.mark.parametrize("text", BROKEN)
def test_unreadable_templates_are_named(tokenizer, text):
    error = try_render(tokenizer, text)
    assert isinstance(error, UserError) and "model.chat_template" in str(error)


LEAF = st.sampled_from(
    ["messages", "'a'", "9", "10**9", "ns.x", "range(99999)", "('a' * 99999)", "ns", "tools", "[1]"]
)


def grow(inner):
    two = st.tuples(inner, inner)
    operators = st.sampled_from(["+", "*", "~", "%", "**", "==", "in", "//"])
    functions = ["join", "replace", "center", "format", "zfill", "split", "ljust", "count"]
    filters = ["join", "list", "tojson", "string", "indent", "batch", "sum", "sort", "map('upper')"]
    filters += ["replace", "length", "dictsort", "wordwrap", "groupby", "slice"]
    return st.one_of(
        st.tuples(inner, operators, inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, st.sampled_from(functions), two).map(
            lambda t: f"{t[0]}.{t[1]}({t[2][0]}, {t[2][1]})"
        ),
        st.tuples(inner, st.sampled_from(functions), inner).map(lambda t: f"{t[0]}.{t[1]}({t[2]})"),
        st.tuples(inner, st.sampled_from(filters)).map(lambda t: f"({t[0]} | {t[1]})"),
        st.tuples(inner, st.sampled_from(["join", "indent", "center", "batch"]), inner).map(
            lambda t: f"({t[0]} | {t[1]}({t[2]}))"
        ),
        two.map(lambda t: f"[{t[0]}, {t[1]}]"),
        inner.map(lambda t: f"{t}[1:]"),
    )


EXPRESSIONS = st.recursive(LEAF, grow, max_leaves=6)


def test_a_worker_that_was_killed_is_replaced(tokenizer):
    tokenizer = with_template(tokenizer, "{{ messages | length }}")
    assert render(tokenizer, MESSAGES, None, False) == "5"
    chat_template._worker._process.kill()
    chat_template._worker._process.wait()
    for _ in range(2):
        try:
            assert render(tokenizer, MESSAGES, None, False) == "5"
        except UserError as error:
            assert "does not answer" in str(error)
    assert render(tokenizer, MESSAGES, None, False) == "5"


@pytest.mark.parametrize("examples", [20, pytest.param(150, marks=pytest.mark.slow)])
def test_any_expression_ends(tokenizer, monkeypatch, examples):
    monkeypatch.setattr(chat_template, "SECONDS", 0.1)

    @settings(max_examples=examples, deadline=None)
    @given(EXPRESSIONS)
    def check(expression):
        text = (
            "{% set ns = namespace(x='a') %}{% for i in range(30) %}"
            "{% set ns.x = " + expression + " %}{% endfor %}{{ ns.x }}"
        )
        try_render(tokenizer, text)

    check()
