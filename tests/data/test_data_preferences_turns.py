"""Preferences whose prompts end in a turn of the assistant: begun, or an answer left out."""

from test_data_preferences import TALK, log, only, recipe, write

from jaxtrain.config import DatasetConfig
from jaxtrain.data.comparisons.preference_row import parse_talk
from jaxtrain.data.comparisons.ranked import RankedPair


def test_answers_that_continue_other_beginnings_are_not_compared(tokenizer, tmp_path):
    def label(opening, answer, good):
        prompt = [{"role": "user", "content": "q"}, {"role": "assistant", "content": opening}]
        return {"prompt": prompt, "completion": answer, "label": good}

    rows = [label("Yes, ", "a", True), label("No, ", "b", False), label("Yes, ", "c", False)]
    dataset = DatasetConfig(path=write(tmp_path, rows), group_prompts=True)
    part = recipe(tokenizer).open(dataset)
    assert len(part.rows) == 2
    [ranked] = recipe(tokenizer).reader(dataset)(part.rows[0], "x")
    assert tokenizer.decode(ranked.prompt).endswith("assistant\nYes, ")
    texts = [tokenizer.decode(answer.tokens) for answer in ranked.answers]
    assert texts == ["a<|im_end|>", "c<|im_end|>"] and ranked.pairs == (RankedPair(0, 1),)


def test_answers_at_the_end_of_messages_are_no_beginning(tokenizer):
    row = {"messages": [*TALK, log("assistant", "old")], "chosen": "good", "rejected": "bad"}
    (_, answers), _ = only(tokenizer, row)
    assert answers == only(tokenizer, {**row, "messages": TALK})[0][1]
    (prompt, answers), _ = only(tokenizer, {**row, "continue_final_message": True})
    assert prompt.endswith("old") and answers[0].startswith("good")


def test_hh_text():
    text = "\n\nHuman: Hi\n\nthere\n\nAssistant: Yes\n\nHuman: Human: no\n\nAssistant:"
    assert [(m["role"], m["content"]) for m in parse_talk(text)] == [
        ("user", "Hi\n\nthere"),
        ("assistant", "Yes"),
        ("user", "Human: no"),
        ("assistant", ""),
    ]
