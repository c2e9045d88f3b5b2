"""Named chat templates against the models' published texts; DeepSeek's and GLM's constructs."""

import functools
import sys
from pathlib import Path

import pytest

from jaxtrain.config.load import load_config
from jaxtrain.data.chat.named_templates import FOLDER, TOKENS, read_template
from jaxtrain.data.chat.template import Renderer, load_tokenizer, render_text
from jaxtrain.errors import UserError
from jaxtrain.huggingface.tokenizer import open_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from test_data_template import log, marked

TALK = [
    log("system", "S"),
    log("user", "one"),
    log("assistant", "first"),
    log("user", "two"),
    log("assistant", "second"),
]
ALPACA = "\n\n### Instruction:\none\n\n### Response:\nfirst<eos>\n\n"
ALPACA += "### Instruction:\ntwo\n\n### Response:\nsecond<eos>"
PUBLISHED = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\none<|im_end|>\n"
    "<|im_start|>assistant\nfirst<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n"
    "<|im_start|>assistant\nsecond<|im_end|>\n",
    "llama3": "<bos><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\none<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nfirst<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\ntwo<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nsecond<|eot_id|>",
    "gemma": "<bos><start_of_turn>user\nS\n\none<end_of_turn>\n<start_of_turn>model\n"
    "first<end_of_turn>\n<start_of_turn>user\ntwo<end_of_turn>\n<start_of_turn>model\n"
    "second<end_of_turn>\n",
    "mistral": "<bos>[INST] S\n\none[/INST] first<eos>[INST] two[/INST] second<eos>",
    "mistral_v1": "<bos> [INST] S\n\none [/INST] first<eos> [INST] two [/INST] second<eos>",
    "mistral_v3_tekken": "<bos>[INST]S\n\none[/INST]first<eos>[INST]two[/INST]second<eos>",
    "mistral_v7_tekken": "<bos>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]one[/INST]first<eos>"
    "[INST]two[/INST]second<eos>",
    "phi3": "<|system|>\nS<|end|>\n<|user|>\none<|end|>\n<|assistant|>\nfirst<|end|>\n"
    "<|user|>\ntwo<|end|>\n<|assistant|>\nsecond<|end|>\n",
    "phi4": "<|im_start|>system<|im_sep|>S<|im_end|><|im_start|>user<|im_sep|>one<|im_end|>"
    "<|im_start|>assistant<|im_sep|>first<|im_end|><|im_start|>user<|im_sep|>two<|im_end|>"
    "<|im_start|>assistant<|im_sep|>second<|im_end|>",
    "zephyr": "<|system|>\nS<eos>\n<|user|>\none<eos>\n<|assistant|>\nfirst<eos>\n"
    "<|user|>\ntwo<eos>\n<|assistant|>\nsecond<eos>\n",
    "alpaca": f"<bos>S{ALPACA}",
    "vicuna": "<bos>S USER: one ASSISTANT: first<eos>USER: two ASSISTANT: second<eos>",
}
"""Of TALK, with <bos> and <eos>."""
PROMPTS = {
    "chatml": "<|im_start|>assistant\n",
    "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<start_of_turn>model\n",
    **{"mistral": "", "mistral_v1": "", "mistral_v3_tekken": "", "mistral_v7_tekken": ""},
    "phi3": "<|assistant|>\n",
    "phi4": "<|im_start|>assistant<|im_sep|>",
    "zephyr": "<|assistant|>\n",
    "alpaca": "\n\n### Response:\n",
    "vicuna": "ASSISTANT:",
}
ENDS = {
    **{"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "phi3": "<|end|>"},
    "phi4": "<|im_end|>",
}


@functools.cache
def tokenizer_with(tokens):
    tokenizer = load_tokenizer("builtin")
    tokenizer.add_special_tokens(
        {
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "additional_special_tokens": [*tokens, "<|system|>"],
        }
    )
    return tokenizer


def fitted(name):
    tokenizer = tokenizer_with(TOKENS[name])
    tokenizer.chat_template = read_template(name)
    return tokenizer


@pytest.mark.parametrize("name", TOKENS)
def test_a_named_template_writes_what_the_models_read(name):
    tokenizer = fitted(name)
    assert render_text(tokenizer, TALK) == PUBLISHED[name]
    before, after = PUBLISHED[name].split("second")[0], render_text(tokenizer, TALK[:4], None, True)
    assert after.endswith(PROMPTS[name]) and before.startswith(after)
    [rendering] = Renderer(tokenizer)(TALK, None, [2, 4])
    actual = {index: text.lstrip(" ") for index, text in marked(tokenizer, rendering).items()}
    end = ENDS.get(name, "<eos>")
    assert actual == {2: f"first{end}", 4: f"second{end}"}
    # Without a system message, too.
    assert len(Renderer(tokenizer)(TALK[1:], None, [1, 3])) == 1


SPACED = [log("user", " one\n"), log("assistant", " first ")]
AS_SPACED = {
    "chatml": "<|im_start|>user\n one\n<|im_end|>\n<|im_start|>assistant\n first <|im_end|>\n",
    "llama3": "<bos><|start_header_id|>user<|end_header_id|>\n\none<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nfirst<|eot_id|>",
    "gemma": "<bos><start_of_turn>user\none<end_of_turn>\n"
    "<start_of_turn>model\nfirst<end_of_turn>\n",
    "mistral": "<bos>[INST]  one\n[/INST] first<eos>",
    "mistral_v1": "<bos> [INST]  one\n [/INST]  first <eos>",
    "mistral_v3_tekken": "<bos>[INST] one\n[/INST] first <eos>",
    "mistral_v7_tekken": "<bos>[INST] one\n[/INST] first <eos>",
    "phi3": "<|user|>\n one\n<|end|>\n<|assistant|>\n first <|end|>\n",
    "phi4": "<|im_start|>user<|im_sep|> one\n<|im_end|>"
    "<|im_start|>assistant<|im_sep|> first <|im_end|>",
    "zephyr": "<|user|>\n one\n<eos>\n<|assistant|>\n first <eos>\n",
}
"""What the published templates make of contents with space around them, and without a system
message: none of these writes one of its own."""


@pytest.mark.parametrize("name", AS_SPACED)
def test_space_around_contents_is_kept_where_the_published_template_keeps_it(name):
    assert render_text(fitted(name), SPACED) == AS_SPACED[name]


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("alpaca", "<bos>Below is an instruction that describes a task. Write a response that"),
        ("vicuna", "<bos>A chat between a curious user and an artificial intelligence assistant."),
    ],
)
def test_two_have_a_system_message_of_their_own(name, start):
    text = render_text(fitted(name), SPACED)
    assert text.startswith(start) and start not in render_text(fitted(name), TALK)


