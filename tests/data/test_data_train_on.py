"""Which parts of a row train, and columns that are written from others."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from jaxtrain.config.data import DatasetConfig
from jaxtrain.data.chat.rows import Row
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.data.chat.tokenize import RowTokenizer
from jaxtrain.data.comparisons.preferences import RankedReader

SYSTEM, END = {"role": "system", "content": "Be brief."}, "<|im_end|>"
TALK = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "A"},
    {"role": "tool", "content": "T"},
    {"role": "assistant", "content": "B"},
]


def mark(tokenizer, tokens, weights):
    """A text with its trained stretches in brackets."""
    text, on = "", False
    for token, weight in zip(tokens.tolist(), weights.tolist(), strict=True):
        if (weight > 0) != on:
            on = not on
            text += "⟦" if on else "⟧"
        text += tokenizer.decode([token])
    return text + ("⟧" if on else "")


def read(tokenizer, row, **dataset):
    [sample] = RowTokenizer(DatasetConfig(path="x", **dataset), tokenizer, 512, "drop")(row, "x")
    return mark(tokenizer, sample.tokens, sample.weights)


def pair(tokenizer, row, **dataset):
    reader = RankedReader(DatasetConfig(path="x", **dataset), tokenizer, 512, "drop", "pairs")
    [ranked] = reader(row, "x")
    answers = [mark(tokenizer, answer.tokens, answer.weights) for answer in ranked.answers]
    return tokenizer.decode(ranked.prompt.tolist()), *answers


@pytest.mark.parametrize(
    ("which", "ends"),
    [
        ("turn", (False, True, False, True)),
        ("all", (True, True, True, True)),
        ("last", (False, False, False, True)),
        ("none", (False, False, False, False)),
    ],
)
def test_ends_of_turns(tokenizer, which, ends):
    text = read(tokenizer, {"messages": TALK}, train_on_eot=which)
    pieces = text.split(END)[:-1]
    trained = [piece.rfind("⟦") > piece.rfind("⟧") for piece in pieces]
    assert tuple(trained) == ends and "⟦A" in text and "⟦B" in text


def test_roles_that_train(tokenizer):
    text = read(tokenizer, {"messages": TALK}, roles_to_train=["user"])
    assert text.startswith("<|im_start|>⟦user\none<|im_end|>\n⟧") and text.count("⟦") == 1
    text = read(tokenizer, {"messages": TALK}, roles_to_train=["assistant", "tool"])
    assert "T" in text.split("⟦")[2] and "one" not in text.split("⟦", 1)[1]


def test_a_leading_system_message_is_left_out_on_all_paths(tokenizer):
    row = {"messages": [SYSTEM, *TALK], "loss_mask": [0, 0, 1, 0, 1]}
    assert "brief" in read(tokenizer, row) and "brief" not in read(
        tokenizer, row, drop_system_message=True
    )
    columns = {"prompt": "q", "completion": "a", "system": "Be brief."}
    assert "brief" not in read(tokenizer, columns, drop_system_message=True)
    assert Row({"messages": [SYSTEM, TALK[0]]}, drop_system_message=True).prompt() == TALK[:1]


def test_thoughts_in_the_text_become_thoughts(tokenizer):
    answer = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes"}
    row = {"messages": [TALK[0], answer]}
    [_, message] = Row(row, split_thinking=True).messages()
    assert message == {"role": "assistant", "content": "Yes", "reasoning_content": "Hm."}
    apart = {"role": "assistant", "content": "Yes", "reasoning_content": "Hm."}
    expected = read(tokenizer, {"messages": [TALK[0], apart]})
    assert read(tokenizer, row, split_thinking=True) == expected


@pytest.mark.parametrize("before", ["", "  ", "<|im_end|> "])
def test_parts_of_a_text_that_do_not_train(tokenizer, before):
    """Offsets are those of the data, whether the template strips the text or control tokens are
    spelled in it."""
    content = f"{before}It is 4 < five and <|im_start|> is text, so 12 <"
    start = content.index("five and <|im_start|>")
    span = {"begin_offset": start, "end_offset": start + len("five and <|im_start|>") - 1}
    answer = {"role": "assistant", "content": content}
    masked = {**answer, "train_detail": [{**span, "train": False}]}
    whole, part = (read(tokenizer, {"messages": [TALK[0], m]}) for m in (answer, masked))
    assert whole.replace("⟦", "").replace("⟧", "") == part.replace("⟦", "").replace("⟧", "")
    hidden = part.split("⟧")[1].split("⟦")[0]
    assert hidden.strip() == "five and <|im_start|>"
    assert part.count("⟦") == 2 and part.endswith(f"12 <{END}⟧\n")
    inverse = read(tokenizer, {"messages": [TALK[0], masked]}, train_on="all")
    assert inverse.split("⟧")[1].split("⟦")[0] == hidden
    pairs = {"prompt": [TALK[0]], "chosen": [masked], "rejected": [TALK[1]]}
    assert f"⟧{hidden}⟦" in pair(tokenizer, pairs)[1]


@pytest.mark.parametrize(
    ("detail", "reason"),
    [
        ([{"begin_offset": 0, "end_offset": 9, "train": False}], "beyond the text"),
        ([{"begin_offset": 2, "end_offset": 1, "train": False}], "must be a list"),
        ([{"begin_offset": 0, "end_offset": 1}], "not true, false"),
        ([1], "must be a list"),
    ],
)
def test_spans_that_are_refused(tokenizer, detail, reason):
    answer = {"role": "assistant", "content": "abcd", "train_detail": detail}
    tokenize = RowTokenizer(DatasetConfig(path="x"), tokenizer, 512, "drop")
    [dropped] = tokenize({"messages": [TALK[0], answer]}, "x")
    assert reason in dropped.reason and dropped.origin == "x, message 2"


BEGUN = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is"}]


@pytest.mark.parametrize("as_messages", [False, True])
def test_an_answer_continues_the_turn_that_its_prompt_begins(tokenizer, as_messages):
    def say(text):
        return [{"role": "assistant", "content": text}] if as_messages else text

    row = {"prompt": BEGUN, "completion": say(" 4.")}
    text = read(tokenizer, row)
    head = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert text == f"{head}It is⟦ 4.<|im_end|>⟧\n"
    text = read(tokenizer, row, train_on="all")
    assert text.count("⟧") == 1 and "It is 4.<|im_end|>" in text
    texts = pair(tokenizer, {"prompt": BEGUN, "chosen": say(" 4."), "rejected": say(" 5.")})
    assert texts == (f"{head}It is", f"⟦ 4.{END}⟧", f"⟦ 5.{END}⟧")
    reader = RankedReader(DatasetConfig(path="x"), tokenizer, 512, "drop", "pairs")
    [empty] = reader({"prompt": BEGUN, "chosen": say(" 4."), "rejected": say("")}, "x")
    assert "empty answer" in empty.reason
    thought = {"role": "assistant", "content": "4", "reasoning_content": "t"}
    rows = RowTokenizer(DatasetConfig(path="x"), tokenizer, 512, "drop")
    [dropped] = rows({"prompt": BEGUN, "completion": [thought]}, "x")
    assert "the prompt ends in a turn that its answer cannot continue" in dropped.reason


def test_what_a_prompt_says_of_the_turn_that_it_begins(tokenizer):
    """Flags and spans of the beginning hold where all tokens train."""
    question, begun = BEGUN
    for mark in ({"train": False}, {"train_detail": [{**SPAN, "train": False}]}):
        row = {"prompt": [question, {**begun, **mark}], "completion": " 4."}
        text = read(tokenizer, row, train_on="all")
        assert "⟧It is⟦ 4.<|im_end|>" in text and text.startswith("<|im_start|>⟦user")


SPAN = {"begin_offset": 0, "end_offset": 4}


@pytest.mark.parametrize("begun", ["It is ", "It is"])
def test_the_beginning_of_a_turn_is_the_models_input(begun):
    """It trains nowhere, not the empty thought either that Qwen3's template writes before it, and
    its tokens do not merge with those of the answer, which are drawn behind it."""
    qwen = load_tokenizer("builtin", str(Path(__file__).with_name("qwen3.jinja")))
    prompt = [BEGUN[0], {"role": "assistant", "content": begun}]
    text = read(qwen, {"prompt": prompt, "completion": "four."})
    assert text.endswith(f"</think>\n\n{begun}⟦four.{END}⟧\n") and text.count("⟦") == 1
    texts = pair(qwen, {"prompt": prompt, "chosen": "four.", "rejected": "five."})
    assert texts[0].endswith(f"</think>\n\n{begun}")
    assert texts[1:] == (f"⟦four.{END}⟧", f"⟦five.{END}⟧")


def test_columns_are_written_from_others(tokenizer):
    row = {"question": "2+2?", "good": "4", "bad": "5", "system": "Count."}
    formats = {
        "prompt": ["{system}\n{question}\n", "{question}\n"],
        "chosen": "{good} {{sure}}",
        "rejected": "{bad}",
    }
    eos = tokenizer.eos_token
    prompt, good, bad = pair(tokenizer, row, column_formats=formats)
    assert (prompt, good, bad) == ("Count.\n2+2?\n", f"⟦4 {{sure}}{eos}⟧", f"⟦5{eos}⟧")
    assert pair(tokenizer, {**row, "system": None}, column_formats=formats)[0] == "2+2?\n"
    alpaca = {"instruction": "Add.", "input": 3, "output": "7"}
    formats = {"prompt": ["{instruction} {input}: ", "{instruction}: "], "completion": "{output}"}
    assert read(tokenizer, alpaca, column_formats=formats) == f"Add. 3: ⟦7{eos}⟧"


@pytest.mark.parametrize("text", ["{a", "{}", "{0}", "{a.b}", "{a[0]}", "{a!r}", "{a:>4}"])
def test_a_format_names_columns_and_nothing_else(text):
    with pytest.raises(ValidationError, match="column_formats"):
        DatasetConfig(path="x", column_formats={"prompt": text})
