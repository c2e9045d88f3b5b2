"""Rows of preference data before tokenization: a prompt, answers, and which answer is better.

The kind of a row is detected from its columns, which include those of many public datasets.

| kind   | columns                                                                             |
|--------|-------------------------------------------------------------------------------------|
| pairs  | a prompt, `chosen`, `rejected`; `margin`, `score_chosen` and `score_rejected`         |
| labels | a prompt, `completion`, `label`; or `messages` that end in the answer, and `label`    |
| scores | a prompt, `completions`, `scores` or `ranks`; or completions that hold their own      |

The prompt is `prompt`, `messages`, `conversations`, `question`, `instruction` (with `input`) or
`input`. `chosen` and `rejected` may be whole conversations; their prompt is what they share.
"""

import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxtrain.config.data import DatasetConfig
from jaxtrain.data.chat.messages import MalformedRow, check_values, is_empty, read_flag
from jaxtrain.data.chat.rows import CONTEXT, MESSAGES, Row
from jaxtrain.data.chat.template import context_spans
from jaxtrain.data.chat.tokenize import continue_turn
from jaxtrain.data.comparisons.ranked import RankedPair, rank_pairs
from jaxtrain.data.formats import (
    ANSWERS,
    CHOSEN,
    LABELS,
    MANY,
    PROMPTS,
    Kind,
    check_fields,
    detect_kind,
    read_number,
)
from jaxtrain.data.packing.tree import Image
from jaxtrain.errors import UserError
from jaxtrain.text_safety import show

Messages = list[dict[str, Any]]
Text = str | Messages
SCORES = ("scores", "ratings", "rating")
RANKS = ("ranks", "rank")
OWN_TEXT = ("response", "answer", "completion", "text", "content", "messages")
OWN_SCORE = ("score", "overall_score", "rating", "reward")
OTHERS = (*CONTEXT, "margin", "score_chosen", "score_rejected")
COLUMNS = sorted(
    {*PROMPTS, *itertools.chain(*CHOSEN), *ANSWERS, *LABELS, *MANY, *SCORES, *RANKS, *OTHERS}
)
"""All columns that are read."""

ACCEPTED = """\
  pairs: chosen + rejected, and a prompt unless both are whole conversations
  labels: a prompt + completion + label, or messages + label
  scores: a prompt + completions + scores (or ranks), or completions with a score in each
  a prompt: prompt, messages, conversations, question, instruction (+ input) or input"""

SAME = "chosen and rejected are the same"
NOTHING_SHARED = "chosen and rejected share no prompt"
MAX_ANSWERS = 64
"""Limit per prompt, because each may be compared with each."""
SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):[ \n]?")
REPLIES = ("assistant", "tool")
"""Roles that do not open a conversation."""
BEGINS = re.compile(r"\s*Human:")
"""Conversations in one text, as the helpful-harmless data have them (Bai et al. 2022)."""


@dataclass(frozen=True)
class PreferenceRow:
    """Answers to one prompt, and their comparisons or labels."""

    prompt: Text | None
    """Plain text or messages; None: the answers are full texts that begin with the prompt."""
    answers: tuple[Text, ...]
    pairs: tuple[RankedPair, ...] = ()
    labels: tuple[bool, ...] = ()
    """A label per answer, if the row has labels and no pairs."""
    tools: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    left_out: tuple[str, ...] = ()
    """A reason for each comparison that was impossible: ties, answers without a score."""
    unread: tuple[str, ...] = ()
    """Columns and keys that nothing reads."""
    images: Mapping[str, Image] = field(default_factory=dict)
    """Images of the messages, by their markers."""


