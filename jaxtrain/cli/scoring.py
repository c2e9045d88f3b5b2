"""Scoring of data by a model: rows are read, laid out as trees, and get the numbers as new keys.

A `Scoring` knows the rows and what to compute; how rows fill batches and files is score.py's. A
reward model scores answers at their ends, a process reward model steps at theirs.
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxtrain.api import Model
from jaxtrain.batch import Batch
from jaxtrain.config import DataConfig, DatasetConfig
from jaxtrain.core.scorer import make_scores, make_topk
from jaxtrain.data.chat.messages import MalformedRow
from jaxtrain.data.chat.rows import Row
from jaxtrain.data.chat.template import TemplateFailed
from jaxtrain.data.chat.tokenize import RowTokenizer, open_row_images
from jaxtrain.data.comparisons.answers import Answers
from jaxtrain.data.comparisons.preference_row import (
    LABELS,
    MANY,
    RANKS,
    SCORES,
    PreferenceRow,
    detect_kind,
    read_judged,
)
from jaxtrain.data.comparisons.ranked import Ranked
from jaxtrain.data.comparisons.stepwise import StepwiseReader
from jaxtrain.data.packing.pack import lay_out
from jaxtrain.data.packing.tree import Node, Tree, join_images
from jaxtrain.data.sample import Dropped, Sample, Unread
from jaxtrain.errors import UserError
from jaxtrain.methods.reward_model.config import RewardModelTask

Numbers = Mapping[str, np.ndarray]
"""{name: [number of places, ...]}."""


Compute = Callable[[Any, Batch], Mapping[str, jax.Array]]
"""(params, batch [1, B, T] on the mesh) -> {name: [1, B, T, ...]}; jitted."""


class ScoringRow(NamedTuple):
    """Row of data, ready to be computed."""

    row: Mapping[str, Any]
    tree: Tree
    places: np.ndarray
    """Tokens of the tree in depth-first order whose numbers are wanted."""
    note: Any = None
    """What `describe` needs to know of it."""


class Scoring(Protocol):
    """A way of scoring rows."""

    compute: Compute

    def read(self, row: Mapping[str, Any], origin: str) -> ScoringRow | Dropped:
        """A row as a tree, or why it has no score."""
        ...

    def describe(self, item: ScoringRow, numbers: Numbers) -> dict[str, Any]:
        """Keys to add to the row, of what was computed at its places; JSON-able."""
        ...


def make_scoring(model: Model, dataset: DatasetConfig, args: argparse.Namespace) -> Scoring:
    """Build the scoring of a dataset by a model; UserError for a model that cannot score it."""
    if args.top_k is not None:
        model.require_next_token()
        if not 1 <= args.top_k <= model.vocab_size:
            raise UserError(f"score: --top-k {args.top_k} must be 1 to {model.vocab_size}")
        return TeacherScores(model, dataset, args.top_k)
    head = model.require_scores()
    return (AnswerScores if head.per == "sequence" else StepScores)(model, dataset)


class AnswerScores:
    """A score for each answer, at its last token: pairs, lists of completions, single answers."""

    def __init__(self, model: Model, dataset: DatasetConfig):
        self.dataset, self.tokenize = (
            dataset,
            Answers(dataset, model.tokenizer, model.max_len, "drop"),
        )
        self.compute = _scores_of(model)

    def read(self, row: Mapping[str, Any], origin: str) -> ScoringRow | Dropped:
        try:
            images = open_row_images(self.tokenize.images, origin)
            judged, keys = read_answers(row, self.dataset, images)
        except MalformedRow as error:
            return Dropped(f"malformed row: {error}", error.locate(origin))
        ranked, *dropped = self.tokenize(judged, origin)  # `Answers` gives no other notes
        if isinstance(ranked, Dropped) or dropped:
            return next(entry for entry in (ranked, *dropped) if isinstance(entry, Dropped))
        tree = branch(ranked)
        node = lay_out(tree).node
        ends = [np.flatnonzero(node == end)[-1] for end in range(1, len(tree.nodes))]
        return ScoringRow(row, tree, np.array(ends), keys)

    def describe(self, item: ScoringRow, numbers: Numbers) -> dict[str, Any]:
        scores = numbers["scores"][:, 0].tolist()
        return {
            key: [scores[index] for index in places] if isinstance(places, list) else scores[places]
            for key, places in item.note.items()
        }


def read_answers(
    row: Mapping[str, Any], dataset: DatasetConfig, images: Any = None
) -> tuple[PreferenceRow, dict[str, int | list[int]]]:
    """Return (all answers of a row; {key to add: number of its answer, or a list of these}); raises
    MalformedRow where it has none. Judgments that the row holds are not needed. images: as in
    read_judged."""
    judgments = (*LABELS, *SCORES, *RANKS)
    renamed_row = {
        name: value
        for name, value in Row(row, **dataset.reading).columns.items()
        if name not in judgments and value is not None
    }
    several = next((renamed_row[name] for name in MANY if name in renamed_row), None)
    if detect_kind(renamed_row) != "pairs":
        if isinstance(several, list):
            renamed_row["scores"] = [0.0] * len(several)
        else:
            renamed_row["label"] = True
    keys_of_messages = {name: key for name, key in dataset.fields.items() if "." in name}
    plain = dataset.model_copy(
        update={"fields": keys_of_messages, "margin": "column", "column_formats": {}}
    )
    judged = read_judged(renamed_row, plain, images)
    number = len(judged.answers)
    keys: dict[str, int | list[int]]
    if judged.pairs and several is None:
        good = sorted({pair.chosen for pair in judged.pairs})
        bad = sorted({pair.rejected for pair in judged.pairs})
        keys = {
            name: places if len(places) > 1 else places[0]
            for name, places in (("score_chosen", good), ("score_rejected", bad))
        }
    else:
        keys = {"score": 0} if several is None else {"scores": list(range(number))}
    return dataclasses.replace(judged, pairs=(), labels=(True,) * number, left_out=()), keys


def branch(ranked: Ranked) -> Tree:
    """The prompt with each answer as a branch."""
    nodes = [Node(-1, ranked.prompt, {}, images=ranked.images)]
    nodes += [Node(0, answer.tokens, {}, images=answer.images) for answer in ranked.answers]
    return Tree(tuple(nodes), origin=ranked.origin, controls=ranked.controls)


class StepScores:
    """The probability that a step is right, for each step of an answer."""

    def __init__(self, model: Model, dataset: DatasetConfig):
        task = model.config.task
        assert isinstance(task, RewardModelTask)
        data = DataConfig(sequence_len=model.max_len)
        self.reader = StepwiseReader(dataset, model.tokenizer, data, task.step_separator)
        self.compute, self.max_len = _scores_of(model), model.max_len

    def read(self, row: Mapping[str, Any], origin: str) -> ScoringRow | Dropped:
        try:
            columns = Row(row, **self.reader.dataset.reading)
            columns.images = open_row_images(self.reader.images, origin)
            prompt, placed, steps, _ = self.reader.read(columns)
        except MalformedRow as error:
            return Dropped(f"malformed row: {error}", error.locate(origin))
        except TemplateFailed as error:
            return Dropped(f"malformed row: {error}", origin)
        tokens = [*prompt, *(token for step in steps for token in step)]
        if len(tokens) > self.max_len:
            return Dropped("too long", origin)
        ends = len(prompt) + np.cumsum([len(step) for step in steps]) - 1
        images = join_images([(placed, len(prompt))], len(tokens)) if placed is not None else None
        node = Node(-1, np.array(tokens, np.int32), {}, images=images)
        return ScoringRow(row, Tree((node,), origin=origin), ends)

    def describe(self, item: ScoringRow, numbers: Numbers) -> dict[str, Any]:
        gap = (numbers["scores"][:, 1] - numbers["scores"][:, 0]).astype(np.float64)
        return {"step_scores": (1 / (1 + np.exp(-gap))).tolist()}


class TeacherScores:
    """Targets of a teacher for distillation: the k likeliest tokens in the place of each token
    from the first trained one on, under the names that methods/distillation/data.py reads."""

    def __init__(self, model: Model, dataset: DatasetConfig, k: int):
        self.tokenize = RowTokenizer(dataset, model.tokenizer, model.max_len, "drop")
        find = make_topk(model.snapshot.roles.rebuild(model.snapshot.roles.trained), k)
        self.compute: Compute = lambda params, batch: find(params, batch)._asdict()

    def read(self, row: Mapping[str, Any], origin: str) -> ScoringRow | Dropped:
        samples = [e for e in self.tokenize(dict(row), origin) if not isinstance(e, Unread)]
        if len(samples) > 1:
            return Dropped("several sequences, log-probs of one", origin)
        (sample,) = samples
        if not isinstance(sample, Sample):
            assert isinstance(sample, Dropped), "the row_tokenizer makes no trees here"
            return sample
        first = int(np.argmax(sample.weights > 0))
        places = np.arange(first, len(sample.tokens))
        tree = Tree((Node(-1, sample.tokens, {}, images=sample.images),))
        return ScoringRow(row, tree, places, sample.tokens)

    def describe(self, item: ScoringRow, numbers: Numbers) -> dict[str, Any]:
        return {
            "input_ids": item.note.tolist(),
            "target_token_ids": numbers["ids"].tolist(),
            "target_logprobs": [[round(x, 5) for x in row] for row in numbers["logp"].tolist()],
        }


def _scores_of(model: Model) -> Compute:
    score = make_scores(model.snapshot.roles.rebuild(model.snapshot.roles.trained))
    return lambda params, batch: {"scores": score(params, batch)}


def score_items(
    model: Model, items: Sequence[ScoringRow], compute: Callable, batch_size: int
) -> list[Numbers]:
    """Return the numbers that `compute` yields at the places of each item; batch_size: rows of a
    pass, on a device."""
    numbers = model.run_packed([lay_out(item.tree) for item in items], compute, batch_size)
    return [
        {name: values[item.places] for name, values in scored.items()}
        for item, scored in zip(items, numbers, strict=True)
    ]
