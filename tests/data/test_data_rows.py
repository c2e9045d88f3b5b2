"""The reader of rows: meanings of keys and columns, refused rows, columns that a note names."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxtrain.config.data import DatasetConfig
from jaxtrain.data.chat.messages import MalformedRow, read_messages
from jaxtrain.data.chat.omissions import list_unwritten_names
from jaxtrain.data.chat.prompt import normalize_row, read_prompt
from jaxtrain.data.chat.rows import Row
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.data.chat.tokenize import RowTokenizer
from jaxtrain.data.comparisons.preference_row import read_judged
from jaxtrain.data.preview import plain_text
from jaxtrain.data.sample import Sample
from jaxtrain.data.sources.dataset import open_rows
from jaxtrain.environments.single_turn import SingleTurn
from jaxtrain.errors import UnusableRow, UserError
from jaxtrain.generation.dataset_envs import measure_prompts
from jaxtrain.generation.prompts import PromptRows

ASK = {"role": "user", "content": "hi"}
CALL = {"name": "add", "arguments": {"a": 1}}


def read(tokenizer, row, **options):
    items = RowTokenizer(DatasetConfig(path="x", **options), tokenizer, 512, "drop")(row, "x row 1")
    texts = [plain_text(item, tokenizer) for item in items if isinstance(item, Sample)]
    return texts, [item.reason for item in items if not isinstance(item, Sample)]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_of_any_key(key):
    [message] = read_messages([{"role": "assistant", "content": "a", key: "thought"}])
    assert message == {"role": "assistant", "content": "a", "reasoning_content": "thought"}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": [{"function": CALL}]},
        {"role": "assistant", "content": None, "function_call": CALL},
        {"role": "assistant", "function_call": {**CALL, "arguments": json.dumps({"a": 1})}},
        {"from": "function_call", "value": json.dumps({"name": "add", "parameters": {"a": 1}})},
        {"role": "tool_call", "content": json.dumps([CALL])},
    ],
)
def test_calls_of_any_form(message):
    [normalized] = read_messages([message])
    assert normalized["tool_calls"] == [{"type": "function", "function": CALL}]
    assert normalized["role"] == "assistant" and normalized["content"] == ""
    assert read_messages([normalized]) == [normalized]


@pytest.mark.parametrize("key", ["weight", "train", "training", "trainable", "loss", "loss_mask"])
def test_a_turn_whose_flag_is_false_does_not_train(tokenizer, key):
    row = [ASK, {"role": "assistant", "content": "BAD", key: 0}, ASK]
    [text], notes = read(tokenizer, {"messages": [*row, {"role": "assistant", "content": "good"}]})
    assert "⟦good<|im_end|>⟧" in text and "⟦BAD" not in text and not notes


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "a", "reasoning": "x", "thinking": "y"}, "reasoning and thinking differ"),
        ({"content": "a", "weight": 1, "train": False}, "train and weight differ"),
        ({"content": "a", "weight": 0.5}, "weight is 0.5"),
        ({"content": "a", "images": ["x.png"]}, "images: only text is read"),
        ({"content": [{"type": "image_url", "image_url": "x"}]}, "part of type 'image_url'"),
        ({"content": [{"text": None}]}, "not a part without type"),
        (
            {"role": "User", "content": "a"},
            r"unknown role 'User'; .* \(key roles of the dataset",
        ),
        ({"content": "a", "train_detail": [1]}, "train_detail"),
        ({"text": "a"}, "without content"),
        ({"content": None}, "without content"),
    ],
)
def test_messages_that_are_refused(message, reason):
    with pytest.raises(MalformedRow, match=reason) as refused:
        read_messages([ASK, {"role": "assistant", **message}])
    assert refused.value.location == "message 2"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [ASK], "conversations": [{**ASK, "content": "b"}]}, "columns messages and"),
        ({"messages": [ASK], "tools": [CALL], "functions": [{"name": "b"}]}, "tools and functions"),
        ({"messages": [{**ASK, "value": "b"}]}, "malformed row: content and value differ"),
        ({"messages": json.dumps(ASK)}, "column messages holds JSON that is no list of messages"),
        ({"conversations": '[{"human": "q"}]'}, "column conversations holds JSON that is no list"),
        ({"messages": [ASK], "images": ["x.png"]}, "column images: only text is read"),
        ({"messages": [ASK], "loss_mask": [1, 0]}, "loss_mask must have a flag for each message"),
        ({"messages": [ASK], "chat_template_kwargs": {"tools": []}}, "sets tools"),
        ({"prompt": "q", "completion": "a", "system": ["b"]}, "column system holds a list"),
    ],
)
def test_rows_that_are_refused(tokenizer, row, reason):
    texts, [note] = read(tokenizer, row)
    assert not texts and reason in note


def test_plain_texts_with_a_system_message_are_a_conversation(tokenizer):
    row = {"system": "RULES", "prompt": "Q", "completion": "A", "history": [["h", "i"]]}
    [text], notes = read(tokenizer, row)
    assert [text.count(part) for part in ("RULES", "user\nh", "assistant\ni", "⟦A<|im_end|>⟧")] == [
        1
    ] * 4
    assert not notes and "⟦i" not in text


def test_what_nothing_reads_is_named_once_a_row(tokenizer):
    answer = {"role": "assistant", "content": "a", "id": 3, "refusal": None}
    row = {"messages": [{**ASK, "id": 2}, answer], "source": "web", "empty": "", "tools": []}
    [_], notes = read(tokenizer, row)
    assert notes == ["column 'source'", "message key 'id'"]


def test_a_name_that_the_template_leaves_out_is_reported_on_every_path(tokenizer):
    """A template that writes names has nothing to report; a tool's name is that of its call."""
    named = {**ASK, "name": "ada"}
    answers = [{"role": "assistant", "content": text} for text in "ab"]
    chat = {"messages": [named, answers[0]]}
    naming = load_tokenizer("builtin")
    naming.chat_template = naming.chat_template.replace(
        "+ message.role +", "+ message.role + (message.name or '') +"
    )
    result = {"role": "tool", "content": "3", "name": "add"}
    assert list_unwritten_names(tokenizer, [ASK, result]) == []
    for writer, notes in ((tokenizer, ["message key 'name'"]), (naming, [])):
        [text], reasons = read(writer, chat)
        assert reasons == notes and ("ada" in text) is (not notes)
        pair = {"prompt": [named], "chosen": answers[:1], "rejected": answers[1:]}
        judged = read_judged(pair, DatasetConfig(path="x"), tokenizer=writer)
        assert list(judged.unread) == notes and judged.prompt == [named]
        rows = PromptRows([chat], DatasetConfig(path="x"), "data", tokenizer=writer)
        assert list(rows.read(0)[1]) == notes