def require_kind(dataset: DatasetConfig, columns: tuple[str, ...], want: str) -> str:
    """Return the kind of rows with these columns; UserError names those found and accepted."""
    if dataset.format != "auto":
        return f"format {dataset.format}"
    kind = detect_kind([*columns, *check_fields(dataset, columns)])
    if kind is None:
        raise UserError(
            f"{dataset.path}: these are no preference data: the columns found are"
            f" {', '.join(columns)}\nAccepted columns:\n{ACCEPTED}\n"
            'Rename columns with fields, wanted = found: fields = {chosen = "good", '
            'rejected = "bad"}'
        )
    if kind == "labels" and want == "pairs" and not dataset.group_prompts:
        raise UserError(
            f"{dataset.path}: its rows have one answer with a label each, but the method compares"
            " answers to one prompt: choose one for labeled answers (loss kto), give data with"
            " chosen and rejected, or set group_prompts = true for the dataset, which compares the"
            " desirable answers to a prompt with the undesirable ones"
        )
    return kind


def read_judged(
    row: Mapping[str, Any], dataset: DatasetConfig, images: Any = None, tokenizer: Any = None
) -> PreferenceRow:
    """Read a row of any kind; raises MalformedRow with the reason if it is invalid. images: its
    images.placing.RowImages; None refuses images. tokenizer: see Row."""
    columns = Row(row, **dataset.reading, spans=True)
    columns.images, columns.tokenizer = images, tokenizer
    kind = detect_kind(name for name, value in columns.columns.items() if value is not None)
    if kind is None:
        names = ", ".join(map(str, columns.columns)) or "none"
        if detect_kind(columns.columns) is not None:
            empty = ", ".join(k for k, value in columns.columns.items() if value is None)
            raise MalformedRow(f"a column is null that a row of preferences needs (null: {empty})")
        raise MalformedRow(f"no known columns among {names}")
    return PreferenceRowReader(columns, dataset).read(kind)


