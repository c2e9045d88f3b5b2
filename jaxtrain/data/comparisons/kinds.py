"""Kinds of preference rows, by their columns; formats.py names them in its errors."""

from collections.abc import Iterable
from typing import Literal

Kind = Literal["pairs", "labels", "scores"]

PROMPTS = ("prompt", "messages", "conversations", "question", "instruction", "input")
CHOSEN = (
    ("chosen", "rejected"),
    ("chosen_response", "rejected_response"),
    ("chatgpt", "llama2-13b-chat"),
)
ONE = ("completion", "output")
LABELS = ("label", "kto_tag", "completion_decision")
MANY = ("completions", "answers", "responses", "generations")


def detect_kind(columns: Iterable[str]) -> Kind | None:
    """Return the kind of rows with these columns, or None."""
    names = set(columns)
    if any(names >= set(columns_of_pair) for columns_of_pair in CHOSEN):
        return "pairs"
    prompt_names = names & set(PROMPTS)
    if names & set(LABELS) and (
        names & {"messages", "conversations"} or prompt_names and names & {*ONE}
    ):
        return "labels"
    if prompt_names and names & set(MANY):
        return "scores"
    return None