@pytest.mark.parametrize("block", ["<think>\nB\n</think>\n\nA", "<think></think>A", "A"])
@pytest.mark.parametrize("reads", [True, False])
def test_a_thought_in_both_places_is_written_once(tokenizer, block, reads):
    """It stays where the template reads it, in turns that train and in prompts."""
    answer = {"role": "assistant", "content": block, "reasoning_content": "B"}
    if not reads:
        tokenizer = load_tokenizer("builtin")
        tokenizer.chat_template = tokenizer.chat_template.replace("reasoning_content", "nothing")
    prompt, _ = read_rollout(tokenizer, {"prompt": [ASK, answer, ASK]})
    texts, notes = read(tokenizer, {"messages": [ASK, answer]})
    if not reads and "B" not in block:
        assert notes == ["chat template leaves out reasoning_content"]
        return
    for text in (prompt, *texts):
        assert text.count("A<|im_end|>") == 1 and text.count("<think>") == 1
        assert text.count("B") == 1
    assert not notes
    with pytest.raises(MalformedRow, match="reasoning_content and the thought in content differ"):
        read_messages([{**answer, "content": "<think>C</think>A"}])


@pytest.mark.parametrize("answer", ["completion", "output"])
@pytest.mark.parametrize("question", ["prompt", "question", "instruction", "input"])
def test_questions_have_the_same_names_in_training_and_rollouts(tokenizer, question, answer):
    row = {question: "What?", answer: "That."}
    [text], notes = read(tokenizer, row, as_chat=True)
    prompt, _ = read_rollout(tokenizer, row)
    assert text.startswith(prompt) and "⟦That.<|im_end|>⟧" in text and not notes