class PreferenceRowReader:
    """Reader of a single row."""

    def __init__(self, row: Row, dataset: DatasetConfig):
        self.row, self.dataset = row, dataset

    def read(self, kind: Kind) -> PreferenceRow:
        """Read the row as one of a kind; raises MalformedRow."""
        read = {"pairs": self._pairs, "labels": self._labels, "scores": self._scores}[kind]
        return replace(read(), unread=self.row.unread)

    def _pairs(self) -> PreferenceRow:
        row = self.row
        present = [c for c in CHOSEN if all(row.columns.get(name) is not None for name in c)]
        good, bad = (
            self._several(row.get(*names), names[0]) for names in zip(*present, strict=True)
        )
        pairs = [(i, len(good) + j) for i in range(len(good)) for j in range(len(bad))]
        _check_number(len(good) + len(bad))
        margins = self._margins(len(pairs))
        ranked_pairs = [
            RankedPair(i, j, margin) for (i, j), margin in zip(pairs, margins, strict=True)
        ]
        return replace(self._join(self._prompt(), [*good, *bad]), pairs=tuple(ranked_pairs))

    def _labels(self) -> PreferenceRow:
        row = self.row
        value = row.get(*LABELS)
        text = value.lower() if isinstance(value, str) else ""  # of a CSV file
        label = read_flag("a label", {"true": 1, "1": 1, "false": 0, "0": 0}.get(text, value))
        completion = row.get(*ANSWERS)
        if completion is None:
            messages = row.messages() or []
            ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            if not ends or not ends[-1]:
                raise MalformedRow("messages with a label do not end in an answer")
            before, turns = messages[: ends[-1]], messages[ends[-1] :]
            return replace(self._join(before, [turns]), labels=(label,))
        answer = self._answer(completion, ANSWERS[0])
        return replace(self._join(self._prompt(), [answer]), labels=(label,))

    def _scores(self) -> PreferenceRow:
        listed = self.row.get(*MANY)
        if not isinstance(listed, list | tuple) or not listed:
            raise MalformedRow("completions must be a list of answers")
        _check_number(len(listed))
        scores = self._score_column(len(listed))
        answers: list[Text] = []
        for number, completion in enumerate(listed):
            entry = isinstance(completion, Mapping) and not {"role", "from"} & completion.keys()
            if entry:
                text = next(
                    (completion[name] for name in OWN_TEXT if completion.get(name) is not None),
                    None,
                )
                if text is None:
                    raise MalformedRow(f"a completion has none of {', '.join(OWN_TEXT)}")
                answers.append(self._answer(text, "completions"))
                self._note_entry(completion)
                if scores[number] is None:
                    scores[number] = _own_score(completion)
            else:
                answers.append(self._answer(completion, "completions"))
        if all(score is None for score in scores):
            raise MalformedRow("completions without scores or ranks")
        pairs, left_out = rank_pairs(scores, self.dataset.pairing)
        if self.dataset.margin == "scores":
            gaps = [scores[p.chosen] - scores[p.rejected] for p in pairs]  # type: ignore[operator]
            pairs = [p._replace(margin=gap) for p, gap in zip(pairs, gaps, strict=True)]
        judged = self._join(self._prompt(), answers)
        return replace(judged, pairs=tuple(pairs), left_out=tuple(left_out))

    def _score_column(self, number: int) -> list[float | None]:
        """Return a score for each answer, higher is better; None for a missing one."""
        for names, sign in ((SCORES, 1), (RANKS, -1)):
            for name in names:
                if (values := self.row.columns.get(name)) is not None:
                    self.row.get(*names)
                    if not isinstance(values, list | tuple) or len(values) != number:
                        raise MalformedRow(f"column {name} must be a list, one for each completion")
                    numbers = [_number(value) for value in values]
                    return [None if value is None else sign * value for value in numbers]
        return [None] * number

    def _margins(self, number: int) -> list[float]:
        row = self.row
        if self.dataset.margin == "scores":
            scores = [_number(row.get(name)) for name in ("score_chosen", "score_rejected")]
            if None in scores:
                raise MalformedRow(
                    'margin = "scores" needs numbers score_chosen and score_rejected'
                )
            return [scores[0] - scores[1]] * number  # type: ignore[operator]
        value = row.get("margin")
        value = 0.0 if value is None else value
        values = list(value) if isinstance(value, list | tuple) else [value] * number
        margins = [_number(margin) for margin in values]
        if len(margins) != number or None in margins:
            raise MalformedRow("column margin must be a number, or one for each pair")
        return margins  # type: ignore[return-value]

    def _prompt(self) -> tuple[Any, bool] | Messages | None:
        """Return (text, True if it is a user message), or messages; None without a prompt."""
        row = self.row
        for name in PROMPTS:
            if row.columns.get(name) is not None:
                break
        else:
            return None
        if name in MESSAGES and not isinstance(row.columns[name], str):
            return self._leave_out_answers(name, row.messages() or [])
        if not isinstance(row.columns[name], str):
            return self._leave_out_answers(name, row.read_messages(row.get(name), name=name))
        value = row.question(name) if name in row else row.get(name)
        if BEGINS.match(value) and value.rstrip().endswith("\n\nAssistant:"):
            return parse_talk(value.rstrip())[:-1]
        return value, name != "prompt"

    def _leave_out_answers(self, name: str, messages: Messages) -> Messages:
        """Return a prompt without the answers at its end, unless they are to be continued."""
        count = len(messages)
        while not self.row.continues(name) and count > 1 and _is_answer(messages[count - 1]):
            count -= 1
        if count < len(messages):
            self.row.ignore(f"answer at the end of column {name}")
        return messages[:count]

    def _join(
        self, prompt: tuple[str, bool] | Messages | None, answers: Sequence[Text]
    ) -> PreferenceRow:
        """Bring prompt and answers into one form: all texts, or all messages."""
        row = self.row
        row.refuse_media()
        talks = prompt is None and all(isinstance(a, str) and BEGINS.match(a) for a in answers)
        if talks:
            answers = [parse_talk(answer) for answer in answers]  # type: ignore[arg-type]
        text_prompt = prompt if isinstance(prompt, tuple) else None
        chat = isinstance(prompt, list) or bool(text_prompt and text_prompt[1])
        chat = chat or any(isinstance(answer, list) for answer in answers)
        chat = chat or row.has_context or (self.dataset.as_chat and prompt is not None)
        if not chat:
            for answer in answers:
                if not answer.strip():  # type: ignore[union-attr]
                    raise MalformedRow("empty answer")
            if text_prompt is None and not os.path.commonprefix(list(answers)):  # type: ignore[type-var]
                raise MalformedRow(NOTHING_SHARED)
            return PreferenceRow(text_prompt and text_prompt[0], tuple(answers))
        if text_prompt is not None and not text_prompt[0].strip():
            raise MalformedRow("empty prompt")
        before = (
            [{"role": "user", "content": text_prompt[0]}] if text_prompt is not None else prompt
        )
        after = [
            [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
            for answer in answers
        ]
        if isinstance(prompt, list):
            if not all(any(map(_says, answer)) for answer in after):
                raise MalformedRow("empty answer")  # the beginning of a turn is none
            before, after = continue_turn(prompt, after)  # type: ignore[arg-type]
        before, after = _split(before, after)  # type: ignore[arg-type]
        for answer in after:
            if not answer or not any(map(_says, answer)):
                raise MalformedRow("empty answer")
            if answer[-1]["role"] != "assistant":
                row.ignore("turns of an answer after its last assistant turn")
        prompted = row.conversation(before)
        return PreferenceRow(
            prompted.messages,
            tuple(after),
            tools=prompted.tools,
            chat_template_kwargs=prompted.chat_template_kwargs,
            images={} if row.images is None else row.images.by_marker,
        )

    def _several(self, value: Any, name: str) -> list[Text]:
        """Return the answers of a column, which holds an answer or a list of them."""
        if isinstance(value, list | tuple) and value and not isinstance(value[0], Mapping):
            return [self._answer(entry, name) for entry in value]
        return [self._answer(value, name)]

    def _answer(self, value: Any, name: str) -> Text:
        if isinstance(value, str):
            check_values(value)
            return value
        return self.row.read_messages(value, name=name)

    def _note_entry(self, entry: Mapping[str, Any]) -> None:
        """Report keys of an entry of completions that are not read."""
        read = {*OWN_TEXT, *OWN_SCORE, "rank"}
        for key in [key for key in entry if key not in read and not is_empty(entry[key])]:
            self.row.ignore(f"completion key {show(key, 60)}")


def parse_talk(text: str) -> Messages:
    """Parse a text of the form "\\n\\nHuman: ...\\n\\nAssistant: ..." into messages."""
    _, *parts = SPEAKER.split(text.strip("\n"))
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[speaker], "content": content.strip()}
        for speaker, content in zip(parts[::2], parts[1::2], strict=True)
    ]


