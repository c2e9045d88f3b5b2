"""Rows with a prompt and its ground truth: what EBFT compares drawn answers with.

| columns                      | prompt                         | ground truth              |
|------------------------------|--------------------------------|---------------------------|
| a question, and an answer    | the text, or the messages      | ground_truth, completion, |
|                              |                                | or output                 |
| messages (or conversations)  | what stands before the turn    | the turn of the assistant |

Of a conversation the turn is the assistant's first one, the last one, or each in turn; behind the
first one the others remain, which an environment may have played (`remaining_turns`).
"""

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from jaxtrain.data.chat.messages import MalformedRow, split_thinking, without_flags
from jaxtrain.data.chat.rows import Row
from jaxtrain.data.formats import ANSWERS as PLAIN_ANSWERS
from jaxtrain.data.formats import QUESTIONS
from jaxtrain.data.sample import select_turns

ANSWERS = ("ground_truth", *PLAIN_ANSWERS)
"""Columns of the ground truth."""

Turns = Literal["first", "last", "all"]
Thinking = Literal["keep", "split", "answer_only"]


class GroundTruthExample(NamedTuple):
    """A prompt and what should follow."""

    prompt: Any
    """A text or messages."""
    answer: dict[str, Any]
    """The assistant's message that is the ground truth."""
    remaining: list[dict[str, Any]]
    """The conversation behind it, up to the assistant's last turn."""


def list_turns(row: Mapping[str, Any], turns: Turns) -> list[int]:
    """Return the indices of the assistant's turns in a row's messages that become examples; [0] for
    a row of another form, [] for a conversation without any."""
    messages = _conversation(row)
    if messages is None:
        return [0]
    indices = select_turns(messages, "assistant")
    match turns:
        case "first":
            return indices[:1]
        case "last":
            return indices[-1:]
    return indices


def read_example(
    row: Mapping[str, Any], turn: int, thinking: Thinking = "keep", column: str = "prompt"
) -> GroundTruthExample:
    """The example of a row at one of `list_turns`; raises Malformed where there is no prompt or no
    ground truth.

    thinking: of the ground truth. "keep": as it stands there. "split": thoughts between tags become
    reasoning_content, which the chat template writes in its own way, of all the assistant's turns.
    "answer_only": none; what was said before keeps its own. column: of the prompt.
    """
    messages = _conversation(row)
    if messages is not None:
        messages = without_flags(messages)
        prompt: Any = messages[:turn]
        answer, remaining = messages[turn], messages[turn + 1 :]
        while remaining and remaining[-1]["role"] != "assistant":
            remaining = remaining[:-1]
    else:
        prompt, answer, remaining = *_pair(row, column), []
    if not prompt:
        raise MalformedRow("no prompt before the ground truth")
    if thinking == "split":
        answer = split_thinking(answer)
        remaining = [split_thinking(message) for message in remaining]
        if not isinstance(prompt, str):
            prompt = [split_thinking(message) for message in prompt]
    elif thinking == "answer_only":
        answer = drop_thinking(answer)
    if not any(answer.get(key) for key in ("content", "reasoning_content", "tool_calls")):
        raise MalformedRow("the ground truth is empty")
    return GroundTruthExample(prompt, answer, remaining)


def _conversation(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The messages of a row that is a conversation; None of one that is not."""
    if row.get("ground_truth") is not None or row.get("completion") is not None:
        return None
    columns = Row(row)
    messages = columns.messages()
    return None if messages is None else columns.with_context(messages)


def _pair(row: Mapping[str, Any], column: str) -> tuple[Any, dict[str, Any]]:
    """(prompt, the assistant's message) of a row of two columns."""
    columns = Row(row)
    name, answer_name = (
        next((name for name in names if name in columns), None)
        or next((name for name in names if row.get(name) is not None), None)
        for names in ((column, *QUESTIONS), ANSWERS)
    )
    if name != column and columns.messages() is not None:
        name = "messages"
    if name is None or answer_name is None:
        raise MalformedRow(
            "no ground truth: a row needs messages with an assistant's turn, or a question"
            f" ({', '.join(dict.fromkeys((column, *QUESTIONS)))}) and {', '.join(ANSWERS)}"
        )
    prompt = columns.prompt(name)
    if not isinstance(prompt, str) and prompt and prompt[-1]["role"] == "assistant":
        raise MalformedRow("the prompt ends in a turn that the ground truth cannot continue")
    answers = columns.read_messages(row[answer_name], "assistant")
    if [message["role"] for message in answers] != ["assistant"]:
        raise MalformedRow("the ground truth must be a text, or one message of the assistant's")
    return prompt, answers[0]


def drop_thinking(message: Mapping[str, Any]) -> dict[str, Any]:
    """An assistant's message without its thoughts, tagged or apart."""
    bare = {key: value for key, value in message.items() if key != "reasoning_content"}
    if isinstance(bare.get("content"), str):
        text = re.sub(r"<think>.*?</think>\s*", "", bare["content"], flags=re.DOTALL)
        bare["content"] = text.strip()
    return bare


def write_answer(message: Mapping[str, Any]) -> str:
    """An assistant's message as one text, its thoughts in <think> tags: for people and rewards."""
    thoughts, text = message.get("reasoning_content"), message.get("content") or ""
    return f"<think>\n{thoughts}\n</think>\n\n{text}" if thoughts else text


def count_examples(rows: Any, turns: Turns) -> list[tuple[int, int]]:
    """(row, place of the turn) of every example of rows with random access; a row that gives none,
    or cannot be read, stands there once, so that it is counted where it is asked for."""
    examples: list[tuple[int, int]] = []
    for index in range(len(rows)):
        try:
            places = list_turns(rows[index] or {}, turns)
        except MalformedRow:
            places = []
        examples += [(index, turn) for turn in places] or [(index, -1)]
    return examples
