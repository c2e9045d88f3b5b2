"""Which part of a row is the prompt, which the ground truth, and what remains."""

import pytest

from jaxtrain.data.chat.messages import MalformedRow
from jaxtrain.methods.ebft.ground_truth_rows import (
    count_examples,
    list_turns,
    read_example,
    write_answer,
)

TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "<think>hm\n</think>\n\nfirst"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "second"},
    {"role": "user", "content": "thanks"},
]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Q", "ground_truth": "A"},
        {"prompt": "Q", "completion": "A"},
        {"input": "Q", "output": "A"},
        {"instruction": "Q", "output": "A"},
        {"question": "Q", "ground_truth": "A", "prompt": ""},
        {"question": "Q", "completion": "A", "ground_truth": None},
        {"prompt": "Q", "completion": [{"role": "assistant", "content": "A"}]},
    ],
)
def test_two_columns(row):
    example = read_example(row, *list_turns(row, "first"))
    assert (example.prompt, write_answer(example.answer), example.remaining) == ("Q", "A", [])


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_turns_of_a_conversation(column):
    row = {column: TALK}
    (first,), (last,) = list_turns(row, "first"), list_turns(row, "last")
    example = read_example(row, first)
    assert example.prompt == TALK[:2] and example.answer["content"].endswith("first")
    assert example.remaining == TALK[3:5]  # nobody answers the last thanks
    example = read_example(row, last)
    assert example.prompt == TALK[:4] and example.answer == TALK[4] and not example.remaining
    assert list_turns(row, "all") == [2, 4]
    assert count_examples([row, {"prompt": "Q", "ground_truth": "A"}, {}], "all") == [
        *[(0, 2), (0, 4)],
        (1, 0),
        (2, 0),
    ]


def test_thoughts_are_kept_split_or_left_out():
    row = {"messages": TALK}
    assert write_answer(read_example(row, 2, "keep").answer) == TALK[2]["content"]
    split = read_example(row, 2, "split").answer
    assert (split["reasoning_content"], split["content"]) == ("hm", "first")
    assert write_answer(split) == "<think>\nhm\n</think>\n\nfirst"
    alone = read_example(row, 2, "answer_only").answer
    assert alone == {"role": "assistant", "content": "first"}
    # Of what was said before, thoughts stay where answers lose theirs.
    assert read_example(row, 4, "answer_only").prompt[2] == TALK[2]
    assert read_example(row, 4, "split").prompt[2]["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    ("opening", "closing"),
    [("<reasoning>", "</reasoning>"), ("<|begin_of_thought|>", "<|end_of_thought|>")],
)
def test_other_tags_of_thoughts(opening, closing):
    row = {"prompt": "Q", "ground_truth": f"{opening} a\nb {closing}\nA"}
    actual = read_example(row, 0, "split").answer
    assert (actual["reasoning_content"], actual["content"]) == ("a\nb", "A")


@pytest.mark.parametrize(
    ("row", "output"),
    [
        ({"prompt": "Q"}, "no ground truth"),
        ({"prompt": "Q", "ground_truth": ""}, "empty"),
        ({"prompt": "", "ground_truth": "A"}, "no prompt"),
        ({"messages": [{"role": "assistant", "content": "A"}]}, "no prompt"),
    ],
)
def test_no_ground_truth_is_told(row, output):
    with pytest.raises(MalformedRow, match=output):
        read_example(row, 0)


def test_a_conversation_without_answers_has_no_turns():
    assert list_turns({"messages": TALK[:2]}, "first") == []
