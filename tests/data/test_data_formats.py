"""Rows of every format become tokens and weights: columns, roles, lengths, what is dropped."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config.data import DataConfig, DatasetConfig
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.data.chat.tokenize import RowTokenizer
from jaxtrain.data.formats import detect_format
from jaxtrain.data.preview import probe_samples
from jaxtrain.data.sample import Dropped, Sample
from jaxtrain.errors import UserError

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("JAXTRAIN_TEST_DATA", ROOT.parent / "shared" / "data"))
HEADER = "<|im_start|>assistant\n"
UNKNOWN = "malformed row: unknown role 'wizard'; known are system, developer, user, assistant, tool"
UNKNOWN += " (key roles of the dataset translates others)"


def tokenize(tokenizer, row, length=512, too_long="drop", **dataset):
    row_tokenizer = RowTokenizer(DatasetConfig(path="x", **dataset), tokenizer, length, too_long)
    results = row_tokenizer(row, "x row 1")
    assert all(isinstance(result, Sample | Dropped) for result in results)
    assert all(result.origin.startswith("x row 1") for result in results)
    return results


def trained(tokenizer, sample):
    """The trained stretches of a sample."""
    assert sample.tokens.dtype == np.int32 and sample.weights.dtype == np.float32
    assert sample.tokens.shape == sample.weights.shape and sample.weights[0] == 0
    on = sample.weights > 0
    cuts = [0, *(np.flatnonzero(np.diff(on)) + 1), len(on)]
    return [
        tokenizer.decode(sample.tokens[a:b].tolist())
        for a, b in zip(cuts, cuts[1:], strict=False)
        if on[a]
    ]


def log(role, content, **extra):
    return {"role": role, "content": content, **extra}


TALK = [log("user", "one"), log("assistant", "A"), log("user", "two"), log("assistant", "B")]


@pytest.mark.parametrize(
    "columns, name",
    [
        (["messages", "id"], "chat"),
        (["conversations"], "chat"),
        (["messages", "text"], "chat"),
        (["prompt", "completion"], "prompt_completion"),
        (["instruction", "input", "output"], "alpaca"),
        (["segments"], "input_output"),
        (["text", "url"], "completion"),
        (["prompt"], None),
        (["question", "answer"], None),
        ([], None),
    ],
)
def test_detect_format(columns, name):
    assert detect_format(columns) == name


def test_detect_format_of_renamed_columns():
    fields = {"prompt": "question", "completion": "answer"}
    assert detect_format(["question", "answer"], fields) == "prompt_completion"
    assert detect_format(["question"], fields) is None


@pytest.mark.parametrize(
    "train_on, texts",
    [
        ("assistant", ["B<|im_end|>"]),
        ("last", ["B<|im_end|>"]),
        ("per_message", ["<|im_start|>user\ntwo<|im_end|>\n", "B<|im_end|>"]),
    ],
)
def test_chat_train_on(tokenizer, train_on, texts):
    talk = [dict(message) for message in TALK]
    talk[2]["train"] = talk[3]["train"] = True
    talk[1]["train"] = False
    [sample] = tokenize(tokenizer, {"messages": talk}, train_on=train_on)
    assert trained(tokenizer, sample) == texts


def test_chat_train_on_all(tokenizer):
    [sample] = tokenize(tokenizer, {"messages": TALK}, train_on="all")
    # All but the first token, which nothing predicts.
    assert sample.weights.sum() == len(sample.tokens) - 1


def test_chat_with_tools_and_arguments_as_a_string(tokenizer):
    call = {"id": "1", "function": {"name": "add", "arguments": '{"b": [1, "é"], "a": null}'}}
    row = {
        "messages": [
            log("user", "go"),
            log("assistant", None, reasoning_content="Hm.", tool_calls=[call]),
            log("tool", "3", tool_call_id="1"),
            log("assistant", "3"),
        ],
        "tools": json.dumps([{"type": "function", "function": {"name": "add"}}]),
    }
    [sample] = tokenize(tokenizer, row)
    assert trained(tokenizer, sample) == [
        '<think>Hm.</think>\n<tool_call>{"name": "add", "arguments": {"b": [1, "é"], "a": null}}'
        "</tool_call><|im_end|>",
        "3<|im_end|>",
    ]
    assert '"name":"add"' in tokenizer.decode(sample.tokens.tolist())


def test_sharegpt_on_sight(tokenizer):
    row = {
        "system": "Be brief.",
        "conversations": [
            {"from": "human", "value": "one"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "A"},
        ],
    }
    [sample] = tokenize(tokenizer, row)
    text = tokenizer.decode(sample.tokens.tolist())
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none")
    assert "<tool_response>2</tool_response>" in text
    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|im_end|>'
    assert trained(tokenizer, sample) == [call, "A<|im_end|>"]


def test_renamed_columns_keys_and_roles(tokenizer):
    row = {"talk": [{"who": "me", "says": "one"}, {"who": "it", "says": "A", "learn": True}]}
    fields = {
        "messages": "talk",
        "messages.role": "who",
        "messages.content": "says",
        "messages.train": "learn",
    }
    [sample] = tokenize(
        tokenizer,
        row,
        fields=fields,
        roles={"me": "user", "it": "assistant"},
        train_on="per_message",
    )
    assert trained(tokenizer, sample) == ["A<|im_end|>"]


def test_prompt_completion_of_strings(tokenizer):
    [sample] = tokenize(tokenizer, {"prompt": "Say us", "completion": "er."})
    # Tokenized apart: the border is where it is in use, although "user" is one token.
    assert trained(tokenizer, sample) == ["er.<|im_end|>"]
    assert sample.tokens.tolist() == [
        *tokenizer("Say us")["input_ids"],
        *tokenizer("er.")["input_ids"],
        tokenizer.eos_token_id,
    ]


def test_prompt_completion_as_chat(tokenizer):
    row = {"question": "q", "answer": "a", "system": "S"}
    fields = {"prompt": "question", "completion": "answer"}
    [sample] = tokenize(tokenizer, row, fields=fields, as_chat=True)
    assert trained(tokenizer, sample) == ["a<|im_end|>"]
    assert tokenizer.decode(sample.tokens.tolist()).startswith("<|im_start|>system\nS<|im_end|>")


def test_prompt_completion_of_messages_trains_the_completion_only(tokenizer):
    row = {"prompt": TALK[:3], "completion": TALK[3]}
    [sample] = tokenize(tokenizer, row)
    assert trained(tokenizer, sample) == ["B<|im_end|>"]
    [second] = tokenize(tokenizer, {"prompt": TALK[:3], "completion": "B"})
    assert second.tokens.tolist() == sample.tokens.tolist()


@pytest.mark.parametrize("provided", ["", "data", None])
@pytest.mark.parametrize("as_chat", [False, True])
def test_alpaca(tokenizer, provided, as_chat):
    row = {"instruction": "do", "input": provided, "output": "done"}
    [sample] = tokenize(tokenizer, row, as_chat=as_chat)
    text = tokenizer.decode(sample.tokens.tolist())
    assert trained(tokenizer, sample) == ["done<|im_end|>"]
    assert ("data" in text) == (provided == "data") and "None" not in text
    assert ("### Response:\n" in text) is not as_chat and (HEADER in text) is as_chat
    [sample] = tokenize(tokenizer, {**row, "history": [["q", "a"]]})
    assert trained(tokenizer, sample) == ["a<|im_end|>", "done<|im_end|>"]


def test_input_output(tokenizer):
    row = {
        "segments": [
            {"text": "a b", "train": False},
            {"text": " c", "label": True},
            {"text": " d", "train": False},
            {"text": " e<|im_end|>", "train": True},
        ]
    }
    [sample] = tokenize(tokenizer, row)
    assert trained(tokenizer, sample) == [" c", " e<|im_end|>"]
    assert tokenizer.decode(sample.tokens.tolist()) == "a b c d e<|im_end|>"


@pytest.mark.parametrize("count", [1, 6, 7, 8, 14, 15, 20])
def test_completion_predicts_each_token_once(tokenizer, count):
    text = "1234567890123456789012345"[:count]
    samples = tokenize(tokenizer, {"text": text}, length=8)
    full = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    learned = []
    for sample in samples:
        assert 2 <= len(sample.tokens) <= 8
        learned += sample.tokens[sample.weights > 0].tolist()
    assert learned == full[1:]


def test_completion_with_bos(tokenizer):
    second = load_tokenizer("builtin")
    from tokenizers.processors import TemplateProcessing

    second.bos_token = "<|im_start|>"
    bos = second.bos_token_id
    second.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    [sample] = tokenize(second, {"text": "hi"})
    assert sample.tokens[0] == bos and sample.tokens.tolist().count(bos) == 1
    [sample] = tokenize(second, {"prompt": "hi", "completion": "ho"})
    assert sample.tokens.tolist().count(bos) == 1


def test_too_long_drop(tokenizer):
    assert tokenize(tokenizer, {"messages": TALK}, length=12) == [Dropped("too long", "x row 1")]


def test_too_long_truncate(tokenizer):
    [full] = tokenize(tokenizer, {"messages": TALK})
    [sample] = tokenize(tokenizer, {"messages": TALK}, length=12, too_long="truncate")
    assert sample.tokens.tolist() == full.tokens[:12].tolist()
    # Cut before the first trained token, nothing is left to learn.
    [dropped] = tokenize(tokenizer, {"messages": TALK}, length=8, too_long="truncate")
    assert dropped.reason == "no trained token"


def test_too_long_error_names_row_and_keys(tokenizer):
    with pytest.raises(UserError, match=r"x row 1.*data.sequence_len is 12.*data.too_long"):
        tokenize(tokenizer, {"messages": TALK}, length=12, too_long="error")


def test_exact_length_is_not_too_long(tokenizer):
    [full] = tokenize(tokenizer, {"messages": TALK})
    length = len(full.tokens)
    [sample] = tokenize(tokenizer, {"messages": TALK}, length=length, too_long="error")
    assert len(sample.tokens) == length


@pytest.mark.parametrize(
    "row, options",
    [
        ({"messages": TALK[:1]}, {}),
        ({"messages": TALK}, {"train_on": "per_message"}),
        ({"segments": [{"text": "a b c", "train": False}]}, {}),
        ({"prompt": TALK[:2], "completion": [TALK[2]]}, {}),
    ],
)
def test_no_trained_token(tokenizer, row, options):
    [dropped] = tokenize(tokenizer, row, **options)
    assert dropped == Dropped("no trained token", "x row 1")


def calling(call):
    return {"messages": [log("assistant", "", tool_calls=[call])]}


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"messages": "hello"}, None),
        ({"messages": []}, "list"),
        ({"messages": ["hello"]}, "a message is a text"),
        ({"messages": [{"content": "a"}]}, "a message without role (its keys: 'content')"),
        ({"messages": [log("wizard", "a")]}, "unknown role 'wizard'"),
        ({"messages": [log("user", 5)]}, "content is a number"),
        ({"messages": [log("user", [{"type": "image"}])]}, "only text"),
        (calling({"function": {"name": 1}}), "function.name"),
        (calling({"name": "f", "arguments": "{broken"}), "arguments of 'f': broken JSON"),
        ({"messages": TALK, "tools": "{broken"}, "tools: broken JSON"),
        ({"messages": TALK, "tools": {"a": 1}}, "tools must be a list"),
        ({"messages": None}, "column messages is missing"),
        ({"prompt": "a", "completion": None}, "column completion is missing or empty"),
        ({"prompt": 1, "completion": "a"}, "column prompt holds a number, not a text or"),
        ({"instruction": "a", "output": 3}, "column output holds a number"),
        ({"segments": [{"text": "a"}]}, "a segment must"),
        ({"segments": "abc"}, "segments must be a list"),
        ({"text": ["a"]}, "column text holds a list"),
        ({"other": 1}, "no known columns among other"),
    ],
)
def test_malformed_rows(tokenizer, row, reason):
    [dropped] = tokenize(tokenizer, row)
    if reason is None:
        assert dropped.reason == "no trained token"
    else:
        assert dropped.reason.startswith("malformed row: ") and reason in dropped.reason


def test_malformed_message_is_placed(tokenizer):
    [dropped] = tokenize(tokenizer, {"messages": [*TALK, log("wizard", "a")]})
    assert dropped == Dropped(UNKNOWN, "x row 1, message 5")


def test_empty_keys_of_a_table_do_not_matter(tokenizer):
    nulls = {"tool_calls": None, "reasoning_content": None, "name": None, "train": None}
    [plain] = tokenize(tokenizer, {"messages": TALK})
    row = {"messages": [{**message, **nulls} for message in TALK], "tools": None}
    [second] = tokenize(tokenizer, row)
    assert plain.tokens.tolist() == second.tokens.tolist()


def test_system_column_and_system_message(tokenizer):
    with_own = [log("system", "own"), *TALK]
    [dropped] = tokenize(tokenizer, {"messages": with_own, "system": "column"})
    assert dropped.reason == "malformed row: column system and the system message differ"
    [sample] = tokenize(tokenizer, {"messages": with_own, "system": "own"})
    [second] = tokenize(tokenizer, {"messages": with_own})
    assert sample.tokens.tolist() == second.tokens.tolist()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"fields": {"mesages": "talk"}}, 'did you mean "messages"'),
        ({"fields": {"messages.value": "says"}}, "which no format reads"),
        ({"roles": {"bot": "asistant"}}, "'asistant', which is no role"),
    ],
)
def test_names_that_nothing_reads(tokenizer, options, message):
    with pytest.raises(UserError, match=message):
        RowTokenizer(DatasetConfig(path="x", **options), tokenizer, 512, "drop")


def test_tokenizer_pickles(tokenizer):
    row_tokenizer = RowTokenizer(DatasetConfig(path="x"), tokenizer, 512, "drop")
    [local_copy], [reference] = (
        f({"messages": TALK}, "")
        for f in (row_tokenizer, pickle.loads(pickle.dumps(row_tokenizer)))
    )
    assert local_copy.tokens.tolist() == reference.tokens.tolist()


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_probe_names_the_format(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"messages": TALK, "id": i} for i in range(40)])
    actual = probe_samples(DatasetConfig(path=path), tokenizer, DataConfig())
    assert (actual.format, actual.columns, actual.num_rows) == ("chat", ("messages", "id"), 40)
    assert len(actual.samples) == 16 and not actual.dropped
    assert "format chat" in str(actual) and "messages, id" in str(actual)


def test_probe_of_a_stream(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"text": "hi there"}] * 40)
    actual = probe_samples(DatasetConfig(path=path, streaming=True), tokenizer, DataConfig())
    assert actual.format == "completion" and actual.num_rows is None and len(actual.samples) == 16


def test_probe_lists_the_accepted_columns(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"question": "q", "answer": "a"}])
    with pytest.raises(UserError) as error:
        probe_samples(DatasetConfig(path=path), tokenizer, DataConfig())
    text = str(error.value)
    assert "the columns found are question, answer" in text and "prompt + completion" in text
    assert "chat: messages or conversations" in text and len(text.splitlines()) <= 8


@pytest.mark.parametrize(
    "options, message",
    [
        ({"format": "alpaca"}, "not alpaca: the columns found are messages"),
        ({"fields": {"prompt": "query"}}, "column 'query'.*the columns found are messages"),
        ({"train_on": "per_message"}, "16 x no trained token.*train = true"),
    ],
)
def test_probe_refuses(tmp_path, tokenizer, options, message):
    path = write(tmp_path / "a.jsonl", [{"messages": TALK}] * 20)
    with pytest.raises(UserError, match=f"(?s){message}"):
        probe_samples(DatasetConfig(path=path, **options), tokenizer, DataConfig())


def test_probe_refuses_what_is_all_too_long(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"messages": TALK}] * 20)
    with pytest.raises(UserError, match=r"0 of 16.*\n.*16 x too long.*data.sequence_len \(8\)"):
        probe_samples(DatasetConfig(path=path), tokenizer, DataConfig(sequence_len=8))


def test_probe_lets_some_bad_rows_pass(tmp_path, tokenizer):
    rows = [{"messages": TALK}] * 8 + [{"messages": [log("wizard", "a")]}] * 8
    actual = probe_samples(
        DatasetConfig(path=write(tmp_path / "a.jsonl", rows)), tokenizer, DataConfig()
    )
    assert actual.dropped == {UNKNOWN: 8}


def test_probe_refuses_a_template_that_leaves_out_a_part(tmp_path):
    second = load_tokenizer("builtin")
    second.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    thinking = [TALK[0], {**TALK[1], "reasoning_content": "Hm."}]
    rows = [{"messages": TALK}] * 15 + [{"messages": thinking}]
    dataset = DatasetConfig(path=write(tmp_path / "a.jsonl", rows))
    with pytest.raises(UserError, match="leaves out reasoning_content.*model.chat_template"):
        probe_samples(dataset, second, DataConfig())


def test_chat_without_a_template(tokenizer):
    second = load_tokenizer("builtin")
    second.chat_template = None
    with pytest.raises(UserError, match="x row 1: the tokenizer.*no chat template"):
        tokenize(second, {"messages": TALK})
    assert isinstance(tokenize(second, {"text": "plain text needs none"})[0], Sample)


def test_text_without_an_eos():
    second = load_tokenizer("builtin")
    second.eos_token = None
    with pytest.raises(UserError, match="eos"):
        tokenize(second, {"text": "a"})


def test_builtin_calculator(tokenizer):
    actual = probe_samples(DatasetConfig(path="builtin:calculator"), tokenizer, DataConfig())
    assert actual.format == "chat" and not actual.dropped
    lengths = [len(sample.tokens) for sample in actual.samples]
    assert 100 < min(lengths) and max(lengths) < 320


@pytest.fixture(scope="module")
def qwen2():
    if not (DATA / "qwen2_tokenizer").exists():
        pytest.skip(f"no {DATA / 'qwen2_tokenizer'}")
    return load_tokenizer(str(DATA / "qwen2_tokenizer"), "builtin")


def real(name):
    path = DATA / name
    if not path.exists():
        pytest.skip(f"no {path}")
    return str(path)


def test_gsm8k(qwen2):
    path = real("gsm8k_test.jsonl")
    dataset = DatasetConfig(
        path=path, fields={"prompt": "question", "completion": "answer"}, as_chat=True
    )
    row_tokenizer = RowTokenizer(dataset, qwen2, 2048, "error")
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()[:200]]
    for row in rows:
        [sample] = row_tokenizer(row, "")
        assert trained(qwen2, sample) == [row["answer"] + "<|im_end|>"]


def test_tau_bench_trajectories_with_tools(qwen2):
    path = real("tau_airline_trajectories.jsonl")
    tools = json.loads(Path(real("tau_airline_tools.json")).read_text())
    row_tokenizer = RowTokenizer(DatasetConfig(path=path), qwen2, 32768, "error")
    for line in Path(path).read_text().splitlines()[:20]:
        row = json.loads(line)
        sample, *notes = row_tokenizer({**row, "tools": tools}, "")
        assert {note.reason for note in notes} <= {f"column {name!r}" for name in row}
        output = [m for m in row["messages"] if m["role"] == "assistant"]
        texts = trained(qwen2, sample)
        assert len(texts) == len(output)
        for message, text in zip(output, texts, strict=True):
            assert text.startswith(message["content"] or "") and text.endswith("<|im_end|>")
            for call in message.get("tool_calls") or []:
                body = json.loads(text.partition("<tool_call>")[2].partition("</tool_call>")[0])
                assert body["name"] == call["function"]["name"]
                assert body["arguments"] == json.loads(call["function"]["arguments"])


def test_preference_data_reads_as_prompt_and_chosen(qwen2):
    path = real("preference_dpo_en.jsonl")
    actual = probe_samples(
        DatasetConfig(path=path, fields={"completion": "chosen"}), qwen2, DataConfig()
    )
    assert actual.format == "prompt_completion"
    assert all(len(trained(qwen2, sample)) == 1 for sample in actual.samples)