def merge_judged(members: Sequence[PreferenceRow], want: str) -> PreferenceRow:
    """Merge rows of one prompt.

    For "pairs", equal answers become one, and labeled answers are compared, each desirable one with
    each undesirable one. For "labels", each answer counts.
    """
    index_of: dict[str, int] = {}
    answers: list[Text] = []
    pairs: list[RankedPair] = []
    labels: dict[int, set[bool]] = {}
    left_out = list(itertools.chain(*(member.left_out for member in members)))
    for member in members:
        indices = []
        for answer in member.answers:
            key = json.dumps(answer, sort_keys=True)
            if key not in index_of or want == "labels":
                index_of[key] = len(answers)
                answers.append(answer)
            indices.append(index_of[key])
        pairs += [
            RankedPair(indices[p.chosen], indices[p.rejected], p.margin) for p in member.pairs
        ]
        for index, label in zip(indices, member.labels or [None] * len(indices), strict=True):
            labels.setdefault(index, set()).update([] if label is None else [label])
    if want == "pairs":
        good, bad = (
            [i for i, values in labels.items() if values == {kind}] for kind in (True, False)
        )
        compared = list(itertools.product(good, bad))
        pairs += [RankedPair(i, j) for i, j in compared]
        left_out += ["answer with both labels"] * sum(len(values) > 1 for values in labels.values())
        if not pairs and (good or bad):
            left_out.append("prompt whose labels are all alike")
    merged_labels = (
        tuple(next(iter(labels[i])) for i in range(len(answers))) if want == "labels" else ()
    )
    return replace(
        members[0],
        answers=tuple(answers),
        pairs=tuple(pairs),
        labels=merged_labels,
        left_out=tuple(left_out),
        images={marker: image for member in members for marker, image in member.images.items()},
    )


