"""Statistics over all comparisons of an optimizer step: sums, ranks, mismatched answers.

    KTO   prompt 1, answer 1     its baseline is the mean log-ratio of   prompt 1, answer 3
          prompt 2, answer 2     mismatched answers: each prompt with    prompt 2, answer 1
          prompt 3, answer 3     the answers of the prompt before it     prompt 3, answer 2
                                 in the step
    AOT   pairs are compared with the pair of the same rank in the step

Batches are those of data/comparisons/pairs.py, [A, B, T] host arrays of the whole step.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.data.comparisons.pairs import CHOSEN, PREFERENCE, REJECTED, SCORE, SHARE
from jaxtrain.data.packing.branches import list_branches
from jaxtrain.data.packing.pack import Fields, fit_rows, lay_out
from jaxtrain.data.packing.steps import StepShape
from jaxtrain.data.packing.tree import Node, Tree

FIELDS = Fields((SCORE,), dtype=np.float64)


class SlotSums(NamedTuple):
    """Sums over the tokens of answers, for the n slots of a batch in order."""

    places: tuple[np.ndarray, ...]
    """Index arrays of the slots in [A, B, T]."""
    chosen: np.ndarray
    """float64 [n]; nan if the slot lacks this side."""
    rejected: np.ndarray

    def spread(self, values: np.ndarray, template: np.ndarray) -> np.ndarray:
        """Scatter values [n] to their slots, with the shape and dtype of `template`, 0
        elsewhere."""
        spread = np.zeros(template.shape, template.dtype)
        spread[self.places] = values
        return spread


def sum_sides(batch: Batch, values: np.ndarray) -> SlotSums:
    """Sum values [A, B, T] (log-probs) over the answers that the slots point to."""
    length = values.shape[-1]
    mask = (batch.weights[SCORE] != 0).reshape(-1, length)
    share = batch.streams.get(SHARE)
    counted = np.where(mask, values.reshape(-1, length), 0.0).astype(np.float64)
    if share is not None:
        counted *= share.reshape(-1, length)
    owner = np.maximum(np.asarray(batch.owner), 0).reshape(-1, length)
    sums = np.zeros(counted.shape)
    np.add.at(sums, (np.arange(len(sums))[:, None], owner), counted)
    places = np.nonzero(batch.weights[PREFERENCE])
    rows = np.ravel_multi_index(places[:-1], values.shape[:-1])
    sides = []
    for name in (CHOSEN, REJECTED):
        index = places[-1] + batch.streams[name][places]
        side_sums = sums[rows, owner[rows, np.maximum(index, 0)]]
        sides.append(np.where(index >= 0, side_sums, np.nan))
    return SlotSums(places, *sides)


def at_same_rank(values: np.ndarray, matched: np.ndarray) -> np.ndarray:
    """Return [n]: for each of `values` the one of `matched` with its rank; ties keep their
    order."""
    same_rank = np.empty(len(values))
    same_rank[np.argsort(values, kind="stable")] = np.sort(matched)
    return same_rank


def mismatch(batch: Batch, shape: StepShape) -> Batch | None:
    """Build a batch of answers after mismatched prompts, with weights SCORE; None if all answers
    have the same prompt.

    Each prompt gets the answers of the prompt before it, the first one those of the last, which is
    TRL's rotation if each prompt has one answer. A prompt is everything before the first trained
    token of an answer. An answer that does not fit after its new prompt is cut.
    """
    groups = list_groups(batch)
    if len(groups) < 2:
        return None
    trees = []
    for (_, answers), (prompt, _) in pairwise([groups[-1], *groups]):
        combined_tree = _grow(prompt, answers)
        if combined_tree.num_tokens > shape.row_tokens:
            room = shape.row_tokens - len(prompt)
            trees += [_grow(prompt, [(t[:room], w[:room])]) for t, w in answers]
        else:
            trees.append(combined_tree)
    rows = fit_rows([tree.num_tokens for tree in trees], shape.row_tokens)
    packed = [[lay_out(trees[index], "branch") for index in row] for row in rows]
    return replace(shape, microsteps=None, fields=FIELDS, normalize="branch").build(packed)


Answer = tuple[np.ndarray, np.ndarray]
"""Tokens and weights [n]."""


def list_groups(batch: Batch) -> list[tuple[np.ndarray, list[Answer]]]:
    """List [(prompt, its answers)] of a batch in order; consecutive answers with equal prompts
    belong to one prompt, whether they share a tree or not."""
    bare = batch._replace(weights={SCORE: batch.weights[SCORE]}, streams={})
    groups: list[tuple[np.ndarray, list[Answer]]] = []
    for branch in list_branches(bare):
        weights = branch.weights[SCORE]
        if not weights.any():
            continue
        start = int(np.argmax(weights != 0))
        prompt, answer = branch.tokens[:start], (branch.tokens[start:], weights[start:])
        if groups and np.array_equal(groups[-1][0], prompt):
            groups[-1][1].append(answer)
        else:
            groups.append((prompt, [answer]))
    return groups


def _grow(prompt: np.ndarray, answers: Sequence[Answer]) -> Tree:
    root = Node(-1, prompt, {SCORE: np.zeros(len(prompt))})
    return Tree((root, *(Node(0, tokens, {SCORE: weights}) for tokens, weights in answers)))
