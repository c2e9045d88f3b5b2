"""Masks are compared with what a reader of the text would mark, in all kinds of templates."""

import copy
import importlib.util
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from jaxtrain.data.chat import named_templates, template
from jaxtrain.data.chat.messages import read_messages
from jaxtrain.data.chat.prompt import prompt_tokens
from jaxtrain.data.chat.template import (
    Renderer,
    TemplateFailed,
    TemplateOmission,
    load_tokenizer,
)
from jaxtrain.data.sources.calculator import CalculatorRows
from jaxtrain.errors import UserError

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("JAXTRAIN_TEST_DATA", ROOT.parent / "shared" / "data"))

# Drops the thinking of all turns before the last user message, as Qwen3's own template does.
FORGETFUL = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last %}
{{- '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}
{{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Opens the thinking in the generation prompt, which a turn without thinking does not show.
OPENING = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
{{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>' }}{% endif %}"""

PLAIN = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def log(role, content, **extra):
    return {"role": role, "content": content, **extra}


TALK = [
    log("system", "S"),
    log("user", "one"),
    log("assistant", "first", reasoning_content="hm"),
    log("user", "two"),
    log("assistant", "second", reasoning_content="so"),
]


@pytest.fixture(scope="module")
def shipped():
    return load_tokenizer("builtin")


def with_template(text):
    tokenizer = load_tokenizer("builtin")
    tokenizer.chat_template = text
    return tokenizer


def marked(tokenizer, rendering):
    """The text of each marked stretch, by the message it belongs to."""
    actual = {}
    for index in sorted(set(rendering.author.tolist()) - {-1}):
        places = np.flatnonzero(rendering.author == index)
        assert (np.diff(places) == 1).all()
        actual[index] = tokenizer.decode(rendering.tokens[places].tolist())
    return actual


def test_shipped_tokenizer_is_what_the_script_makes(tmp_path):
    spec = importlib.util.spec_from_file_location("maker", ROOT / "scripts" / "make_tokenizer.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    maker.write(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (named_templates.BUILTIN / name).read_bytes(), name


def test_shipped_tokenizer(shipped):
    assert len(shipped) == 512
    assert len(shipped("1234567890")["input_ids"]) == 10
    for text in ("<think>", "</tool_call>", "<tool_response>", "<|im_end|>", "<|endoftext|>"):
        assert len(shipped(text)["input_ids"]) == 1
    text = 'Any text: naïve café 数学 \t {"a": [1, 2]}\n\n🙂'
    assert shipped.decode(shipped(text)["input_ids"]) == text
    assert template.end_of_turn_ids(shipped) == {shipped.eos_token_id}
    # Mark-up survives where control tokens are left out.
    ids = shipped("<think>a</think><|im_end|>")["input_ids"]
    assert shipped.decode(ids, skip_special_tokens=True) == "<think>a</think>"


def test_shipped_template_has_the_prefix_property(shipped):
    for row in CalculatorRows(30):
        messages = read_messages(row["messages"], {}, {})
        rendered = [
            shipped(template.render_text(shipped, messages[:i], row["tools"]))["input_ids"]
            for i in range(2, len(messages) + 1)
        ]
        for shorter, longer in zip(rendered, rendered[1:], strict=False):
            assert longer[: len(shorter)] == shorter


def test_every_assistant_turn_with_its_end(shipped):
    [rendering] = Renderer(shipped)(TALK, None, [2, 4])
    assert marked(shipped, rendering) == {
        2: "<think>hm</think>\nfirst<|im_end|>",
        4: "<think>so</think>\nsecond<|im_end|>",
    }
    assert rendering.tokens.tolist() == shipped(template.render_text(shipped, TALK))["input_ids"]


def test_other_roles_train_when_asked(shipped):
    [rendering] = Renderer(shipped)(TALK, None, [0, 1])
    texts = marked(shipped, rendering)
    assert texts[0] == "<|im_start|>system\nS<|im_end|>\n"
    assert texts[1] == "<|im_start|>user\none<|im_end|>\n"


def test_prompt_of_a_turn_is_what_inference_sees(shipped):
    for row in CalculatorRows(20):
        messages = read_messages(row["messages"], {}, {})
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        [rendering] = Renderer(shipped)(messages, row["tools"], turns)
        for turn in turns:
            start = int(np.flatnonzero(rendering.author == turn)[0])
            prompt = prompt_tokens(shipped, messages[:turn], row["tools"])
            assert rendering.tokens[:start].tolist() == prompt


def test_rewritten_history_gives_a_rendering_for_each_form():
    tokenizer = with_template(FORGETFUL)
    full, early = Renderer(tokenizer)(TALK, None, [2, 4])
    assert marked(tokenizer, full) == {4: "<think>so</think>second<|im_end|>"}
    assert marked(tokenizer, early) == {2: "<think>hm</think>first<|im_end|>"}
    assert tokenizer.decode(early.tokens.tolist()) == template.render_text(tokenizer, TALK[:3])


def test_rewritten_history_each_turn_trains_once():
    tokenizer = with_template(FORGETFUL)
    talk = [log("system", "S")]
    for number in range(4):
        talk.append(log("user", f"q{number}"))
        talk.append(log("assistant", f"a{number}", reasoning_content=f"r{number}"))
        if number % 2:
            talk.append(log("tool", f"t{number}"))
            talk.append(log("assistant", f"b{number}", reasoning_content=f"s{number}"))
    turns = [i for i, m in enumerate(talk) if m["role"] == "assistant"]
    renderings = Renderer(tokenizer)(talk, None, turns)
    actual = [index for rendering in renderings for index in marked(tokenizer, rendering)]
    assert sorted(actual) == turns and len(renderings) == 4
    for rendering in renderings:
        for index, text in marked(tokenizer, rendering).items():
            start = int(np.flatnonzero(rendering.author == index)[0])
            prompt = prompt_tokens(tokenizer, talk[:index])
            assert rendering.tokens[:start].tolist() == prompt
            assert text.endswith("<|im_end|>") and talk[index]["reasoning_content"] in text


def test_generation_prompt_that_the_turn_does_not_show():
    tokenizer = with_template(OPENING)
    talk = [log("user", "one"), log("assistant", "first")]
    [rendering] = Renderer(tokenizer)(talk, None, [1])
    assert marked(tokenizer, rendering) == {1: "first<|im_end|>"}
    talk[1]["reasoning_content"] = "hm"
    [rendering] = Renderer(tokenizer)(talk, None, [1])
    # The opening of the thinking stands in the prompt, so the model does not write it.
    assert marked(tokenizer, rendering) == {1: "hm</think>first<|im_end|>"}


def test_what_follows_a_prompt_is_tokenized_apart(shipped):
    """A generation prompt that ends within a word: the whole is one token, a sampler draws two."""
    joined, parts = shipped("user")["input_ids"], [shipped(p)["input_ids"] for p in ("us", "er")]
    assert joined != parts[0] + parts[1]
    header = "'<|im_start|>assistant\\n"
    tokenizer = with_template(PLAIN.replace(header, header + "us"))
    [rendering] = Renderer(tokenizer)([log("user", "one"), log("assistant", "user")], None, [1])
    assert marked(tokenizer, rendering) == {1: "er<|im_end|>"}
    start = int(np.flatnonzero(rendering.author == 1)[0])
    prompt = prompt_tokens(tokenizer, [log("user", "one")])
    assert rendering.tokens[:start].tolist() == prompt
    assert rendering.tokens[start:-2].tolist() == parts[1]
    [rendering] = Renderer(tokenizer)([log("user", "one"), log("assistant", "us.")], None, [1])
    assert marked(tokenizer, rendering) == {1: ".<|im_end|>"}


def test_tokenizer_that_treats_the_start_of_a_text_specially():
    """Pieces tokenized alone would all begin with a space; whole prefixes do not."""
    tokenizer = with_template(PLAIN.replace("<|im_start|>", ""))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("_", "first")
    talk = [log("user", "a"), log("assistant", "b"), log("user", "a"), log("assistant", "b")]
    assert tokenizer("a")["input_ids"] != tokenizer(" a", add_special_tokens=False)["input_ids"][1:]
    [rendering] = Renderer(tokenizer)(talk, None, [1, 3])
    assert marked(tokenizer, rendering) == {1: "b<|im_end|>", 3: "b<|im_end|>"}


def test_turn_without_any_end_gets_eos():
    tokenizer = with_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    talk = [log("user", "a"), log("assistant", "b"), log("user", "c"), log("assistant", "d")]
    last, first = Renderer(tokenizer)(talk, None, [1, 3])
    assert marked(tokenizer, last) == {3: "assistant: d\n<|im_end|>"}
    assert marked(tokenizer, first) == {1: "assistant: b\n<|im_end|>"}
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="never learn to stop.*"):
        Renderer(tokenizer)(talk, None, [1])


@pytest.mark.parametrize(
    "text, message, part",
    [
        (PLAIN, log("assistant", "a", reasoning_content="because"), "reasoning_content"),
        (
            PLAIN,
            log("assistant", "a", tool_calls=[{"function": {"name": "f", "arguments": {}}}]),
            "tool_calls",
        ),
    ],
)
def test_template_that_leaves_out_a_part(text, message, part):
    with pytest.raises(TemplateOmission, match=part):
        Renderer(with_template(text))([log("user", "x"), message], None, [1])


def test_template_that_leaves_out_tools():
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": {}}}]
    with pytest.raises(TemplateOmission, match="tools"):
        Renderer(with_template(PLAIN))([log("user", "x"), log("assistant", "a")], tools, [1])


def test_template_that_refuses_the_messages():
    tokenizer = with_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateFailed, match="roles must alternate"):
        Renderer(tokenizer)(TALK, None, [2])


def test_renderer_pickles(shipped):
    payload = pickle.loads(pickle.dumps(Renderer(shipped)))
    local_copy, reference = Renderer(shipped)(TALK, None, [2]), payload(TALK, None, [2])
    assert (local_copy[0].tokens == reference[0].tokens).all()


def test_messages_are_not_changed(shipped):
    talk = copy.deepcopy(TALK)
    Renderer(shipped)(talk, None, [2, 4])
    assert talk == TALK


def test_missing_tokenizer(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load_tokenizer(str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="no tokenizer in"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(UserError, match="cannot load the tokenizer"):
        load_tokenizer("nobody/nothing-here")


def test_chat_template_from_a_file(tmp_path, shipped):
    file = tmp_path / "t.jinja"
    file.write_text(PLAIN)
    assert load_tokenizer("builtin", str(file)).chat_template == PLAIN
    with pytest.raises(UserError, match="no such file"):
        load_tokenizer("builtin", str(tmp_path / "missing.jinja"))


def test_no_chat_template(shipped):
    tokenizer = with_template(None)
    with pytest.raises(UserError, match="model.chat_template"):
        Renderer(tokenizer)


@pytest.mark.slow
def test_qwen2_tokenizer():
    folder = DATA / "qwen2_tokenizer"
    if not folder.exists():
        pytest.skip(f"no {folder}")
    tokenizer = load_tokenizer(str(folder))
    # Written down in the README of that folder.
    assert tokenizer("Hello, world!")["input_ids"] == [9707, 11, 1879, 0]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in template.turn_ends(tokenizer).closing
    [rendering] = Renderer(tokenizer)([log("user", "a"), log("assistant", "数学 naïve")], None, [1])
    assert marked(tokenizer, rendering) == {1: "数学 naïve<|im_end|>"}
    with pytest.raises(TemplateOmission):
        Renderer(tokenizer)(TALK, None, [2, 4])
    second = load_tokenizer(str(folder), "builtin")
    [rendering] = Renderer(second)(TALK, None, [2, 4])
    assert marked(second, rendering)[4] == "<think>so</think>\nsecond<|im_end|>"


def test_slow_tokenizer_is_refused(monkeypatch, tmp_path):
    class Slow:
        is_fast = False

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *a, **k: Slow())
    with pytest.raises(UserError, match=r"slow one \(Slow\)"):
        load_tokenizer("someone/something")


def test_cutting_and_filling_up_in_tokenizer_json_is_ignored(tmp_path, shipped):
    shipped.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert len(template.encode(load_tokenizer(str(tmp_path)), "1234567890")) == 10
