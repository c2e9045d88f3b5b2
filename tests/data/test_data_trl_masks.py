"""Trained positions beside TRL's assistant masks: its training templates, and own ones with the
structure of families that it has none for. docs/data.md has the table."""

import functools
import importlib.util
import os
import re
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.data.chat.control_tokens import add_tokens
from jaxtrain.data.chat.prompt import prompt_tokens
from jaxtrain.data.chat.template import (
    Renderer,
    TemplateOmission,
    load_tokenizer,
)

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("JAXTRAIN_TEST_DATA", ROOT.parent / "shared" / "data"))
FOLDER = DATA / "qwen2_tokenizer"
TRL = importlib.util.find_spec("trl")
pytestmark = pytest.mark.skipif(
    not FOLDER.exists(), reason=f"no {FOLDER}; JAXTRAIN_TEST_DATA names the folder"
)
CONTROL = re.compile(
    r"<\|[\w ]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>|\[/?INST\]"
)


def log(role, content, **extra):
    return {"role": role, "content": content, **extra}


def without_thoughts(messages):
    return [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]


CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": {"a": 1}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "d", "parameters": SCHEMA}}
]
THINK = [
    log("user", "one"),
    log("assistant", "first", reasoning_content="hm"),
    log("user", "two"),
    log("assistant", "second", reasoning_content="so"),
]
AGENT = [
    log("user", "one"),
    log("assistant", "", reasoning_content="hm", tool_calls=[CALL]),
    log("tool", "42", name="add", tool_call_id="abcdefghi"),
    log("assistant", "It is 42", reasoning_content="so"),
]
ROWS = {
    "talk": ([log("system", "S"), *without_thoughts(THINK)], None),
    "thoughts": (THINK, None),
    "tools": (without_thoughts(AGENT), TOOLS),
    "calls": (without_thoughts(AGENT), None),
    "tools, thoughts": (AGENT, TOOLS),
}
EVERYTHING = ("talk", "thoughts", "tools", "tools, thoughts")
TRAINED = {
    # What TRL trains before and behind each turn, besides the turn itself.
    "llama3": (("",), "", ("talk",)),
    "phi3_5": (("",), "\n", ("talk",)),
    "cohere": (("",), "", ("talk",)),
    "cohere2": (("",), "", ("talk",)),
    "qwen2_5": (("\n",), "\n", ("talk", "tools")),
    "qwen3": (("",), "\n", EVERYTHING),
    "qwen3_5_think": (("<think>\n",), "\n", EVERYTHING),
    "gemma3": (("",), "\n", ("talk",)),
    "glm4moe": (("",), "", ("talk", "tools", "tools, thoughts")),
    "deepseekv3": (("<｜Assistant｜>", "<｜tool▁outputs▁end｜>"), "", ("talk", "calls")),
}
LEFT_OUT = {
    "llama3": ("thoughts", "tools"),
    "phi3_5": ("thoughts", "tools"),
    "cohere2": ("thoughts",),
    "qwen2_5": ("thoughts",),
    "gemma3": ("thoughts",),
    "deepseekv3": ("thoughts", "tools"),
}
"""Rows of which a template writes a part nowhere; TRL trains the rest."""


@functools.cache
def open_tokenizer():
    tokenizer = load_tokenizer(str(FOLDER))
    texts = [read(name) for name in TRAINED] if TRL else []
    controls = sorted({c for text in (*texts, *MARKED.values()) for c in CONTROL.findall(text)})
    thoughts = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    add_tokens(tokenizer, thoughts, controls, {"bos_token": "<bos>"})
    return tokenizer


def read(name):
    return (Path(TRL.origin).parent / "chat_templates" / f"{name}.jinja").read_text("utf-8")


def spans(tokens, mask):
    """Texts of the stretches of trained tokens."""
    edges = np.flatnonzero(np.diff([0, *map(int, mask), 0])).reshape(-1, 2)
    return [open_tokenizer().decode(tokens[start:stop]) for start, stop in edges.tolist()]


def of_us(template, messages, tools):
    """Renderings with a template, the longest first."""
    tokenizer = open_tokenizer()
    tokenizer.chat_template = template
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return Renderer(tokenizer)(messages, tools, turns)