def test_every_file_is_named_and_every_name_has_one():
    assert {file.stem for file in FOLDER.glob("*")} | {"chatml"} == set(TOKENS)
    assert set(PUBLISHED) == set(TOKENS)


def test_a_template_whose_tokens_are_not_there_is_refused():
    with pytest.raises(UserError, match=r"llama3.*<\|eot_id\|>.*fitting|llama3.*does not have"):
        load_tokenizer("builtin", "llama3")
    with pytest.raises(UserError, match="named are chatml, llama3"):
        load_tokenizer("builtin", "lama3")


def test_the_config_wins_over_the_tokenizer_and_is_exported(tmp_path):
    tokenizer = load_tokenizer("builtin", "alpaca")
    tokenizer.save_pretrained(tmp_path)
    assert open_tokenizer(str(tmp_path)).chat_template == read_template("alpaca")
    path = tmp_path / "c.toml"
    path.write_text(
        '[run]\nmax_steps = 1\n[model]\npath = "x"\nchat_template = "vicuna"\n'
        '[[data.datasets]]\npath = "a.jsonl"\n'
    )
    assert load_config(path).model.chat_template == "vicuna"


# Small templates with the constructs of two families' own ones.
DEEPSEEK = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}\
{% set ns = namespace(is_first=false, is_tool=false, system_prompt='', is_first_sp=true) %}\
{%- for message in messages %}{%- if message['role'] == 'system' %}{%- if ns.is_first_sp %}\
{% set ns.system_prompt = ns.system_prompt + message['content'] %}{% set ns.is_first_sp = false %}\
{%- else %}{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}\
{%- endif %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}\
{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}\
{{ '<|User|>' + message['content'] }}{%- endif %}\
{%- if message['role'] == 'assistant' and message['content'] is not none %}{%- if ns.is_tool %}\
{{ '<|tool_end|>' + message['content'] + '<eos>' }}{%- set ns.is_tool = false -%}{%- else %}\
{% set content = message['content'] %}{% if '</think>' in content %}\
{% set content = content.split('</think>')[-1] %}{% endif %}\
{{ '<|Assistant|>' + content + '<eos>' }}{%- endif %}{%- endif %}\
{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}\
{{ '<|tool_begin|>' + message['content'] }}{%- endif %}{%- endfor -%}\
{% if ns.is_tool %}{{ '<|tool_end|>' }}{% endif %}\
{% if add_generation_prompt and not ns.is_tool %}{{ '<|Assistant|>' }}{% endif %}"""
GLM = """\
[gMASK]<sop>
{%- if tools -%}
<|system|>
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
{%- endif -%}
{%- macro visible_text(content) -%}
    {%- if content is string -%}
        {{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}{{- item.text }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{- content }}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.last_user_index = loop.index0 -%}{%- endif %}
{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set reasoning_content = '' %}
{%- set content = visible_text(m.content) %}
{%- if m.reasoning_content is string %}{%- set reasoning_content = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > ns.last_user_index and reasoning_content -%}
{{ '\\n<think>' + reasoning_content.strip() + '</think>' }}
{%- else -%}{{ '\\n<think></think>' }}{%- endif -%}
{%- if content.strip() -%}{{ '\\n' + content.strip() }}{%- endif -%}
{% if m.tool_calls %}{% for tc in m.tool_calls %}
{%- if tc.function %}{%- set tc = tc.function %}{%- endif %}
{{ '\\n<tool_call>' + tc.name }}{% set _args = tc.arguments %}
{% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}</tool_call>{% endfor %}{% endif %}
{%- elif m.role == 'tool' -%}
{%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}
    {{- '<|observation|>' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
{%- elif m.role == 'system' -%}<|system|>
{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>
{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}"""
CALLS = [
    *TALK[:2],
    log(
        "assistant",
        "let me see",
        reasoning_content="hm",
        tool_calls=[
            {"type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": "x"}}}
        ],
    ),
    log("tool", "42"),
    log("assistant", "it is 42"),
]


@pytest.mark.parametrize("text", [DEEPSEEK, GLM], ids=["deepseek", "glm"])
@pytest.mark.parametrize("messages", [TALK, CALLS], ids=["talk", "calls"])
def test_the_constructs_of_deepseek_and_glm(text, messages):
    tokenizer = tokenizer_with(("<|user|>", "<|assistant|>", "<|User|>", "<|Assistant|>"))
    for generation in (False, True):
        tokenizer.chat_template = text
        expected = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation
        )
        assert render_text(tokenizer, messages, None, generation) == expected
        assert "one" in expected


def test_turns_of_deepseeks_template_are_trained_with_their_end():
    tokenizer = tokenizer_with(("<|User|>", "<|Assistant|>"))
    tokenizer.chat_template = DEEPSEEK
    [rendering] = Renderer(tokenizer)(TALK, None, [2, 4])
    assert marked(tokenizer, rendering) == {2: "first<eos>", 4: "second<eos>"}
