"""Rows of preference data as they are meant, before any tokenizer: a prompt, answers, what of them
is better. Their columns are detected; the names of many public datasets are known.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxtrain.config.data import DatasetConfig
from jaxtrain.data.chat.messages import (
    MalformedRow,
    check_readable,
    check_values,
    read_messages,
    read_tools,
)
from jaxtrain.data.comparisons.ranked import RankedPair, rank_pairs
from jaxtrain.data.formats import check_fields, read_number
from jaxtrain.errors import UserError
from jaxtrain.text_safety import name_type

Messages = list[dict[str, Any]]
Text = str | Messages
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
SCORES = ("scores", "ratings", "rating")
RANKS = ("ranks", "rank")
OWN_TEXT = ("response", "answer", "completion", "text", "content", "messages")
OWN_SCORE = ("score", "overall_score", "rating", "reward")
OTHERS = ("system", "tools", "margin", "score_chosen", "score_rejected")
COLUMNS = sorted(
    {*PROMPTS, *itertools.chain(*CHOSEN), *ONE, *LABELS, *MANY, *SCORES, *RANKS, *OTHERS}
)
"""Every column that is read."""

ACCEPTED = """\
  pairs: chosen + rejected, and a prompt unless both are whole conversations
  labels: a prompt + completion + label, or messages + label
  scores: a prompt + completions + scores (or ranks), or completions with a score in each
  a prompt: prompt, messages, conversations, question, instruction (+ input) or input"""

SAME = "chosen and rejected are the same"
NOTHING_SHARED = "chosen and rejected share no prompt"
MOST_ANSWERS = 64
"""Of one prompt: each may be compared with each."""
SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):[ \n]?")
BEGINS = re.compile(r"\s*Human:")
"""Conversations in one text, as the helpful-harmless data have them (Bai et al. 2022)."""


@dataclass(frozen=True)
class PreferenceRow:
    """What a row says: answers to one prompt, and which are better."""

    prompt: Text | None
    """Plain text or messages; None: the answers are whole texts that begin with it."""
    answers: tuple[Text, ...]
    pairs: tuple[RankedPair, ...] = ()
    labels: tuple[bool, ...] = ()
    """One an answer, where the row has labels and no pairs."""
    tools: Any = None
    left_out: tuple[str, ...] = ()
    """Why comparisons of it are none, a reason each: ties, answers without a score."""


def detect_kind(columns: Iterable[str]) -> Kind | None:
    """What rows with these columns are, or None."""
    names = set(columns)
    if any(names >= set(both) for both in CHOSEN):
        return "pairs"
    asked = names & set(PROMPTS)
    if names & set(LABELS) and (names & {"messages", "conversations"} or asked and names & {*ONE}):
        return "labels"
    if asked and names & set(MANY):
        return "scores"
    return None


def require_kind(dataset: DatasetConfig, columns: tuple[str, ...], want: str) -> str:
    """Return the kind of comparison in these columns; UserError names those found and accepted."""
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


def rename(row: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
    """The row with its columns under the names that are known here; raises Malformed for values
    that no tokenizer gets through."""
    check_readable(row)
    found = {wanted: row[at] for wanted, at in fields.items() if "." not in wanted and at in row}
    row = {**row, **found}
    row = {name: row[name] for name in COLUMNS if row.get(name) is not None}
    check_values(list(row.values()))
    return row


def read_judged(row: Mapping[str, Any], dataset: DatasetConfig) -> PreferenceRow:
    """A row of any kind; raises Malformed with what is wrong with it."""
    row = rename(row, dataset.fields)
    kind = detect_kind(row)
    if kind is None:
        raise MalformedRow(f"no known columns among {', '.join(map(str, row)) or 'none'}")
    return PreferenceRowReader(row, dataset).read(kind)


class PreferenceRowReader:
    """One row, read once."""

    def __init__(self, row: dict[str, Any], dataset: DatasetConfig):
        self.row, self.dataset = row, dataset

    def read(self, kind: Kind) -> PreferenceRow:
        """See read_judged."""
        if kind == "pairs":
            return self._pairs()
        return self._labels() if kind == "labels" else self._scores()

    def _pairs(self) -> PreferenceRow:
        row = self.row
        names = next(both for both in CHOSEN if set(both) <= row.keys())
        good, bad = (self._several(row[name]) for name in names)
        pairs = [(i, len(good) + j) for i in range(len(good)) for j in range(len(bad))]
        _check_number(len(good) + len(bad))
        margins = self._margins(len(pairs))
        made = [RankedPair(i, j, margin) for (i, j), margin in zip(pairs, margins, strict=True)]
        return replace(self._join(self._prompt(), [*good, *bad]), pairs=tuple(made))

    def _labels(self) -> PreferenceRow:
        row = self.row
        label = _boolean(row[next(name for name in LABELS if name in row)])
        one = next((row[name] for name in ONE if name in row), None)
        if one is None:
            talk = self._messages(row.get("messages", row.get("conversations")))
            ends = [i for i, message in enumerate(talk) if message["role"] == "assistant"]
            if not ends or not ends[-1]:
                raise MalformedRow("messages with a label do not end in an answer")
            before, answer = talk[: ends[-1]], talk[ends[-1] : ends[-1] + 1]
            return replace(self._join(before, [answer]), labels=(label,))
        return replace(self._join(self._prompt(), [self._answer(one)]), labels=(label,))

    def _scores(self) -> PreferenceRow:
        row = self.row
        listed = row[next(name for name in MANY if name in row)]
        if not isinstance(listed, list | tuple) or not listed:
            raise MalformedRow("completions must be a list of answers")
        _check_number(len(listed))
        scores = self._score_column(len(listed))
        answers: list[Text] = []
        for number, one in enumerate(listed):
            entry = isinstance(one, Mapping) and not {"role", "from"} & one.keys()
            if entry:
                text = next((one[name] for name in OWN_TEXT if one.get(name) is not None), None)
                if text is None:
                    raise MalformedRow(f"a completion has none of {', '.join(OWN_TEXT)}")
                answers.append(self._answer(text))
                if scores[number] is None:
                    scores[number] = _own_score(one)
            else:
                answers.append(self._answer(one))
        if all(score is None for score in scores):
            raise MalformedRow("completions without scores or ranks")
        pairs, left_out = rank_pairs(scores, self.dataset.pairing)
        if self.dataset.margin == "scores":
            gaps = [scores[p.chosen] - scores[p.rejected] for p in pairs]  # type: ignore[operator]
            pairs = [p._replace(margin=gap) for p, gap in zip(pairs, gaps, strict=True)]
        judged = self._join(self._prompt(), answers)
        return replace(judged, pairs=tuple(pairs), left_out=tuple(left_out))

    def _score_column(self, number: int) -> list[float | None]:
        """A score an answer, more is better; None where there is none."""
        for names, sign in ((SCORES, 1), (RANKS, -1)):
            for name in names:
                if name in self.row:
                    values = self.row[name]
                    if not isinstance(values, list | tuple) or len(values) != number:
                        raise MalformedRow(f"column {name} must be a list, one for each completion")
                    found = [_number(value) for value in values]
                    return [None if value is None else sign * value for value in found]
        return [None] * number

    def _margins(self, number: int) -> list[float]:
        row = self.row
        if self.dataset.margin == "scores":
            given = [_number(row.get(name)) for name in ("score_chosen", "score_rejected")]
            if None in given:
                raise MalformedRow(
                    'margin = "scores" needs numbers score_chosen and score_rejected'
                )
            return [given[0] - given[1]] * number  # type: ignore[operator]
        value = row.get("margin", 0.0)
        values = list(value) if isinstance(value, list | tuple) else [value] * number
        found = [_number(one) for one in values]
        if len(found) != number or None in found:
            raise MalformedRow("column margin must be a number, or one for each pair")
        return found  # type: ignore[return-value]

    def _prompt(self) -> tuple[Any, bool] | Messages | None:
        """(text, whether it is what a user says) or messages; None without any."""
        row = self.row
        for name in PROMPTS:
            if name in row:
                break
        else:
            return None
        value = row[name]
        if not isinstance(value, str):
            return self._messages(value)
        if name == "instruction" and row.get("input"):
            if not isinstance(row["input"], str):
                raise MalformedRow(f"column input holds {name_type(row['input'])}, not a text")
            value = f"{value}\n\n{row['input']}"
        if BEGINS.match(value) and value.rstrip().endswith("\n\nAssistant:"):
            return parse_talk(value.rstrip())[:-1]
        return value, name != "prompt"

    def _join(
        self, prompt: tuple[str, bool] | Messages | None, answers: Sequence[Text]
    ) -> PreferenceRow:
        """Prompt and answers in one form: all texts, or all messages."""
        row, tools = self.row, read_tools(self.row.get("tools"))
        system = row.get("system")
        if not isinstance(system, str | None):
            raise MalformedRow(f"column system holds {name_type(system)}, not a text")
        talks = prompt is None and all(isinstance(a, str) and BEGINS.match(a) for a in answers)
        if talks:
            answers = [parse_talk(answer) for answer in answers]  # type: ignore[arg-type]
        asked = prompt if isinstance(prompt, tuple) else None
        chat = isinstance(prompt, list) or bool(asked and asked[1])
        chat = chat or any(isinstance(answer, list) for answer in answers)
        chat = chat or bool(system or tools) or (self.dataset.as_chat and prompt is not None)
        if not chat:
            for answer in answers:
                if not answer.strip():  # type: ignore[union-attr]
                    raise MalformedRow("empty answer")
            if asked is None and not os.path.commonprefix(list(answers)):  # type: ignore[type-var]
                raise MalformedRow(NOTHING_SHARED)
            return PreferenceRow(asked and asked[0], tuple(answers))
        if asked is not None and not asked[0].strip():
            raise MalformedRow("empty prompt")
        before = [{"role": "user", "content": asked[0]}] if asked is not None else prompt
        after = [
            [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
            for answer in answers
        ]
        before, after = _split(before, after, bool(asked))  # type: ignore[arg-type]
        if system and before[0]["role"] != "system":
            before = [{"role": "system", "content": system}, *before]
        for answer in after:
            if not answer or not any(map(_says, answer)):
                raise MalformedRow("empty answer")
        return PreferenceRow(before, tuple(after), tools=tools)

    def _several(self, value: Any) -> list[Text]:
        """Answers of a column: one, or a list of them."""
        if isinstance(value, list | tuple) and value and not isinstance(value[0], Mapping):
            return [self._answer(one) for one in value]
        return [self._answer(value)]

    def _answer(self, value: Any) -> Text:
        return value if isinstance(value, str) else self._messages(value)

    def _messages(self, value: Any) -> Messages:
        return read_messages(value, self.dataset.fields, self.dataset.roles)


def parse_talk(text: str) -> Messages:
    """Messages of a text of the form "\\n\\nHuman: ...\\n\\nAssistant: ..."."""
    _, *parts = SPEAKER.split(text.strip("\n"))
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[who], "content": said.strip()}
        for who, said in zip(parts[::2], parts[1::2], strict=True)
    ]


def merge_judged(members: Sequence[PreferenceRow], want: str) -> PreferenceRow:
    """Rows of one prompt as one: for "pairs" an answer that occurs several times is there once, and
    labeled ones are compared, each desirable one with each undesirable; for "labels" each counts.
    """
    places: dict[str, int] = {}
    answers: list[Text] = []
    pairs: list[RankedPair] = []
    labels: dict[int, set[bool]] = {}
    left_out = list(itertools.chain(*(member.left_out for member in members)))
    for member in members:
        where = []
        for answer in member.answers:
            key = json.dumps(answer, sort_keys=True)
            if key not in places or want == "labels":
                places[key] = len(answers)
                answers.append(answer)
            where.append(places[key])
        pairs += [RankedPair(where[p.chosen], where[p.rejected], p.margin) for p in member.pairs]
        for place, label in zip(where, member.labels or [None] * len(where), strict=True):
            labels.setdefault(place, set()).update([] if label is None else [label])
    if want == "pairs":
        good, bad = (
            [i for i, found in labels.items() if found == {kind}] for kind in (True, False)
        )
        compared = list(itertools.product(good, bad))
        pairs += [RankedPair(i, j) for i, j in compared]
        left_out += ["answer with both labels"] * sum(len(found) > 1 for found in labels.values())
        if not pairs and (good or bad):
            left_out.append("prompt whose labels are all alike")
    whole = tuple(next(iter(labels[i])) for i in range(len(answers))) if want == "labels" else ()
    return replace(
        members[0],
        answers=tuple(answers),
        pairs=tuple(pairs),
        labels=whole,
        left_out=tuple(left_out),
    )


def label_judged(judged: PreferenceRow) -> PreferenceRow:
    """Compared answers as labeled ones: the better one is desirable, the worse one is not. An
    answer that is both, in different pairs, is left out."""
    if judged.labels:
        return judged
    good = {pair.chosen for pair in judged.pairs}
    bad = {pair.rejected for pair in judged.pairs}
    kept = sorted(good ^ bad)
    both = ["answer that is better in one pair and worse in another"] * len(good & bad)
    return replace(
        judged,
        answers=tuple(judged.answers[i] for i in kept),
        pairs=(),
        labels=tuple(i in good for i in kept),
        left_out=(*judged.left_out, *both),
    )


def key_of(judged: PreferenceRow) -> str | None:
    """Equal for rows of one prompt; None for one that has no prompt of its own."""
    if judged.prompt is None:
        return None
    return json.dumps([judged.prompt, judged.tools], sort_keys=True)


def _split(
    before: Messages | None, answers: list[Messages], text: bool
) -> tuple[Messages, list[Messages]]:
    """Prompt and answers, where answers may be whole conversations that begin with the prompt.

    text: the prompt came as a text, so answers that begin with a user's message are whole.
    """
    if before is None:
        whole = True
    elif text:
        whole = all(answer and answer[0]["role"] != "assistant" for answer in answers)
    else:
        whole = all(answer[: len(before)] == before for answer in answers)
    if not whole:
        assert before is not None
        return before, answers
    columns = zip(*answers, strict=False)
    shared = list(itertools.takewhile(lambda one: all(other == one[0] for other in one), columns))
    common = answers[0][: len(shared)]
    if len(shared) == max(map(len, answers)) and common:
        raise MalformedRow(SAME)
    if not common:
        raise MalformedRow(NOTHING_SHARED)
    if text and before is not None:
        asked = before[0]["content"].strip()
        if asked not in [message["content"].strip() for message in common]:
            raise MalformedRow("chosen is a whole conversation that does not hold the prompt")
    return common, [answer[len(shared) :] for answer in answers]


def _says(message: Mapping[str, Any]) -> bool:
    """Whether an assistant says, thinks or calls anything in this message."""
    said = message["content"].strip() or message.get("tool_calls")
    return message["role"] == "assistant" and bool(said or message.get("reasoning_content"))


def _check_number(answers: int) -> None:
    if answers > MOST_ANSWERS:
        raise MalformedRow(f"more than {MOST_ANSWERS} answers")


def _own_score(entry: Mapping[str, Any]) -> float | None:
    """The score that a completion holds; a rank counts down."""
    for name in OWN_SCORE:
        if (score := _number(entry.get(name))) is not None:
            return score
    rank = _number(entry.get("rank"))
    return None if rank is None else -rank


def _number(value: Any) -> float | None:
    """A number of a usable size, also one written as a text; None for anything else."""
    number = read_number(value)
    return number if number is not None and abs(number) < 1e9 else None


def _boolean(value: Any) -> bool:
    if isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)):
        return bool(value)
    raise MalformedRow(f"a label is {name_type(value)}, not true or false")