def test_prompts_are_the_same_text_in_rollouts_as_in_training(tokenizer):
    calls = [{"id": "a", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    row = {"prompt": [ASK, said, {"role": "tool", "content": "3"}], "system": "RULES"}
    text = tokenizer.decode(SingleTurn(tokenizer).read(row)[1])
    assert '"arguments": {"a": 1}' in text and text.startswith("<|im_start|>system\nRULES")
    [trained], _ = read(tokenizer, {**row, "completion": "x"})
    assert trained.startswith(text)
    assert read_prompt(Row(normalize_row(Row(row)))).value == read_prompt(Row(row)).value


def read_rollout(tokenizer, row, **options):
    """Return (rendered prompt, what is reported) of a row of prompts."""
    normalized, unread = PromptRows([row], DatasetConfig(path="x"), "data").read(0)
    return tokenizer.decode(SingleTurn(tokenizer, **options).read(normalized)[1]), unread


def test_messages_as_json_are_messages(tokenizer):
    """CSV files hold them so; what pandas prints is refused by name."""
    answer = {"role": "assistant", "content": "a"}
    talk, asked = json.dumps([ASK, answer]), json.dumps([ASK])
    expected = ["<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦a<|im_end|>⟧\n"]
    for row in ({"messages": talk}, {"prompt": asked, "completion": json.dumps([answer])}):
        assert read(tokenizer, row) == (expected, [])
    text, _ = read_rollout(tokenizer, {"prompt": asked})
    assert expected[0].startswith(text) and "[{" not in text
    pair = {"chosen": talk, "rejected": talk.replace('"a"', '"b"')}
    judged = read_judged(pair, DatasetConfig(path="x"))
    assert judged.prompt == [ASK] and judged.answers[0] == [answer]
    _, reasons = read(tokenizer, {"messages": str([ASK, answer])})
    assert "column messages holds messages as Python prints them" in reasons[0]
    [text], _ = read(tokenizer, {"prompt": "[{'a': 1}]", "completion": '[{"a": 1}]'})
    assert text == "[{'a': 1}]⟦[{\"a\": 1}]<|im_end|>⟧"
    # A row of a rollout that cannot be read is one of those that count as failed.
    printed = PromptRows([{"prompt": str([ASK])}], DatasetConfig(path="x"), "data").read(0)[0]
    assert "as Python prints them" in printed.reason
    # The column of env.prompt_column, too.
    assert read_prompt(Row({"ask": asked}), "ask").value == [ASK]
    assert normalize_row(Row({"ask": asked}), "ask") == {"ask": [ASK]}


def test_json_that_is_asked_about_is_a_text():
    talk = json.dumps([ASK])
    assert read_prompt(Row({"prompt": json.dumps(talk)})).value == [ASK]
    quoted = json.dumps(json.dumps([{"a": 1}]))
    assert read_prompt(Row({"prompt": quoted})).value == quoted
    assert read_prompt(Row({"instruction": "Sum up.", "input": talk})).value == f"Sum up.\n\n{talk}"
    formats = {"prompt": "Sum up: {messages}"}
    assert read_prompt(Row({"messages": talk}, column_formats=formats)).value == f"Sum up: {talk}"
    assert read_prompt(Row({"prompt": talk}, column_formats={"prompt": "{prompt}"})).value == talk


def test_a_begun_turn_is_continued_and_an_answer_of_messages_is_not(tokenizer):
    row = {"prompt": [ASK, {"role": "assistant", "content": "Sure, "}]}
    text, unread = read_rollout(tokenizer, row)
    assert text.endswith("assistant\nSure, ") and unread == ()
    whole = [ASK, {"role": "assistant", "content": "Sure, done."}]
    assert read_rollout(tokenizer, {**row, "messages": whole})[0] == text
    with pytest.raises(UnusableRow, match="ask different things"):
        read_rollout(tokenizer, {**row, "messages": [ASK, {**whole[1], "content": "No."}]})
    text, unread = read_rollout(tokenizer, {**row, "continue_final_message": False})
    assert text.endswith("assistant\n") and unread == ("answer at the end of column prompt",)
    text, unread = read_rollout(tokenizer, {"messages": row["prompt"]})
    assert text.endswith("assistant\n") and unread == ()
    asked = {"messages": row["prompt"], "continue_final_message": True}
    assert read_rollout(tokenizer, asked)[0].endswith("assistant\nSure, ")
    with pytest.raises(UnusableRow, match="continue_final_message is a number"):
        read_rollout(tokenizer, {**asked, "continue_final_message": 1})
    with pytest.raises(UnusableRow, match="no turn of the assistant is last"):
        read_rollout(tokenizer, {**asked, "messages": [ASK]})
    dropped = Row({"prompt": [{"role": "system", "content": "s"}]}, drop_system_message=True)
    assert normalize_row(dropped) == {"prompt": []}


@pytest.mark.parametrize("row", [{"prompt": ""}, {"prompt": None, "id": 7}, {"messages": []}])
def test_an_empty_prompt_is_one_unusable_row(tokenizer, row):
    with pytest.raises(UnusableRow, match="its prompt is empty"):
        read_rollout(tokenizer, row)
    with pytest.raises(UnusableRow, match="no prompt; it needs 'prompt'"):
        read_rollout(tokenizer, {"id": 7})


def test_rows_of_a_mixed_file_are_counted_with_what_they_lack(tokenizer):
    """Such a row once ended a run in its midst, without its name."""
    kinds = [{"prompt": "a"}, {"text": "a"}, {"prompt": [{"text": "a"}]}, {"input": "a"}]
    rows, lines = PromptRows(kinds, DatasetConfig(path="x"), "data"), []
    assert len(measure_prompts(rows, SingleTurn(tokenizer), "x", lines.append)) == 2
    assert "2 of 4 prompts looked at cannot be used" in lines[0]
    assert "no prompt; it needs 'prompt'" in lines[0] and "(first: x row 2)" in lines[0]
    assert "malformed row: column prompt, message 1: a message without role" in lines[0]


def test_a_developer_message_is_a_system_message(tokenizer):
    row = {"prompt": [{"role": "developer", "content": "RULES"}, ASK]}
    text, _ = read_rollout(tokenizer, row, system="other")
    assert "RULES" in text and "other" not in text


@pytest.mark.parametrize(
    "extra", [{"tools": [{"name": "add"}]}, {"chat_template_kwargs": {"enable_thinking": False}}]
)
def test_raw_prompts_have_nothing_that_a_template_writes(tokenizer, extra):
    with pytest.raises(UserError, match="which needs a chat template"):
        read_rollout(tokenizer, {"prompt": "hi", **extra}, raw=True)


@pytest.mark.parametrize("key", ["thinking", "reasoning_content", "tool_calls"])
def test_thoughts_and_calls_of_others_than_the_assistant_are_reported(tokenizer, key):
    """No template writes them."""
    asked = {**ASK, key: [{"function": CALL}] if key == "tool_calls" else "T"}
    assert read_messages([asked]) == [ASK]
    _, notes = read(tokenizer, {"messages": [asked, {"role": "assistant", "content": "a"}]})
    expected = ["thoughts or tool calls of the role 'user'"]
    assert notes == expected == list(read_rollout(tokenizer, {"prompt": [asked]})[1])


@pytest.mark.parametrize(
    "said",
    [
        {"content": None, "refusal": "No."},
        {"content": [{"type": "refusal", "refusal": "No."}]},
        {"content": [{"type": "refusal", "text": "No."}]},
    ],
)
def test_a_refusal_is_the_answer(tokenizer, said):
    refusal = {"role": "assistant", **said}
    [text], notes = read(tokenizer, {"messages": [ASK, refusal]})
    assert "⟦No.<|im_end|>⟧" in text and not notes


def test_a_prompt_and_messages_that_ask_different_things():
    row = {"prompt": "hi", "messages": [ASK, {"role": "assistant", "content": "a"}]}
    assert read_prompt(Row(row)).value == "hi"
    with pytest.raises(MalformedRow, match="columns prompt and messages ask different things"):
        read_prompt(Row({**row, "prompt": "other"}))


def test_a_key_that_stands_twice_is_refused(tmp_path):
    """JSON readers take the last one, so that a value is lost."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a", "text": "b"}\n{"text": "c", "more": {"k": 1, "k": 1}}\n')
    reasons = [row.reason for row in open_rows(DatasetConfig(path=str(path)))]
    assert reasons == [f"the key {key!r} stands twice in one table" for key in ("text", "k")]
    array = tmp_path / "rows.json"
    array.write_text('[{"text": "a",\n "text": "b"}]')
    with pytest.raises(UserError, match=r"the key 'text' stands twice in one table \(lines 1, 2\)"):
        open_rows(DatasetConfig(path=str(array)))
    call = '{"name": "add", "arguments": {"a": 1, "a": 2}}'
    with pytest.raises(MalformedRow, match="the key 'a' stands twice"):
        read_messages([ASK, {"role": "function_call", "content": call}])


def test_a_replaced_parquet_file_gives_its_new_rows(tmp_path):
    path = tmp_path / "rows.parquet"
    for text in ("old", "new"):
        pq.write_table(pa.table({"prompt": ["q"], "completion": [text]}), path)
        os.utime(path, (0, 0))
        assert open_rows(DatasetConfig(path=str(path)))[0]["completion"] == text
