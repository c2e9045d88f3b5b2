"""Rows of preference data: columns, tokens, pairs, lengths, and what is dropped."""

import json
import os
import pickle
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from jaxtrain.config.data import DataConfig, DatasetConfig
from jaxtrain.data.chat.messages import MalformedRow
from jaxtrain.data.chat.prompt import prompt_tokens
from jaxtrain.data.chat.template import load_tokenizer, render_text
from jaxtrain.data.comparisons.preference_row import read_judged
from jaxtrain.data.comparisons.preferences import Preferences, RankedReader, halve
from jaxtrain.data.comparisons.ranked import Ranked, RankedPair, rank_pairs
from jaxtrain.data.counts import drops_of
from jaxtrain.data.packing.pack import NLL
from jaxtrain.data.packing.tree import Node, Tree
from jaxtrain.data.pipeline import count_part, open_source, plan_steps
from jaxtrain.data.preview import probe_samples
from jaxtrain.data.sample import Dropped
from jaxtrain.data.sources.dataset import open_rows
from jaxtrain.errors import UserError

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("JAXTRAIN_TEST_DATA", ROOT.parent / "shared" / "data"))
ASKED = "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n"


def log(role, content, **extra):
    return {"role": role, "content": content, **extra}


def branches(ranked):
    """A tree as the methods make it: the prompt, each answer a leaf."""
    zeros = {"nll": np.zeros(len(ranked.prompt), np.float32)}
    leaves = [Node(0, answer.tokens, {"nll": answer.weights}) for answer in ranked.answers]
    root = Node(-1, ranked.prompt, zeros)
    return Tree((root, *leaves), origin=ranked.origin, controls=ranked.controls)


def read(tokenizer, row, want="pairs", length=512, too_long="drop", **dataset):
    reader = RankedReader(DatasetConfig(path="x", **dataset), tokenizer, length, too_long, want)
    return pickle.loads(pickle.dumps(reader))(row, "x row 1")


def only(tokenizer, row, **options):
    """(prompt, answers, trained texts) of a row that becomes one Ranked, and that."""
    actual = read(tokenizer, row, **options)
    [ranked] = [entry for entry in actual if isinstance(entry, Ranked)]
    return texts(tokenizer, ranked), ranked


def texts(tokenizer, ranked):
    decode = lambda ids: tokenizer.decode([int(i) for i in ids])  # noqa: E731
    return decode(ranked.prompt), [decode(answer.tokens) for answer in ranked.answers]


def reasons(tokenizer, row, **options):
    return [entry.reason for entry in read(tokenizer, row, **options) if isinstance(entry, Dropped)]


TALK = [log("user", "How?")]
GOOD, BAD = log("assistant", "So."), log("assistant", "No!")
HUMAN = "\n\nHuman: How?\n\nAssistant:"
WHOLE = {"chosen": [*TALK, GOOD], "rejected": [*TALK, BAD]}
SAME_PAIR = {
    "messages": {"prompt": TALK, "chosen": [GOOD], "rejected": [BAD]},
    "one message": {"prompt": TALK, "chosen": GOOD, "rejected": BAD},
    "implicit": WHOLE,
    "whole beside a text": {"prompt": "How?", "messages": TALK, **WHOLE},
    "whole beside messages": {"prompt": TALK, **WHOLE},
    "helpful-harmless": {"chosen": f"{HUMAN} So.", "rejected": f"{HUMAN} No!"},
    "helpful-harmless, prompt apart": {"prompt": HUMAN, "chosen": "So.", "rejected": "No!"},
    "question": {"question": "How?", "chosen": "So.", "rejected": "No!", "system": ""},
    "chatgpt": {"question": "How?", "chatgpt": "So.", "llama2-13b-chat": "No!"},
    "instruction": {"instruction": "How?", "chosen_response": "So.", "rejected_response": "No!"},
    "alpaca": {"instruction": "How?", "input": "", "chosen": "So.", "rejected": "No!"},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "How?"}],
        "chosen": {"from": "gpt", "value": "So."},
        "rejected": {"from": "gpt", "value": "No!"},
    },
    "one rejected of a list": {"prompt": TALK, "chosen": ["So."], "rejected": ["No!"]},
    "scores": {"prompt": TALK, "completions": ["No!", "So."], "scores": [1, "2.5"]},
    "ranks": {"instruction": "How?", "generations": ["So.", "No!"], "ranks": [1, 2]},
    "completions of messages": {
        "prompt": TALK,
        "responses": [[BAD], [GOOD]],
        "ratings": [0.1, 0.2],
    },
    "objects with a score": {
        "instruction": "How?",
        "completions": [
            {"response": "No!", "overall_score": 2.0, "model": "a"},
            {"response": "So.", "overall_score": 7.5, "model": "b"},
        ],
    },
    "objects with a rank": {
        "prompt": HUMAN + " ",
        "answers": [{"answer": "So.", "rank": 1.0}, {"answer": "No!", "rank": 2.0}],
    },
}


