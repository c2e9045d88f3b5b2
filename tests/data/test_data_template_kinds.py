"""Masks, ends and omissions with templates built as those of well-known models."""

import json
import shutil

import numpy as np
import pytest

from jaxtrain.config import ModelConfig
from jaxtrain.config.data import DatasetConfig
from jaxtrain.core.architecture import find_tokenizer
from jaxtrain.data.chat import template
from jaxtrain.data.chat.control_tokens import add_tokens
from jaxtrain.data.chat.named_templates import BUILTIN
from jaxtrain.data.chat.prompt import prompt_tokens
from jaxtrain.data.chat.template import Renderer, TemplateOmission, load_tokenizer
from jaxtrain.data.chat.tokenize import RowTokenizer
from jaxtrain.data.sample import Dropped, Sample
from jaxtrain.environments.single_turn import SingleTurn
from jaxtrain.environments.token_history import TokenHistory, TurnTemplate
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Completion

# Each template has the structure of the family's own, in as few words as possible.
MISTRAL = (  # the system message moves into the newest question
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set sys = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}{% if loop.last and sys is defined %}"
    "[INST]{{ sys }}\n\n{{ m.content }}[/INST]{% else %}[INST]{{ m.content }}[/INST]{% endif %}"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
GEMMA4 = (  # the generation prompt has an empty thought, a call has none
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|turn>model\n{% if m.tool_calls %}{% for t in m.tool_calls %}"
    "<|tool_call>call:{{ t.function.name }}{{ t.function.arguments | tojson }}<tool_call|>"
    "{% endfor %}{% else %}<|channel>thought\n<channel|>{{ m.content }}<turn|>\n{% endif %}"
    "{% else %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n<|channel>thought\n<channel|>{% endif %}"
)
GLM = (  # nothing ends a turn but the next message
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% for t in m.tool_calls or [] %}<tool_call>{{ t.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
QWEN35 = (  # every turn behind the last question has a thought, if only an empty one
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n"
    "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% if"
    " enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
DEEPSEEK = (  # joins texts with arguments, and looks for a content of none
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'tool' %}<|tool|>{{ m.content }}{% elif m.content is none %}<|Assistant|>"
    "{% for t in m.tool_calls %}{{ '<|call|>' + t.function.name + '\n```json\n'"
    " + t.function.arguments + '\n```' }}{% endfor %}{{ eos_token }}{% else %}"
    "<|Assistant|>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
TWO_ENDS = (  # a call ends otherwise than an answer, as <|eom_id|> of Llama 3.1
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% if m.tool_calls %}{% for t in m.tool_calls %}<tool_call>"
    "{{ t.function | tojson }}</tool_call>{% endfor %}<|endoftext|>{% else %}<|im_end|>{% endif %}"
    "\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HARMONY = (  # the last answer ends with <|return|>, the same one in a history with <|end|>
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}<|start|>assistant"
    "<|channel|>commentary to=functions.{{ m.tool_calls[0].function.name }}<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}<|start|>assistant"
    "<|channel|>final<|message|>{{ m.content }}{% if loop.last %}<|return|>{% else %}<|end|>"
    "{% endif %}{% endif %}{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
PHI3 = (  # an eos behind the last message alone, whose turn has ended before
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
FORGETFUL = (  # a thought behind the last question, and the next message ends a turn (GLM 4.5)
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<think>"
    "{{ (m.reasoning_content or '') if loop.index0 > ns.last else '' }}</think>{% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ANALYSIS = (  # an answer takes the thoughts before it away, as gpt-oss does
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.reasoning_content and"
    " (loop.last or m.tool_calls and messages[-1].role != 'assistant') %}<|start|>assistant"
    "<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>{% endif %}"
    "<|start|>assistant{% if m.tool_calls %}<|channel|>commentary<|message|>"
    "{{ m.tool_calls[0].function | tojson }}<|call|>{% else %}<|channel|>final<|message|>"
    "{{ m.content }}<|return|>{% endif %}{% else %}<|start|>{{ m.role }}<|message|>"
    "{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
SILENT = (  # writes no tools, no results and no system message
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
    "{% for t in m.tool_calls or [] %}<tool_call>{{ t.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SWITCH = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and"
    " enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if"
    " enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
CONTROLS = {
    GEMMA4: ("<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>"),
    MISTRAL: ("[INST]", "[/INST]", "<s>"),
    GLM: ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|tool|>", "<|system|>"),
    DEEPSEEK: ("<|User|>", "<|Assistant|>", "<|tool|>", "<|call|>"),
    HARMONY: ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
    ANALYSIS: ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
    PHI3: ("<|user|>", "<|assistant|>", "<|end|>"),
    FORGETFUL: ("<|user|>", "<|assistant|>"),
}


def log(role, content, **extra):
    return {"role": role, "content": content, **extra}


def tool_call(name="f", **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def load(text):
    tokenizer = load_tokenizer("builtin")
    add_tokens(tokenizer, (), CONTROLS.get(text, ()))
    tokenizer.chat_template = text
    return tokenizer


def trained(tokenizer, messages, tools=None, turns=None, **options):
    """[(context before the turn, what trains)] of each of the assistant's turns, by renderings."""
    turns = turns or [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    parts = []
    for rendering in Renderer(tokenizer, **options)(messages, tools, turns):
        for index in sorted(set(rendering.author.tolist()) - {-1}):
            places = np.flatnonzero(rendering.author == index)
            assert (np.diff(places) == 1).all()
            context, turn = rendering.tokens[: places[0]], rendering.tokens[places]
            parts.append((tokenizer.decode(context.tolist()), tokenizer.decode(turn.tolist())))
    return parts


def test_a_system_message_that_moves_on_gives_a_branch_for_each_question():
    tokenizer = load(MISTRAL)
    bos = tokenizer.bos_token or ""
    talk = [log("system", "S"), log("user", "one"), log("assistant", "a"), log("user", "two")]
    talk.append(log("assistant", "b"))
    assert trained(tokenizer, talk) == [
        (f"{bos}[INST]one[/INST]a<|im_end|>[INST]S\n\ntwo[/INST]", "b<|im_end|>"),
        (f"{bos}[INST]S\n\none[/INST]", "a<|im_end|>"),
    ]
    for index in (2, 4):
        prompt = prompt_tokens(tokenizer, talk[:index])
        contexts = [context for context, _ in trained(tokenizer, talk, turns=[index])]
        assert contexts == [tokenizer.decode(prompt)]
    assert len(Renderer(tokenizer)(talk[1:], None, [1, 3])) == 1


def test_a_turn_that_differs_from_its_prompt_trains_from_a_whole_token_on():
    tokenizer = load(GEMMA4)
    talk = [log("user", "q"), log("assistant", "", tool_calls=[tool_call(x=1)]), log("tool", "7")]
    talk.append(log("assistant", "It is 7"))
    assert trained(tokenizer, talk) == [
        (
            "<|turn>user\nq<turn|>\n<|turn>model\n",
            '<|tool_call>call:f{"x": 1}<tool_call|>',
        ),
        (
            '<|turn>user\nq<turn|>\n<|turn>model\n<|tool_call>call:f{"x": 1}<tool_call|>'
            "<|turn>tool\n7<turn|>\n<|turn>model\n<|channel>thought\n<channel|>",
            "It is 7<turn|>",
        ),
    ]


def test_turns_without_an_end_end_with_the_next_message():
    tokenizer = load(GLM)
    talk = [log("user", "q"), log("assistant", "a"), log("user", "r"), log("assistant", "b")]
    start = "[gMASK]<sop><|user|>\nq<|assistant|>\n"
    assert trained(tokenizer, talk) == [
        (start, "a<|user|>"),
        (f"{start}a<|user|>\nr<|assistant|>\n", "b<|user|>"),
    ]
    talk[1] = log("assistant", "", tool_calls=[tool_call()])
    talk[2] = log("tool", "7")
    assert [turn.rpartition("<")[2] for _, turn in trained(tokenizer, talk)] == [
        "|tool|>",
        "|user|>",
    ]
    ids = tokenizer.convert_tokens_to_ids(["<|user|>", "<|tool|>", "<|im_end|>"])
    assert template.end_of_turn_ids(tokenizer) == set(ids)


def test_an_eos_behind_the_last_message_alone_is_no_part_of_its_turn():
    tokenizer = load(PHI3)
    talk = [log("user", "q"), log("assistant", "a")]
    assert trained(tokenizer, talk) == [("<|user|>\nq<|end|>\n<|assistant|>\n", "a<|end|>")]
    for turns in (2, 5):  # located turn by turn, and all at once
        renderings = Renderer(tokenizer)(talk * turns, None, range(1, 2 * turns, 2))
        assert len(renderings) == 1
        assert [turn for _, turn in trained(tokenizer, talk * turns)] == ["a<|end|>"] * turns
    ids = set(tokenizer.convert_tokens_to_ids(["<|end|>", "<|im_end|>"]))
    assert template.end_of_turn_ids(tokenizer) == ids


def test_a_thought_that_the_next_message_takes_away_hides_no_end():
    tokenizer = load(FORGETFUL)
    talk = [log("user", "q"), log("assistant", "a", reasoning_content="t")]
    turns = [turn for _, turn in trained(tokenizer, talk * 2)]
    assert turns == ["<think>t</think>a<|user|>"] * 2


def test_an_answer_that_takes_earlier_thoughts_away_trains_behind_its_prompt():
    tokenizer = load(ANALYSIS)
    turn = log("assistant", "", reasoning_content="t", tool_calls=[tool_call()])
    talk = [log("user", "q"), turn, log("tool", "7"), log("assistant", "a", reasoning_content="u")]
    parts = {turn: context for context, turn in trained(tokenizer, talk)}
    answer = "<|channel|>analysis<|message|>u<|end|><|start|>assistant<|channel|>final<|message|>a"
    assert f"{answer}<|return|>" in parts and len(parts) == 2
    assert "analysis<|message|>t<|end|>" in parts[f"{answer}<|return|>"], "as it is asked"


def test_a_conversation_goes_on_behind_the_token_that_was_drawn():
    """The template writes the drawn token no second time, and one of the next message once."""
    tokenizer = load(GLM)
    for end in ("<|user|>", "<|im_end|>"):
        history = TokenHistory(TurnTemplate(tokenizer))
        talk = [log("user", "q"), log("assistant", "a"), log("user", "r")]
        prompt = history.prepare(talk[:1], {}, None)
        drawn = template.encode(tokenizer, f"a{end}")
        history.add(prompt, Completion(drawn, [0.0] * len(drawn), "stop"))
        text = tokenizer.decode(history.prepare(talk, {1: 0}, None).tokens)
        between = "" if end == "<|user|>" else "<|user|>"
        start = "[gMASK]<sop><|user|>\nq<|assistant|>\n"
        assert text == f"{start}a{end}{between}\nr<|assistant|>\n"


def test_turns_without_thoughts_train_behind_a_prompt_that_opens_one():
    tokenizer = load(QWEN35)
    talk = [log("user", "q"), log("assistant", "a")]
    prompt = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert trained(tokenizer, talk) == [(prompt, "\n</think>\n\na<|im_end|>")]
    # Without thinking the prompt closes the thought, too.
    options = {"kwargs": {"enable_thinking": False}}
    assert trained(tokenizer, talk, **options) == [(prompt + "\n</think>\n\n", "a<|im_end|>")]


def test_an_answer_that_begins_with_a_line_break_is_what_a_sampler_draws():
    tokenizer = load(None)
    tokenizer.chat_template = SILENT
    for merge in ("\n\n", "\n\n\n"):
        tokenizer.add_tokens([merge])  # longest match wins, as merges of a large vocabulary do
    talk = [log("user", "q"), log("assistant", "\n\nfirst")]
    prompt = prompt_tokens(tokenizer, talk[:1])
    [rendering] = Renderer(tokenizer)(talk, None, [1])
    drawn = rendering.tokens[rendering.author == 1].tolist()
    assert rendering.tokens[: len(prompt)].tolist() == prompt
    assert drawn[:-1] == template.encode(tokenizer, "\n\nfirst")


def test_arguments_are_text_where_the_template_joins_it():
    tokenizer = load(DEEPSEEK)
    talk = [log("user", "q"), log("assistant", "", tool_calls=[tool_call("look", city="Köln")])]
    bos = tokenizer.bos_token or ""
    assert trained(tokenizer, talk) == [
        (f"{bos}<|User|>q<|Assistant|>", '<|call|>look\n```json\n{"city": "Köln"}\n```<|im_end|>')
    ]
    spoken = [log("user", "q"), log("assistant", "<think>because</think>a")]
    with pytest.raises(TemplateOmission, match="the thought in a content"):
        Renderer(tokenizer)(spoken, None, [1])


def test_every_end_of_a_turn_stops_a_sampler():
    tokenizer = load(TWO_ENDS)
    ids = set(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    assert template.end_of_turn_ids(tokenizer) == ids
    assert TurnTemplate(tokenizer).ends == tuple(sorted(ids))
    tokenizer = load(HARMONY)
    names = ["<|return|>", "<|call|>", "<|im_end|>"]  # <|end|> goes on to another channel
    assert template.end_of_turn_ids(tokenizer) == set(tokenizer.convert_tokens_to_ids(names))
    talk = [log("user", "q"), log("assistant", "a"), log("user", "r"), log("assistant", "b")]
    ends = [turn.rpartition("<")[2] for _, turn in trained(tokenizer, talk)]
    assert ends == ["|return|>", "|return|>"]  # in a rendering of its own each


def test_generation_config_names_further_ends(tmp_path):
    folder = shutil.copytree(BUILTIN, tmp_path / "tokenizer")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 5, 9999, -1, -7]})
    )
    tokenizer = load_tokenizer(str(folder))
    assert {2, 5} <= template.end_of_turn_ids(tokenizer)
    assert {2, 5} <= template.end_of_turn_ids(tokenizer, raw=True)
    assert not {9999, -1, -7} & template.end_of_turn_ids(tokenizer)


TOOLS = [{"type": "function", "function": {"name": "hi", "parameters": {"type": "object"}}}]
QUESTION, ANSWER = log("user", "say hi to me"), log("assistant", "7")


@pytest.mark.parametrize(
    "messages, tools, part",
    [
        ([QUESTION, ANSWER], TOOLS, "tools"),
        ([log("system", "7"), QUESTION, ANSWER], None, "the system message"),
        ([log("developer", "7"), QUESTION, ANSWER], None, "the developer's message"),
        (
            [
                QUESTION,
                log("assistant", "", tool_calls=[tool_call("hi")]),
                log("tool", "7"),
                ANSWER,
            ],
            None,
            "a tool's result",
        ),
        ([QUESTION, log("assistant", "7", reasoning_content="7")], None, "reasoning_content"),
    ],
)
def test_parts_that_a_template_leaves_out_although_the_text_has_their_words(messages, tools, part):
    tokenizer = load(SILENT)
    row = {"messages": messages, **({"tools": tools} if tools else {})}
    rows = RowTokenizer(DatasetConfig(path="x"), tokenizer, 512, "error")
    for _ in range(2):  # the second time from memory
        [dropped] = rows(row, "x row 1")
        assert isinstance(dropped, Dropped) and dropped.reason == f"chat template leaves out {part}"
    if part != "reasoning_content":
        with pytest.raises(UserError, match=f"leaves out {part}"):
            SingleTurn(tokenizer).read({"prompt": messages[:-1], "tools": tools})
        history = TokenHistory(TurnTemplate(tokenizer))
        with pytest.raises(TemplateOmission, match=part):
            history.prepare(messages[:-1], {}, tools)
    prompt_tokens(tokenizer, [QUESTION])


def test_tools_that_only_some_prompts_of_a_conversation_have():
    """The call would train with its tools, and the answer without them."""
    last = (
        "{% for m in messages %}{% if loop.last and m.role == 'user' and tools %}"
        "{{ tools | tojson }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for t in m.tool_calls or [] %}{{ t.function | tojson }}{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = log("assistant", "", tool_calls=[tool_call("hi")])
    talk = [QUESTION, call, log("tool", "3"), log("assistant", "3")]
    assert len(trained(load(last), talk[:2], TOOLS)) == 1
    with pytest.raises(TemplateOmission, match="leaves out tools"):
        trained(load(last), talk, TOOLS)


DEVELOPER = [log("developer", "RULES"), QUESTION]
NEW_ROLE = (
    "{% if m.role == 'developer' %}raised{{ raise_exception('no role developer') }}{% endif %}"
)


def test_a_developer_message_is_a_system_message_where_the_template_knows_no_developer():
    plain = load_tokenizer("builtin")  # writes any role, so that the role stays
    assert plain.decode(prompt_tokens(plain, DEVELOPER)).startswith("<|im_start|>developer")
    chatml = plain.chat_template
    older = {
        "refused": "{% for m in messages %}" + NEW_ROLE + "{% endfor %}" + chatml,
        "left out": "{% set messages = messages | rejectattr('role', 'equalto', 'developer')"
        " | list %}" + chatml,
        "written behind a default": "{% if messages[0].role != 'system' %}"
        "<|im_start|>system\nDEFAULT<|im_end|>\n{% endif %}" + chatml,
    }
    expected = plain.decode(prompt_tokens(plain, [log("system", "RULES"), QUESTION]))
    for text in older.values():
        tokenizer = load(text)
        rows = RowTokenizer(DatasetConfig(path="x"), tokenizer, 512, "error")
        [sample] = rows({"messages": [*DEVELOPER, ANSWER]}, "x row 1")
        assert tokenizer.decode(sample.tokens).startswith(expected)
        prompt = TokenHistory(TurnTemplate(tokenizer)).prepare(DEVELOPER, {}, None)
        assert prompt.tokens == prompt_tokens(tokenizer, DEVELOPER)
        assert tokenizer.decode(prompt.tokens) == expected


def test_arguments_and_second_calls_are_parts_of_their_own():
    name_only = SILENT.replace("t.function | tojson", "t.function.name")
    talk = [QUESTION, log("assistant", "", tool_calls=[tool_call(x="f")])]
    with pytest.raises(TemplateOmission, match="arguments"):
        Renderer(load(name_only))(talk, None, [1])
    with pytest.raises(TemplateOmission, match="arguments"):  # of a prompt, too
        prompt_tokens(load(name_only), [*talk, log("tool", "7")])
    talk = [QUESTION, log("assistant", "", tool_calls=[tool_call("f"), tool_call("f")])]
    with pytest.raises(TemplateOmission, match="tool_calls"):
        Renderer(load(HARMONY))(talk, None, [1])


def test_who_speaks_first_is_context():
    tokenizer = load_tokenizer("builtin")
    talk = [log("assistant", "Hello"), log("user", "q"), log("assistant", "a")]
    [(context, turn)] = trained(tokenizer, talk)
    assert "Hello" in context and turn == "a<|im_end|>"
    rows = RowTokenizer(DatasetConfig(path="x"), tokenizer, 512, "error")
    [sample] = rows({"messages": talk}, "x row 1")
    assert isinstance(sample, Sample)
    [dropped] = rows({"messages": talk[:1]}, "x row 1")
    assert "nothing precedes the only turn" in dropped.reason


def test_variables_of_the_template_in_every_rendering(tmp_path):
    (tmp_path / "t.jinja").write_text(SWITCH)
    options = {"tokenizer": "builtin", "chat_template": str(tmp_path / "t.jinja")}
    kwargs = {"enable_thinking": False}
    model = ModelConfig(architecture={"x": 1}, **options, chat_template_kwargs=kwargs)
    off = find_tokenizer(model)
    plain = find_tokenizer(ModelConfig(architecture={"x": 1}, **options))
    talk = [log("user", "q"), log("assistant", "a")]
    closed = (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think></think>",
        "a<|im_end|>",
    )
    opened = (closed[0].removesuffix("<think></think>"), "a<|im_end|>")
    assert trained(off, talk) == [closed] and trained(plain, talk) == [opened]
    assert trained(plain, talk, kwargs=kwargs) == [closed]
    assert trained(off, talk, kwargs={"enable_thinking": True}) == [opened]
    for row, text in ((None, opened), (kwargs, closed), ({"enable_thinking": True}, opened)):
        row = {"prompt": "q", "chat_template_kwargs": row}
        assert plain.decode(SingleTurn(plain).read(row)[1]) == text[0]
        history = TokenHistory(TurnTemplate(plain))
        prompt = history.prepare(talk[:1], {}, None, row["chat_template_kwargs"])
        assert plain.decode(prompt.tokens) == text[0]
    # Whoever opens the export renders alike.
    off.save_pretrained(tmp_path / "export")
    again = load_tokenizer(str(tmp_path / "export"))
    assert trained(again, talk) == [closed]
    text = again.apply_chat_template(talk[:1], add_generation_prompt=True, tokenize=False)
    assert text == closed[0]


def test_variables_that_cannot_be_set_or_are_not_read(tmp_path, capsys):
    model = {"tokenizer": "builtin", "architecture": {"x": 1}}
    find_tokenizer(ModelConfig(**model, chat_template_kwargs={"nonsense": 1}))
    assert "never reads nonsense" in capsys.readouterr().err
    for kwargs, message in (({"messages": []}, "messages"), ({"a b": 1}, "no variable")):
        with pytest.raises(UserError, match=message):
            find_tokenizer(ModelConfig(**model, chat_template_kwargs=kwargs))
    tokenizer = load_tokenizer("builtin")
    for _ in range(2):
        prompt_tokens(tokenizer, [QUESTION], kwargs={"odd_name": True})
    assert capsys.readouterr().err.count("odd_name") == 1


def test_values_of_variables_reach_the_template_as_they_are():
    values = {"a": 'it\'s "x"\n<é>\\n{{ 1 }}', "b": [1, 2.5, None, True], "c": {"k": {"v": False}}}
    tokenizer = load(
        "\n{{ a }}|{{ b | tojson }}|{{ c | tojson }}{% for m in messages %}{% endfor %}"
    )
    expected = template.render_text(tokenizer, [QUESTION], kwargs=values)
    assert expected.startswith("\n") and json.loads(expected.split("|")[2]) == values["c"]
    from jaxtrain.huggingface.chat_template import add_defaults

    assert add_defaults(tokenizer, values, "key") == []
    assert template.render_text(tokenizer, [QUESTION]) == expected
    assert template.render_text(tokenizer, [QUESTION], kwargs={"a": "new"}).startswith("\nnew|")
