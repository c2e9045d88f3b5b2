"""Answers to a prompt as a tree with comparison slots: the input of preference losses.

    prompt ─┬─ answer 0          tokens      p p p | a a a | b b
            └─ answer 1          score       0 0 0 | 1 1 1 | 1 1      answers' trained tokens
                                 preference  0 1 0 | 0 0 0 | 0 0      pair 0 sits in slot 1
                                 chosen      . 4 .                    5 - 1: a token of answer 0
                                 rejected    . 6 .                    7 - 1: a token of answer 1

A *slot* is a token that represents a comparison. It stores the distances from itself to the last
tokens of the two answers, which stay valid wherever the tree lies in a row. A labeled answer has a
slot with one of the two. Answers share only the prompt, so each answer token belongs to one branch
(`Batch.owner`), and sums by owner are sums by answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from jaxtrain.data.comparisons.ranked import Ranked, RankedAnswer
from jaxtrain.data.packing.tree import Forest, Node, Tree
from jaxtrain.data.sample import Dropped

PREFERENCE, SCORE, NLL = "preference", "score", "nll"
"""Components of weights: comparisons, tokens of answers, additional likelihood."""
CHOSEN, REJECTED, MARGIN, SHARE = "chosen", "rejected", "margin", "share"
"""Streams: distances from a slot, margin of the comparison, share of a token in a score."""
NO_SIDE = -(2**30)
"""Distance to the side that the slot of a labeled answer lacks."""


class ComparisonSlot(NamedTuple):
    """A comparison of two answers, or a labeled answer."""

    chosen: int | None
    """Index of the answer; None for an undesirable one."""
    rejected: int | None
    margin: float = 0.0


@dataclass(frozen=True)
class PairTrees:
    """Builds a tree, or a forest of flat sequences, from a `Ranked`. Picklable.

    weights: {PREFERENCE: 1 in each slot, SCORE: 1 on trained tokens of answers, and NLL if `nll`};
    streams: {CHOSEN, REJECTED: int32, MARGIN: float32, SHARE: float32 if `tail`}. To be laid out
    with normalize "branch".
    """

    share_prompts: bool = True
    """False: a separate sequence for each answer, all in one row."""
    nll: Literal["none", "answer", "sequence"] = "none"
    """Additional likelihood: none, of chosen answers, or of chosen answers with their prompts."""
    tail: float | None = None
    """Share of the tokens by which an answer is longer than the other of its pair (LD-DPO,
    arXiv 2409.06411). Answers are then computed once for each pair that contains them."""
    average: Literal["pairs", "prompts"] = "pairs"
    """Unit with weight 1: each comparison, or each prompt with all its comparisons."""

    def __call__(self, ranked: Ranked) -> Tree | Forest | Dropped:
        """Build the tree of one prompt, without untrained answers and those in no comparison."""
        trained = [bool(np.any(answer.weights)) for answer in ranked.answers]
        slots = [slot for slot in list_slots(ranked) if all(trained[i] for i in _sides(slot))]
        if not slots:
            return Dropped("no trained token", ranked.origin)
        answers, slots, shares = self._branches(ranked, slots)
        return _Layout(self, ranked, answers, slots, shares).grow()

    def _branches(
        self, ranked: Ranked, slots: list[ComparisonSlot]
    ) -> tuple[list[RankedAnswer], list[ComparisonSlot], list[np.ndarray]]:
        """Return (answer of each branch, slots that index these, share of each token [n])."""
        if self.tail is None:
            used = sorted({side for slot in slots for side in _sides(slot)})
            new_index: dict[int | None, int | None] = {
                side: index for index, side in enumerate(used)
            }
            answers = [ranked.answers[side] for side in used]
            new_index[None] = None
            moved = [
                ComparisonSlot(new_index[s.chosen], new_index[s.rejected], s.margin) for s in slots
            ]
            return answers, moved, [np.ones(len(answer.tokens)) for answer in answers]
        answers, moved, shares = [], [], []
        for slot in slots:
            pair = [ranked.answers[side] for side in _sides(slot)]
            common = min(np.count_nonzero(answer.weights) for answer in pair)
            moved.append(ComparisonSlot(len(answers), len(answers) + 1, slot.margin))
            answers += pair
            shares += [
                np.where(np.cumsum(answer.weights != 0) <= common, 1.0, self.tail)
                for answer in pair
            ]
        return answers, moved, shares


def list_slots(ranked: Ranked) -> list[ComparisonSlot]:
    """Return the comparisons of a prompt's answers, or else a slot for each labeled answer."""
    if ranked.pairs:
        return [ComparisonSlot(pair.chosen, pair.rejected, pair.margin) for pair in ranked.pairs]
    return [
        ComparisonSlot(index, None) if desirable else ComparisonSlot(None, index)
        for index, desirable in enumerate(ranked.labels)
    ]