@pytest.mark.parametrize("name", SAME_PAIR)
def test_columns_of_one_pair(tokenizer, name):
    (prompt, answers), ranked = only(tokenizer, SAME_PAIR[name])
    assert prompt == ASKED
    [pair] = ranked.pairs
    order = [answers[pair.chosen], answers[pair.rejected]]
    assert order == ["So.<|im_end|>", "No!<|im_end|>"]
    assert all(answer.weights.all() for answer in ranked.answers)
    assert ranked.labels == () and ranked.origin == "x row 1"


def test_axolotl_field_mappings(tokenizer):
    row = {
        "talk": [{"who": "person", "said": "How?"}],
        "good": {"who": "bot", "said": "So."},
        "bad": {"who": "bot", "said": "No!"},
    }
    fields = {"messages": "talk", "chosen": "good", "rejected": "bad"}
    fields |= {"messages.role": "who", "messages.content": "said"}
    (prompt, answers), _ = only(tokenizer, row, fields=fields, roles={"person": "user"})
    assert (prompt, answers) == (ASKED, ["So.<|im_end|>", "No!<|im_end|>"])


def test_tokens_are_those_of_the_template(tokenizer):
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"function": {"name": "add", "arguments": "{}"}}
    chosen = [
        log("assistant", "", reasoning_content="Hm.", tool_calls=[call]),
        log("tool", "3"),
        log("assistant", "3"),
    ]
    row = {"prompt": TALK, "chosen": chosen, "rejected": "2", "tools": tools, "system": "Be."}
    (prompt, answers), ranked = only(tokenizer, row)
    before = [log("system", "Be."), *TALK]
    assert ranked.prompt.tolist() == prompt_tokens(tokenizer, before, tools)
    retained = read_judged(row, DatasetConfig(path="x")).answers[0]
    full = render_text(tokenizer, [*before, *retained], tools)
    assert (prompt + answers[0] + "\n") == full and answers[1] == "2<|im_end|>"
    # What the tool says is no trained token.
    first = ranked.answers[0]
    silent = tokenizer.decode(first.tokens[first.weights == 0].tolist())
    assert (
        silent
        == "\n<|im_start|>tool\n<tool_response>3</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    (_, _), last = only(tokenizer, row, train_on="last")
    assert tokenizer.decode(last.answers[0].tokens[last.answers[0].weights > 0].tolist()) == (
        "3<|im_end|>"
    )


def test_plain_texts(tokenizer):
    eos = tokenizer.eos_token
    (prompt, answers), ranked = only(
        tokenizer, {"prompt": "One plus", "chosen": " one", "rejected": [" two", " ten"]}
    )
    assert (prompt, answers) == ("One plus", [f" one{eos}", f" two{eos}", f" ten{eos}"])
    assert ranked.pairs == (RankedPair(0, 1), RankedPair(0, 2))
    (prompt, answers), _ = only(tokenizer, {"chosen": "One is one", "rejected": "One is two"})
    assert prompt + answers[0] == f"One is one{eos}" and prompt + answers[1] == f"One is two{eos}"
    assert "One" in prompt
    (prompt, answers), _ = only(
        tokenizer, {"prompt": "How?", "chosen": "So.", "rejected": "No!"}, as_chat=True
    )
    assert (prompt, answers) == (ASKED, ["So.<|im_end|>", "No!<|im_end|>"])


def test_labels(tokenizer):
    label = {"prompt": TALK, "completion": "So.", "label": 1}
    (prompt, answers), ranked = only(tokenizer, label, want="labels")
    assert (prompt, answers, ranked.labels) == (ASKED, ["So.<|im_end|>"], (True,))
    talk = {"messages": [*TALK, BAD], "kto_tag": False}
    (prompt, answers), ranked = only(tokenizer, talk, want="labels")
    assert (prompt, answers, ranked.labels) == (ASKED, ["No!<|im_end|>"], (False,))
    whole = {**label, "completion": [*TALK, GOOD]}
    assert only(tokenizer, whole, want="labels")[0] == only(tokenizer, label, want="labels")[0]
    # Pairs are two labeled answers; one that is better and worse is neither.
    _, ranked = only(tokenizer, SAME_PAIR["messages"], want="labels")
    assert ranked.labels == (True, False) and ranked.pairs == ()
    three = {"prompt": TALK, "completions": ["a", "b", "c"], "scores": [1, 2, 3]}
    (_, answers), ranked = only(tokenizer, three, want="labels", pairing="all")
    assert ranked.labels == (False, True) and [a[0] for a in answers] == ["a", "c"]
    for text in ("True", "1"):  # of a CSV file
        assert only(tokenizer, {**label, "label": text}, want="labels")[1].labels == (True,)
    text = {**label, "label": "yes"}
    refused = ["malformed row: a label is 'yes', not true, false, 1 or 0"]
    assert reasons(tokenizer, text, want="labels") == refused
    assert reasons(tokenizer, label) == ["malformed row: a label where answers are to be compared"]


@pytest.mark.parametrize(
    "pairing, pairs, ties",
    [
        ("best_worst", [(1, 2)], 0),
        ("best_rest", [(1, 0), (1, 2)], 1),
        ("neighbors", [(3, 0), (0, 2)], 1),
        ("all", [(1, 0), (1, 2), (3, 0), (3, 2), (0, 2)], 1),
    ],
)
def test_scores_become_pairs(pairing, pairs, ties):
    actual, left_out = rank_pairs([3.0, 5.0, 1.0, 5.0, None], pairing)
    assert [pair[:2] for pair in actual] == pairs
    assert left_out == ["answer without a score", *["equal scores"] * ties]
    assert rank_pairs([1.0, 1.0], pairing) == ([], ["equal scores"])
    assert rank_pairs([1.0, None], pairing)[0] == []


def test_margins(tokenizer):
    row = {**SAME_PAIR["messages"], "margin": 2, "score_chosen": 7.5, "score_rejected": "3"}
    assert only(tokenizer, row)[1].pairs[0].margin == 2
    assert only(tokenizer, row, margin="scores")[1].pairs[0].margin == 4.5
    assert only(tokenizer, SAME_PAIR["scores"], margin="scores")[1].pairs[0].margin == 1.5
    assert reasons(tokenizer, {**row, "margin": "much"}) == [
        "malformed row: column margin must be a number, or one for each pair"
    ]


def test_a_prompt_that_the_answer_rewrites(tokenizer):
    """Qwen3's template shows a thought until the next user speaks: the shared part is the trunk."""
    qwen = load_tokenizer("builtin", str(Path(__file__).parent / "qwen3.jinja"))
    before = [log("user", "a"), log("assistant", "b", reasoning_content="Hm."), log("tool", "c")]
    row = {
        "prompt": before,
        "chosen": [log("assistant", "d", reasoning_content="Oh.")],
        "rejected": [log("user", "e"), log("assistant", "f")],
    }
    (prompt, answers), ranked = only(qwen, row)
    assert prompt.endswith("<|im_start|>assistant\n") and "Hm." in answers[0]
    assert "Hm." not in answers[1]
    for answer, last in zip(ranked.answers, ("d", "f"), strict=True):
        assert answer.weights[0] == 0 and answer.weights[-1] == 1
        output = qwen.decode(answer.tokens[answer.weights > 0].tolist())
        assert output.endswith(f"{last}<|im_end|>") and "b" not in output


def test_lengths(tokenizer):
    row = {"prompt": "a b c d", "chosen": " e f g h i j", "rejected": [" k", " e f g h i j l"]}
    full = only(tokenizer, row)[1]
    n = len(full.prompt) + len(full.answers[1].tokens)
    assert reasons(tokenizer, row, length=n) == ["too long", "too long"]
    _, cut = only(tokenizer, row, length=n, too_long="truncate")
    # The long rejected one is then the chosen one: no pair.
    assert cut.pairs == (RankedPair(0, 1),)
    assert [len(cut.prompt) + len(answer.tokens) for answer in cut.answers] == [n, n]
    assert reasons(tokenizer, row, length=n, too_long="truncate") == [
        "malformed row: chosen and rejected are the same"
    ]
    short = len(full.prompt)
    for too_long in ("drop", "truncate"):
        assert set(reasons(tokenizer, row, length=short, too_long=too_long)) == {"prompt too long"}
    with pytest.raises(UserError, match=r"x row 1: .*data.sequence_len is 9"):
        read(tokenizer, row, length=9, too_long="error")


@pytest.mark.parametrize(
    "row, reason",
    [
        ({}, "no known columns among none"),
        ({"chosen": "a", "rejected": None}, "needs (null: rejected)"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ({"chosen": [*TALK, GOOD], "rejected": [*TALK, GOOD]}, "chosen and rejected are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "empty answer"),
        ({"prompt": TALK, "chosen": GOOD, "rejected": log("assistant", " ")}, "empty answer"),
        ({"prompt": TALK, "chosen": GOOD, "rejected": log("user", "a")}, "empty answer"),
        ({"chosen": [*TALK, GOOD], "rejected": TALK}, "empty answer"),
        ({"chosen": "b", "rejected": "c"}, "chosen and rejected share no prompt"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "chosen and rejected share no prompt"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "column prompt holds a number, not"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "column chosen holds a number, not"),
        ({"prompt": "a", "chosen": [], "rejected": "b"}, "messages must be a list of"),
        ({"prompt": "a", "chosen": ["b", 3], "rejected": "b"}, "column chosen holds a number"),
        ({"prompt": "a\ud800", "chosen": "b", "rejected": "c"}, "half a surrogate pair"),
        ({"prompt": "a", "chosen": "b", "rejected": ["c"] * 65}, "more than 64 answers"),
        ({"prompt": "a", "completions": ["b", "c"], "scores": [1]}, "column scores must be a list"),
        ({"prompt": "a", "completions": ["b", "c"]}, "completions without scores or ranks"),
        ({"prompt": "a", "completions": [{"x": 1}]}, "a completion has none of"),
        ({"prompt": [log("user", "z")], **WHOLE}, "chosen is a whole conversation that does not"),
        ({"prompt": [*TALK, GOOD], **WHOLE}, "chosen is a whole conversation that does not hold"),
        ({"prompt": TALK, **WHOLE, "rejected": BAD}, "chosen and rejected share no prompt"),
        ({"prompt": "z", **WHOLE}, "chosen is a whole conversation that does not hold the prompt"),
    ],
)
def test_bad_rows_are_counted_drops(tokenizer, row, reason):
    [actual] = reasons(tokenizer, row)
    assert actual.startswith(f"malformed row: {reason}") or reason in actual


def test_deep_rows(tokenizer):
    deep = []
    for _ in range(200):
        deep = [deep]
    assert reasons(tokenizer, {"prompt": "a", "chosen": deep, "rejected": "b"}) == [
        "malformed row: nested deeper than 100 levels"
    ]


def test_spelled_control_tokens_stay_text(tokenizer):
    row = {"prompt": [log("user", "<|im_end|>?")], "chosen": "So <|im_end|>", "rejected": "No"}
    (_, answers), ranked = only(tokenizer, row)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ranked.controls == 2 and ranked.answers[0].tokens.tolist().count(end) == 1
    assert answers[0] == "So <|im_end|><|im_end|>"
    _, same = only(tokenizer, row, special_tokens="control")
    assert same.answers[0].tokens.tolist().count(end) > 1


def write(tmp_path, rows, name="pairs.jsonl"):
    file = tmp_path / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def recipe(tokenizer, length=128, **options):
    return Preferences(DataConfig(sequence_len=length), tokenizer, branches, NLL, **options)


def test_rows_of_one_prompt_share_it(tokenizer, tmp_path):
    rows = [
        {"prompt": TALK, "chosen": "a", "rejected": "b"},
        {"prompt": "Other", "chosen": "a", "rejected": "b"},
        {"prompt": TALK, "chosen": "a", "rejected": "c"},
        {"prompt": "", "chosen": "a"},
    ]
    dataset = DatasetConfig(path=write(tmp_path, rows), group_prompts=True)
    part = recipe(tokenizer).open(dataset)
    created = [part.tokenize(part.rows[i], part.origin(i)) for i in range(len(part.rows))]
    assert [type(items[0]).__name__ for items in created] == ["Tree", "Tree", "Dropped"]
    assert created[0][0].num_branches == 3
    [ranked] = recipe(tokenizer).reader(dataset)(part.rows[0], "x")
    assert ranked.pairs == (RankedPair(0, 1), RankedPair(0, 2))


def test_labels_of_one_prompt_become_pairs(tokenizer, tmp_path):
    label = lambda answer, good: {"prompt": TALK, "completion": answer, "label": good}  # noqa: E731
    rows = [label("a", True), label("b", False), label("c", False), label("d", True)]
    rows += [label("d", False), {"prompt": "x", "completion": "y", "label": True}]
    path = write(tmp_path, rows)
    dataset = DatasetConfig(path=path, group_prompts=True)
    part = recipe(tokenizer).open(dataset)
    actual, remaining = recipe(tokenizer).reader(dataset)(part.rows[0], "x")
    assert (
        actual.pairs == (RankedPair(0, 1), RankedPair(0, 2))
        and remaining.reason == "answer with both labels"
    )
    [alone] = part.tokenize(part.rows[1], "x")
    assert alone.reason == "prompt whose labels are all alike"
    with pytest.raises(UserError, match="one answer with a label each.*group_prompts = true"):
        recipe(tokenizer).probe(DatasetConfig(path=path))
    pair = recipe(tokenizer, want="labels").reader(dataset)(part.rows[0], "x")
    assert pair[0].labels == (True, False, False, True, False)


def test_many_answers_become_several_trees(tokenizer, tmp_path):
    answers = [f"{'x ' * 20}{number}" for number in range(9)]
    row = {"prompt": TALK, "completions": answers, "scores": list(range(9))}
    dataset = DatasetConfig(path=write(tmp_path, [row]), pairing="all")
    created = recipe(tokenizer, 64)
    [ranked] = created.reader(dataset)(row, "x")
    part = created.open(dataset)
    trees = part.tokenize(row, "x")
    assert len(ranked.pairs) == 36 and len(trees) > 1
    assert all(tree.num_tokens <= created.row_tokens == 128 for tree in trees)
    prompts = {tuple(tree.nodes[0].tokens.tolist()) for tree in trees}
    assert prompts == {tuple(ranked.prompt.tolist())}
    output = lambda r, p: tuple(tuple(r.answers[i].tokens.tolist()) for i in p[:2])  # noqa: E731
    remaining, smallest = [ranked], []
    while remaining:
        entry = remaining.pop()
        halves = halve(entry)
        remaining += halves
        smallest += [] if halves else [entry]
    assert sorted(output(r, p) for r in smallest for p in r.pairs) == sorted(
        output(ranked, p) for p in ranked.pairs
    )


def test_probe_preview_and_packing(tokenizer, tmp_path):
    rows = [{"prompt": TALK, "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(9)]
    rows.append({"prompt": TALK, "chosen": "a", "rejected": "a"})
    created = recipe(tokenizer)
    dataset = DatasetConfig(path=write(tmp_path, rows))
    actual = created.probe(dataset)
    assert "10 rows of pairs, columns prompt, chosen, rejected" in str(actual)
    assert "9 pairs of 18 answers" in str(actual) and "1 x malformed row" in str(actual)
    assert "shared prefixes save" in str(actual) and actual.dropped
    console = Console(record=True, width=200, force_terminal=False)
    created.show(dataset, 1, console)
    shown = console.export_text()
    assert "chosen: 5 tokens" in shown and "rejected:" in shown and "⟦" in shown
    assert (
        "saved" in shown and "dropped: malformed row: chosen and rejected are the same: 1" in shown
    )
    data = DataConfig(sequence_len=128, datasets=[dataset], shuffle=False)
    shape = {"seed": 0, "rows_per_microstep": 1, "microsteps": 1, "num_epochs": 1.0}
    source = open_source(data, created, **shape)
    [batch] = next(source)
    assert int((batch.weights["nll"] > 0).sum()) == sum(
        int(answer.weights.sum()) for sample in actual.samples for answer in sample.answers
    )
    source.close()
    assert plan_steps(data, created, **shape)[0] == 1


def test_a_format_from_outside_and_a_stream(tokenizer, tmp_path):
    code = "def votes(row, tokenizer, dataset):\n"
    code += "    if not row['votes']:\n        raise ValueError('nobody voted')\n"
    code += "    best = max(row['votes'], key=row['votes'].get)\n"
    code += "    others = [text for text in row['votes'] if text != best]\n"
    code += "    return {'prompt': row['q'], 'chosen': best, 'rejected': others}\n"
    (tmp_path / "own.py").write_text(code)
    rows = [{"q": "a", "votes": {"b": 1, "c": 2, "d": 0}}, {"q": "a", "votes": {}}]
    dataset = DatasetConfig(
        path=write(tmp_path, rows), format=f"{tmp_path / 'own.py'}:votes", streaming=True
    )
    created = recipe(tokenizer)
    actual = created.probe(dataset)
    assert "a stream of format" in str(actual) and actual.samples[0].pairs == (
        RankedPair(0, 1),
        RankedPair(0, 2),
    )
    assert (
        actual.dropped == {"malformed row: nobody voted": 1} and created.settings(dataset) is None
    )
    created.show(dataset, 1, Console(quiet=True))
    with pytest.raises(UserError, match="group_prompts needs all rows"):
        created.open(dataset.model_copy(update={"group_prompts": True}))


def test_columns_that_are_none(tokenizer, tmp_path):
    path = write(tmp_path, [{"prompt": "a", "completion": "b"}])
    with pytest.raises(UserError, match="columns found are prompt, completion\nAccepted columns"):
        recipe(tokenizer).probe(DatasetConfig(path=path))
    with pytest.raises(UserError, match="'chat' is one of sft"):
        recipe(tokenizer).probe(DatasetConfig(path=path, format="chat"))
    with pytest.raises(UserError, match='did you mean "chosen"'):
        recipe(tokenizer).probe(DatasetConfig(path=path, fields={"choosen": "a"}))
    path = write(tmp_path, [SAME_PAIR["messages"]])
    with pytest.raises(UserError, match='these are preference data .*task.kind "preference"'):
        probe_samples(DatasetConfig(path=path), tokenizer, DataConfig())


def test_unknown_rows_raise_nothing_but_malformed():
    with pytest.raises(MalformedRow, match="no known columns"):
        read_judged({"a": 1}, DatasetConfig(path="x"))


def test_calculator_pairs(tokenizer):
    """The right turn is builtin:calculator's; the wrong one differs in a number alone."""
    options = {"num_rows": 300, "seed": 1}
    pairs = open_rows(DatasetConfig(path="builtin:calculator_pairs", options=options))
    talks = open_rows(DatasetConfig(path="builtin:calculator", options=options))
    mistakes = Counter()
    for index in range(len(pairs)):
        row, messages = pairs[index], talks[index]["messages"]
        together = [*row["prompt"], *row["chosen"]]
        assert together == messages[: len(together)]
        assert row["prompt"][-1]["role"] == {"call": "user", "answer": "tool"}[row["mistake"]]
        good, bad = (json.dumps(row[name]) for name in ("chosen", "rejected"))
        assert good != bad and re.sub(r"\d+", "", good) == re.sub(r"\d+", "", bad)
        mistakes[row["mistake"]] += 1
    assert min(mistakes.values()) > 100 and len(mistakes) == 2
    assert pickle.loads(pickle.dumps(pairs))[7] == pairs[7]
    (prompt, answers), ranked = only(tokenizer, pairs[0])
    assert prompt.endswith("<|im_start|>assistant\n") and len(answers) == 2
    assert all(answer.weights.all() for answer in ranked.answers)


@pytest.mark.slow
def test_a_real_set():
    """The 299 pairs of LLaMA-Factory's demo under Qwen2's tokenizer."""
    if not (DATA / "preference_dpo_en.jsonl").is_file():
        pytest.skip(f"no preference_dpo_en.jsonl in {DATA}; set JAXTRAIN_TEST_DATA")
    qwen = load_tokenizer(str(DATA / "qwen2_tokenizer"))
    created = recipe(qwen, 4096)
    part = created.open(DatasetConfig(path=str(DATA / "preference_dpo_en.jsonl")))
    counts, full = count_part(part, created.row_tokens, 600.0)
    assert full and counts["draws"] == 299
    # Each is a pair of up to 4,096 tokens; sharing their prompts saves 28 % of the tokens.
    assert counts["trees"] == 299 and not drops_of(counts)
    assert (counts["packed_tokens"], counts["flat_tokens"]) == (309_595, 432_748)
    cut = Preferences(DataConfig(sequence_len=256, too_long="truncate"), qwen, branches, NLL).open(
        DatasetConfig(path=str(DATA / "preference_dpo_en.jsonl"), max_rows=40)
    )
    counts, _ = count_part(cut, 512, 600.0)
    assert counts["trees"] + counts["dropped:prompt too long"] == 40 > counts["trees"] > 20
