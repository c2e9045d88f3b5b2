import io

import numpy as np
import pytest
from rich.console import Console

from jaxtrain.data import preview
from jaxtrain.data.sample import Dropped, Sample


def sample(tokenizer, pieces, origin="a.jsonl line 3"):
    """A sample of (text, weight) pieces."""
    tokens, weights = [], []
    for text, weight in pieces:
        ids = tokenizer(text)["input_ids"]
        tokens += ids
        weights += [weight] * len(ids)
    return Sample(np.array(tokens, np.int32), np.array(weights, np.float32), origin)


PIECES = [("What is [1]?\n", 0.0), ("The answer", 1.0), (" is 1.<|im_end|>", 0.5), ("\n", 0.0)]


def test_plain_text_marks_trained_stretches(tokenizer):
    text = preview.plain_text(sample(tokenizer, PIECES), tokenizer)
    assert text == "What is [1]?\n⟦The answer is 1.<|im_end|>⟧\n"


@pytest.mark.parametrize("pieces, text", [([("ab", 1.0)], "⟦ab⟧"), ([("ab", 0.0)], "ab"), ([], "")])
def test_plain_text_of_uniform_samples(tokenizer, pieces, text):
    assert preview.plain_text(sample(tokenizer, pieces), tokenizer) == text


def test_marked_text_has_the_same_text_in_two_styles(tokenizer):
    text = preview.marked_text(sample(tokenizer, PIECES), tokenizer)
    assert text.plain == "What is [1]?\nThe answer is 1.<|im_end|>\n"
    styles = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert styles["The answer is 1.<|im_end|>"] == preview.TRAINED
    assert styles["What is [1]?\n"] == preview.CONTEXT


@pytest.mark.parametrize("terminal", [False, True])
def test_show_sample(tokenizer, terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=60)
    shown = sample(tokenizer, PIECES)
    preview.show_sample(shown, tokenizer, console)
    text = out.getvalue()
    trained = int((shown.weights > 0).sum())
    assert f"a.jsonl line 3: {len(shown.tokens)} tokens, {trained} trained" in text.replace(
        "\x1b[1m", ""
    )
    assert ("\x1b[" in text) is terminal and ("⟦The" in text) is not terminal
    # Square brackets are text, not mark-up of rich.
    assert "[1]" in text


def test_counts(tokenizer):
    counts = preview.SampleCounts(
        [
            sample(tokenizer, [("12", 0.0), ("34", 1.0)]),
            Dropped("too long", "a"),
            sample(tokenizer, [("1", 0.0), ("2", 1.0)]),
            Dropped("no trained token", "b"),
            Dropped("too long", "c"),
        ]
    )
    assert dict(counts.rows()) == {
        "samples": "2",
        "dropped: too long": "2",
        "dropped: no trained token": "1",
        "tokens": "6",
        "trained tokens": "3 (50.0%)",
        "tokens a sample": "2 to 4",
        "  half / 90% / 99% have at most": "2 / 4 / 4",
    }


def test_counts_of_nothing():
    assert preview.SampleCounts().rows() == [("samples", "0")]


def test_show_counts(tokenizer):
    out = io.StringIO()
    counts = preview.SampleCounts([sample(tokenizer, PIECES)])
    preview.print_pairs("a.jsonl", counts.rows(), Console(file=out, width=80))
    assert "a.jsonl" in out.getvalue() and "trained tokens" in out.getvalue()