def _sides(slot: ComparisonSlot) -> list[int]:
    return [side for side in (slot.chosen, slot.rejected) if side is not None]


@dataclass(frozen=True, eq=False)
class _Layout:
    """Branches of one prompt in the order of their tokens in a row."""

    rule: PairTrees
    ranked: Ranked
    answers: Sequence[RankedAnswer]
    slots: Sequence[ComparisonSlot]
    shares: Sequence[np.ndarray]

    def grow(self) -> Tree | Forest | Dropped:
        prompt, ranked, share = self.ranked.prompt, self.ranked, self.rule.share_prompts
        weight = 1.0 / len(self.slots) if self.rule.average == "prompts" else 1.0
        chosen = np.zeros(len(self.answers))
        for slot in self.slots:
            if slot.chosen is not None:
                chosen[slot.chosen] += weight
        heads = [chosen.sum()] if share else list(chosen)  # nll weights of the prompts
        pieces: list[Node] = []
        for index, answer in enumerate(self.answers):
            if index < len(heads):
                prompt_weight = heads[index] if self.rule.nll == "sequence" else 0.0
                pieces.append(
                    self._node(
                        -1, prompt, np.zeros(len(prompt)), prompt_weight, "prompt",
                        images=ranked.images,
                    )
                )  # fmt: skip
            mask = (np.asarray(answer.weights) != 0).astype(np.float64)
            counted = np.ones_like(mask) if self.rule.nll == "sequence" else mask
            pieces.append(
                self._node(
                    0, answer.tokens, mask, chosen[index] * counted, self._role(index),
                    self.shares[index], answer.images,
                )
            )  # fmt: skip
        if not self._place(pieces, weight):
            return Dropped("more pairs than tokens", ranked.origin)
        if share:
            return Tree(tuple(pieces), origin=ranked.origin, controls=ranked.controls)
        chains = [
            Tree(tuple(pieces[start : start + 2]), origin=ranked.origin, controls=ranked.controls)
            for start in range(0, len(pieces), 2)
        ]
        return Forest(tuple(chains))

    def _node(self, parent, tokens, mask, nll, role, share=None, images=None) -> Node:
        n = len(tokens)
        weights = {PREFERENCE: np.zeros(n), SCORE: mask}
        if self.rule.nll != "none":
            weights[NLL] = np.broadcast_to(nll, n).astype(np.float64)
        streams = {
            CHOSEN: np.full(n, NO_SIDE, np.int32),
            REJECTED: np.full(n, NO_SIDE, np.int32),
            MARGIN: np.zeros(n, np.float32),
        }
        if self.rule.tail is not None:
            streams[SHARE] = np.zeros(n) if share is None else share
        return Node(parent, np.asarray(tokens, np.int32), weights, streams, role, images=images)

    def _place(self, pieces: Sequence[Node], weight: float) -> bool:
        """Write the slots into the first tokens that are not roots; False if there are too few."""
        sizes = [len(piece.tokens) for piece in pieces]
        starts = np.cumsum([0, *sizes[:-1]])
        lasts = [
            start + size - 1
            for piece, start, size in zip(pieces, starts, sizes, strict=True)
            if piece.parent >= 0
        ]
        free = [
            (piece, offset, int(start) + offset)
            for piece, start, size in zip(pieces, starts, sizes, strict=True)
            for offset in range(piece.parent < 0, min(size, len(self.slots) + 1))
        ]
        if len(free) < len(self.slots):
            return False
        for slot, (piece, offset, position) in zip(self.slots, free, strict=False):
            piece.weights[PREFERENCE][offset] = weight
            piece.streams[MARGIN][offset] = slot.margin
            for name, side in ((CHOSEN, slot.chosen), (REJECTED, slot.rejected)):
                if side is not None:
                    piece.streams[name][offset] = lasts[side] - position
        return True

    def _role(self, index: int) -> str:
        better = any(slot.chosen == index for slot in self.slots)
        worse = any(slot.rejected == index for slot in self.slots)
        return "answer" if better == worse else "chosen" if better else "rejected"