def of_trl(template, messages, tools):
    """(tokens, mask) of the one rendering with markers of generation."""
    rendered = open_tokenizer().apply_chat_template(
        messages,
        tools=tools,
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return rendered["input_ids"], np.array(rendered["assistant_masks"], bool)


@pytest.mark.skipif(TRL is None, reason="this environment has no TRL")
@pytest.mark.parametrize("name", TRAINED)
def test_turns_are_trls_but_for_what_a_model_never_draws(name):
    openings, closing, kinds = TRAINED[name]
    for kind in kinds:
        messages, tools = ROWS[kind]
        ours = of_us(read(f"{name}_training"), messages, tools)
        turns = [turn for r in ours for turn in spans(r.tokens.tolist(), r.author >= 0)]
        tokens, mask = of_trl(read(f"{name}_training"), messages, tools)
        reference = spans(tokens, mask)
        assert len(reference) == len(turns) == 2, kind
        if name == "phi3_5":  # and an eos behind the last turn, which has ended
            reference[-1] = reference[-1].removesuffix(open_tokenizer().eos_token)
        for turn, theirs in zip(turns, reference, strict=True):
            assert theirs in [f"{opening}{turn}{closing}" for opening in openings], kind
        if openings == ("",) and not closing:
            assert len(ours) == 1 and ours[0].tokens.tolist() == tokens
            assert ((ours[0].author >= 0) == mask).all(), "position by position"
        # The model's own template trains the same turns, each behind the prompt of inference.
        seen = {}
        for rendering in of_us(read(name), messages, tools):
            for index in set(rendering.author.tolist()) - {-1}:
                start, *_, stop = np.flatnonzero(rendering.author == index).tolist()
                prompt = prompt_tokens(open_tokenizer(), messages[:index], tools)
                shown, asked = map(
                    open_tokenizer().decode, (rendering.tokens[:start].tolist(), prompt)
                )
                if name == "deepseekv3":  # whose turns have no thought that the prompt opens
                    asked = asked.removesuffix("<think>\n")
                assert shown == asked, (kind, index)
                seen[index] = open_tokenizer().decode(rendering.tokens[start : stop + 1].tolist())
        assert [seen[index] for index in sorted(seen)] == turns, kind


@pytest.mark.skipif(TRL is None, reason="this environment has no TRL")
@pytest.mark.parametrize("name", LEFT_OUT)
def test_rows_that_a_template_cannot_write_are_trained_by_trl_alone(name):
    for kind in LEFT_OUT[name]:
        messages, tools = ROWS[kind]
        with pytest.raises(TemplateOmission, match="leaves out"):
            of_us(read(name), messages, tools)
        assert of_trl(read(f"{name}_training"), messages, tools)[1].any()


@pytest.mark.skipif(TRL is None, reason="this environment has no TRL")
def test_trl_shows_other_histories_than_inference():
    """Qwen3's own template drops the thoughts of earlier turns, GLM's a thought that trains."""
    messages, _ = ROWS["thoughts"]
    tokens, _ = of_trl(read("qwen3_training"), messages, None)
    open_tokenizer().chat_template = read("qwen3")
    prompt = prompt_tokens(open_tokenizer(), messages[:3])
    assert tokens[: len(prompt)] != prompt and len(of_us(read("qwen3"), messages, None)) == 2
    tokens, mask = of_trl(read("glm4moe_training"), messages, None)
    assert "hm" not in "".join(spans(tokens, mask))
    ours = of_us(read("glm4moe"), messages, None)
    turns = {turn for r in ours for turn in spans(r.tokens.tolist(), r.author >= 0)}
    assert turns == {
        f"\n<think>{t}</think>\n{c}<|user|>" for t, c in (("hm", "first"), ("so", "second"))
    }


START, END = "{% generation %}", "{% endgeneration %}"
CHATML_CALLS = (
    "{% for t in m.tool_calls or [] %}<tool_call>\n{{ t.function | tojson }}\n</tool_call>"
    "{% endfor %}"
)
MARKED = {
    "hermes": "{{ bos_token }}{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}"
    "<|im_end|>\n{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}"
    f"<|im_start|>assistant\n{START}{{{{ m.content }}}}{CHATML_CALLS}<|im_end|>{END}{{{{ '\n' }}}}"
    "{% elif m.role == 'tool' %}<|im_start|>tool\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "smollm2": "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system"
    "\nYou are SmolLM<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n"
    f"{{% if m.role == 'assistant' %}}{START}{{{{ m.content }}}}<|im_end|>{END}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "smollm3": "<|im_start|>system\n{{ messages[0].content if messages[0].role == 'system' }}"
    "{% if tools %}{{ tools | tojson }}{% endif %}<|im_end|>\n{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    f"{START}{{% if m.reasoning_content %}}<think>\n{{{{ m.reasoning_content }}}}\n</think>\n"
    f"{{% endif %}}{{{{ m.content }}}}{CHATML_CALLS}<|im_end|>{END}{{{{ '\n' }}}}"
    "{% elif m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama3.1": "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    "{{ tools | tojson }}<|eot_id|>{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}"
    f"<|start_header_id|>assistant<|end_header_id|>\n\n{START}{{% if m.tool_calls %}}"
    "{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}<|eot_id|>"
    f"{END}{{% else %}}<|start_header_id|>{{{{ 'ipython' if m.role == 'tool' else m.role }}}}"
    "<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "mistral": "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    f"{START}{{% if m.tool_calls %}}[TOOL_CALLS]{{{{ m.tool_calls[0].function | tojson }}}}"
    f"{{% else %}}{{{{ m.content }}}}{{% endif %}}{{{{ eos_token }}}}{END}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}",
}
"""Structures of families, with markers around what a model draws."""


@pytest.mark.parametrize("name", MARKED)
def test_masks_of_marked_templates(name):
    kinds = ["talk"] if name == "smollm2" else ["talk", "tools"]
    for kind in kinds + (["thoughts", "tools, thoughts"] if name == "smollm3" else []):
        messages, tools = ROWS[kind]
        tokens, mask = of_trl(MARKED[name], messages, tools)
        plain = MARKED[name].replace(START, "").replace(END, "")
        (rendering,) = of_us(plain, messages, tools)
        assert rendering.tokens.tolist() == tokens and mask.sum() >= 4
        assert ((rendering.author >= 0) == mask).all(), kind
