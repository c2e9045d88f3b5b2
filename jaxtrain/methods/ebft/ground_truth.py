"""Prompts that have a ground truth: its tokens, and how long answers to them may become.

    row ─ GroundTruthRows ─> prompt, ground_truth, remaining_turns ─> environment draws G answers
                             └─ GroundTruths ─> an Episode of the data's own, beside the group's

The truth is tokenized as training data are: by the chat template's incremental prefixes, so that it
stands behind the very prompt that the answers are drawn behind.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.config import DatasetConfig, EnvConfig
from jaxtrain.data.chat.messages import SYSTEM_ROLES, MalformedRow
from jaxtrain.data.chat.rows import MESSAGES
from jaxtrain.data.chat.template import end_of_turn_ids
from jaxtrain.data.chat.tokenize import RowTokenizer
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import PromptRequest, Sampling
from jaxtrain.generation.episodes import Episode
from jaxtrain.generation.offline_answers import read_episode
from jaxtrain.generation.prompts import PromptRows
from jaxtrain.methods.ebft.ground_truth_rows import (
    Thinking,
    Turns,
    count_examples,
    list_turns,
    read_example,
    write_answer,
)
from jaxtrain.safe_io import UnreadableRow

LOOKED_AT = 16
WRITTEN = {*MESSAGES, "system", "history"}
"""Columns that are part of the prompt of an example."""
ANSWER, REMAINING = "ground_truth_message", "remaining_turns"
"""Columns that rows get beside `prompt` and `ground_truth`."""


class GroundTruthRows:
    """Rows of a dataset as examples, with random access; a row without a ground truth is an
    UnreadableRow, whose episodes count as failed."""

    def __init__(self, rows: PromptRows, turns: Turns, thinking: Thinking, column: str, key: str):
        """UserError where none of the first rows has one."""
        self.rows, self.dataset = rows, rows.dataset
        self.turns: Turns = turns
        self.thinking: Thinking = thinking
        self.column = column
        # With all turns a row gives several examples, and only reading it tells how many.
        self.places = count_examples(rows, turns) if turns == "all" else None
        if len(self) == 0:
            return
        looked = [self[index] for index in range(min(len(self), LOOKED_AT))]
        unusable = [row for row in looked if isinstance(row, UnreadableRow)]
        if len(unusable) == len(looked):
            raise UserError(
                f"{key} ({self.dataset.path}): none of the first {len(looked)} rows can be used:"
                f" {unusable[0].reason}. Its columns: {', '.join(map(str, rows[0])) or 'none'};"
                ' rename others by fields, wanted = found: {ground_truth = "answer"}'
            )

    def __len__(self) -> int:
        return len(self.rows) if self.places is None else len(self.places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row_index, turn = (index, None) if self.places is None else self.places[index]
        row = self.rows[row_index]
        if isinstance(row, UnreadableRow):
            return row
        try:
            if turn is None:
                places = list_turns(row, self.turns)
                turn = places[0] if places else -1
            if turn < 0:
                raise MalformedRow(
                    "no ground truth: the conversation has no turn of the assistant's"
                )
            example = read_example(row, turn, self.thinking, self.column)
        except MalformedRow as error:
            return UnreadableRow(f"malformed row: {error}", self.rows.origin(row_index))
        return {
            **{name: value for name, value in row.items() if name not in WRITTEN},
            self.column: example.prompt,
            "ground_truth": write_answer(example.answer),
            ANSWER: example.answer,
            REMAINING: example.remaining if self.turns == "first" else [],
        }


class GroundTruths:
    """Ground truths that a group's answers are compared with, and the longest answer that each
    allows."""

    def __init__(
        self,
        datasets: Sequence[DatasetConfig],
        tokenizer: Any,
        env: EnvConfig,
        *,
        row_tokens: int,
        multiplier: float | None,
        least: int,
    ):
        """env: the environment that asks. row_tokens: longest sequence. multiplier: limit of an
        answer as a multiple of the ground truth's tokens, at least `least` tokens; None: as
        sampling says."""
        self.tokenizer, self.ends = tokenizer, frozenset(end_of_turn_ids(tokenizer, env.raw))
        self.column, self.system = env.prompt_column, env.system
        self.plays_on = env.kind == "dialogue"
        """True if the turns that remain are played, too."""
        self.raw = env.raw or not tokenizer.chat_template
        self.multiplier, self.least = multiplier, least
        form = {"fields": {}, "roles": {}, "as_chat": False, "train_on": "last"}
        form |= {"column_formats": {}, "roles_to_train": ["assistant"], "train_on_eot": "turn"}
        form["format"] = "prompt_completion" if self.raw else "chat"
        self.tokenize = [
            RowTokenizer(dataset.model_copy(update=form), tokenizer, row_tokens, "drop")
            for dataset in datasets
        ]

    def __call__(self, request: PromptRequest) -> Episode:
        """Return the ground truth behind its prompt, as an episode whose `sampled` tokens are the
        truth's.

        With remaining turns its last sequence is the whole conversation, of which nothing is
        `sampled`. Raises EpisodeFailed for a row without a ground truth.
        """
        truth = self.read(request, [])
        remaining = request.row[REMAINING] if self.plays_on else []
        if not remaining:
            return truth
        conversation = self.read(request, remaining)
        conversation.earlier, conversation.sampled = (
            truth.sequences,
            [False] * len(conversation.tokens),
        )
        return conversation

    def read(self, request: PromptRequest, remaining: Sequence[Mapping[str, Any]]) -> Episode:
        """Return the prompt, its answer and the remaining turns, with the last turn `sampled` and
        without what the template writes behind it, which no answer has either."""
        training_row = self.write(request.row, remaining)
        truth = read_episode(
            self.tokenize[request.dataset], self.tokenizer, training_row, f"prompt {request.draw}"
        )
        end = len(truth.sampled) - truth.sampled[::-1].index(True)
        for name in ("tokens", "sampled", "logprobs", "versions"):
            setattr(truth, name, getattr(truth, name)[:end])
        return truth

    def write(
        self, row: Mapping[str, Any], remaining: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return a row of training data."""
        prompt = row[self.column]
        if self.raw:
            return {"prompt": prompt, "completion": row["ground_truth"]}
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.system is not None and messages[0].get("role") not in SYSTEM_ROLES:
            messages = [{"role": "system", "content": self.system}, *messages]
        context = {name: row[name] for name in ("tools", "chat_template_kwargs") if row.get(name)}
        return {"messages": [*messages, row[ANSWER], *remaining], **context}

    def limit(self, truth: Episode, sampling: Sampling) -> Sampling:
        """Return the sampling with this prompt's own budget: `multiplier` times the ground truth's
        tokens without its end, at least `least`, and at most sampling.max_new_tokens."""
        if self.multiplier is None:
            return sampling
        length = len(truth.tokens) - count_prompt(truth)
        length -= bool(truth.tokens and truth.tokens[-1] in self.ends)
        most = max(int(self.multiplier * length), self.least)
        if most >= sampling.max_new_tokens:
            return sampling
        return sampling.model_copy(update={"max_new_tokens": most})


def count_prompt(episode: Episode) -> int:
    """Return the number of tokens before the first drawn, or ground-truth, token."""
    return episode.sequences[0].sampled.index(True)