def label_judged(judged: PreferenceRow) -> PreferenceRow:
    """Convert comparisons to labels: the better answer is desirable, the worse one is not. An
    answer that is better in one pair and worse in another is left out."""
    if judged.labels:
        return judged
    good = {pair.chosen for pair in judged.pairs}
    bad = {pair.rejected for pair in judged.pairs}
    judged_once = sorted(good ^ bad)
    contradictions = ["answer that is better in one pair and worse in another"] * len(good & bad)
    return replace(
        judged,
        answers=tuple(judged.answers[i] for i in judged_once),
        pairs=(),
        labels=tuple(i in good for i in judged_once),
        left_out=(*judged.left_out, *contradictions),
    )


def key_of(judged: PreferenceRow) -> str | None:
    """Return a key that is equal for rows of one prompt, with the turn that it begins; None for a
    row without a prompt."""
    if judged.prompt is None:
        return None
    answer = judged.answers[0]
    spans = () if isinstance(answer, str) else context_spans(answer[:1]).get(0, ())
    opening = [answer[0]["content"][:end] for start, end in spans if start < 0]  # type: ignore[index]
    parts = [judged.prompt, judged.tools, judged.chat_template_kwargs, opening]
    return json.dumps(parts, sort_keys=True, default=repr)


def _split(before: Messages | None, answers: list[Messages]) -> tuple[Messages, list[Messages]]:
    """Split the prompt from answers that are full conversations beginning with it.

    Behind a question, so are answers that do not begin with the assistant's or a tool's message.
    """
    if before is None or all(answer[: len(before)] == before for answer in answers):
        are_conversations = True
    elif before[-1]["role"] not in REPLIES:
        are_conversations = any(answer and answer[0]["role"] not in REPLIES for answer in answers)
    else:  # the user may go on, but not from the start
        are_conversations = any(answer[:1] == before[:1] for answer in answers)
    if not are_conversations:
        assert before is not None
        return before, answers
    columns = zip(*answers, strict=False)
    shared = list(
        itertools.takewhile(lambda column: all(entry == column[0] for entry in column), columns)
    )
    if before is not None and len(answers) == 1:  # it shares all with itself
        shared = shared[: len(before)]
    common = answers[0][: len(shared)]
    if len(shared) == max(map(len, answers)) and common:
        raise MalformedRow(SAME)
    if not common:
        raise MalformedRow(NOTHING_SHARED)
    contents = [message["content"].strip() for message in common]
    if any(message["content"].strip() not in contents for message in before or ()):
        raise MalformedRow("chosen is a whole conversation that does not hold the prompt")
    return common, [answer[len(shared) :] for answer in answers]


def _is_answer(message: Mapping[str, Any]) -> bool:
    """Return True for the assistant's words; calls wait for their results."""
    return message["role"] == "assistant" and not message.get("tool_calls")


def _says(message: Mapping[str, Any]) -> bool:
    """Return True if an assistant message has content, thinking or tool calls."""
    content = message["content"].strip() or message.get("tool_calls")
    return message["role"] == "assistant" and bool(content or message.get("reasoning_content"))


def _check_number(answers: int) -> None:
    if answers > MAX_ANSWERS:
        raise MalformedRow(f"more than {MAX_ANSWERS} answers")


def _own_score(entry: Mapping[str, Any]) -> float | None:
    """Return the score in a completion's entry, or its negated rank."""
    for name in OWN_SCORE:
        if (score := _number(entry.get(name))) is not None:
            return score
    rank = _number(entry.get("rank"))
    return None if rank is None else -rank


def _number(value: Any) -> float | None:
    """Return a number of usable size, also one written as text; None for anything else."""
    number = read_number(value)
    return number if number is not None and abs(number) < 1e9 else None
