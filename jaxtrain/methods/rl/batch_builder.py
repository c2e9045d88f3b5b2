"""Batches of groups of episodes: trees or flat rows, loss weights and streams.

    group:  prompt ─┬─ answer 1 (advantage  1.2)      one tree a group: the prompt is computed once
                    ├─ answer 2 (advantage -0.3)      trained tokens are never shared
                    └─ answer 3 (advantage -0.9)

An episode of several token sequences (a template that rewrites history) gives a branch for each:
what they share before a sequence's first drawn token is computed once, and each drawn token is
trained in the sequence that it was drawn in. Averages count episodes, not sequences; a ratio by
sequence is that of each token sequence.

Weights and constant denominators decide what the loss is a mean of, for a minibatch of N episodes
with n_i trained tokens each:

    average    weight of a token        denominator
    token      1                        the sum of all weights
    sequence   1 / n_i                  N, episodes without any trained token included
    sum        1                        N: sequences count by their length (LUSPO)
    constant   1                        N x longest answer
    microstep  1 / tokens of the step   microsteps that hold a trained token
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from jaxtrain.batch import ROUTED, Batch, RouteShape, pad_routes
from jaxtrain.data.packing.pack import Fields, ImagePacker, lay_out
from jaxtrain.data.packing.prefixes import FlatSequence, Saving, measure_saving, merge_prefixes
from jaxtrain.data.packing.steps import StepShape
from jaxtrain.data.packing.tree import Tree, join_images
from jaxtrain.data.packing.window import fit_trees
from jaxtrain.errors import RunStopped
from jaxtrain.generation.episodes import Episode, Group, TokenSequence

EPISODE = "episode"
"""Host-only stream: number of the token's episode in the round, from 0; -1 is context."""
TURN = "turn"
"""Host-only stream: number of the token's turn in its episode, from 0; -1 is context."""
DRAWN = "drawn"
"""Stream: 1 on trained tokens that the policy drew, 0 on those of the data's own answers."""
STREAMS = {
    DRAWN: np.float32,
    **dict.fromkeys(("advantage", "sampler_logp", "old_logp", "ref_logp"), np.float32),
    EPISODE: np.int32,
    TURN: np.int32,
}


def stream_dtypes(routes: RouteShape | None) -> dict[str, Any]:
    """Return the dtype of each stream of a batch, with that of routing records if there are any."""
    if routes is None:
        return dict(STREAMS)
    return {**STREAMS, ROUTED: np.dtype((routes.dtype, (routes.width,)))}


Average = Literal["token", "sequence", "sum", "microstep", "constant"]


@dataclass(frozen=True)
class BatchBuilder:
    """Settings by which a round becomes batches."""

    shape: StepShape
    """Rows of a microstep, T and its buckets; the number of microsteps follows."""
    average: Average
    components: tuple[str, ...] = ("pg",)
    """Loss components, all weighted alike."""
    longest: int = 1
    """sampling.max_new_tokens, for average "constant"."""
    share_prompts: bool = True
    packing: bool = True
    """Put several trees in a row."""
    mask_truncated: bool = False
    num_minibatches: int = 1
    truth: str | None = None
    """Component whose weights are 1 on the tokens of a group's ground truth, which is then packed
    beside the answers; its loss is a mean over all of them, whatever `average` is."""
    dtype: type = np.float32
    routes: RouteShape | None = None
    """Shape of the records of experts that tokens are routed to again; None: routers choose."""
    images: ImagePacker | None = None
    """Makes patches of the images of prompts; None: prompts have none."""
    recompute_replayed: bool = False
    """Leave NaN as the sampler's log-probs of replayed groups, for `prepare` to fill in."""

    @property
    def streams(self) -> dict[str, Any]:
        """Dtype of each per-token stream that `pack` writes."""
        return stream_dtypes(self.routes)

    def fits(self, sequence: TokenSequence) -> bool:
        """Return True if a row has room for the sequence."""
        images, limit = sequence.images, self.row_patches
        if images is not None and limit is not None and images.num_patches > limit:
            return False
        return len(sequence.tokens) <= self.shape.row_tokens

    @property
    def row_patches(self) -> int | None:
        """Patches of a row at most; None: no limit."""
        return None if self.images is None else self.images.row_patches

    @property
    def all_components(self) -> tuple[str, ...]:
        """Components of answers and of ground truths."""
        return self.components if self.truth is None else (*self.components, self.truth)


@dataclass(frozen=True, eq=False)
class RoundBatches:
    """A round, ready to be prepared and trained."""

    batches: list[Batch]
    """One a minibatch, [A, B, T]."""
    saving: Saving
    trained_tokens: int
    packing_efficiency: float
    too_long: int
    """Episodes that fit no row and were left out."""


def build_batches(groups: Sequence[Group], builder: BatchBuilder) -> RoundBatches:
    """Return the batches of groups whose advantages are known."""
    row_tokens = builder.shape.row_tokens
    count = min(builder.num_minibatches, len(groups))
    # By groups, not episodes: the answers of a prompt are compared with each other in one update.
    parts = np.array_split(np.arange(len(groups)), count)
    # An episode keeps its number when others are left out: rewards of the whole round are looked up
    # by it.
    first = np.cumsum([0, *(len(group.episodes) for group in groups)])
    batches, trees_of_all, too_long, trained = [], [], 0, 0
    for part in parts:
        trees, episodes = [], 0
        for index in part:
            group = groups[index]
            branches = []
            for member, episode in enumerate(group.episodes):
                if not all(builder.fits(sequence) for sequence in episode.sequences):
                    too_long += 1
                    continue
                # In float64 like the weights below: the batch rounds once.
                advantages_T = np.atleast_1d(np.asarray(group.advantages[member], np.float64))
                episode_branches = make_branches(
                    episode, advantages_T, int(first[index]) + member, builder
                )
                if group.replayed and builder.recompute_replayed:
                    for branch in episode_branches:
                        drawn = branch.streams[EPISODE] >= 0
                        branch.streams["sampler_logp"] = np.where(drawn, np.nan, 0.0)
                branches += episode_branches
                episodes += 1
            branches += make_truth(group.truth, builder)
            trees += grow(branches, row_tokens, builder.share_prompts, builder.row_patches)
        if not trees:
            continue
        trees_of_all += trees
        batch = pack(trees, builder)
        batches.append(average_over(batch, builder, episodes))
        trained += int(np.count_nonzero(batch.weights[builder.components[0]]))
    # Of all minibatches: a metric of the round, not of an update.
    saving = measure_saving(trees_of_all)
    slots = sum(batch.tokens.size for batch in batches)
    efficiency = saving.packed_tokens / max(slots, 1)
    return RoundBatches(batches, saving, trained, efficiency, too_long)


def make_branches(
    episode: Episode, advantages_T: np.ndarray, number: int, builder: BatchBuilder
) -> list[FlatSequence]:
    """Return a branch for each of an episode's sequences with trained tokens, with weights and
    streams. advantages [turns]; the last one holds for all later turns."""
    if builder.mask_truncated and episode.finish_reason == "length":
        return []
    masks = [np.array(sequence.sampled, bool) for sequence in episode.sequences]
    for mask in masks:
        mask[:1] = False  # nothing predicts a first token
    count = sum(int(mask.sum()) for mask in masks)
    # Over all sequences of the episode together, so that one whose context was rewritten counts no
    # more than another.
    weight = 1.0 / max(count, 1) if builder.average == "sequence" else 1.0
    return [
        make_branch(sequence, mask, weight, advantages_T, number, builder, not episode.given)
        for sequence, mask in zip(episode.sequences, masks, strict=True)
        if mask.any()
    ]


def make_truth(truth: Episode | None, builder: BatchBuilder) -> list[FlatSequence]:
    """Return the ground truth's branches, if it is trained; they have no advantage."""
    if builder.truth is None or truth is None:
        return []
    branches = []
    for sequence in truth.sequences:
        mask = np.array(sequence.sampled, bool)
        mask[:1] = False
        if mask.any() and builder.fits(sequence):
            # Weight 0 in the components of answers: the ground truth is trained by its own one
            # alone.
            branch = make_branch(sequence, mask, 0.0, np.zeros(1), -1, builder, drawn=False)
            branch.weights[builder.truth] = mask.astype(np.float64)
            branches.append(branch)
    return branches


def make_branch(
    sequence: TokenSequence,
    trained: np.ndarray,
    weight: float,
    advantages_T: np.ndarray,
    number: int,
    builder: BatchBuilder,
    drawn: bool = True,
) -> FlatSequence:
    """Return a sequence as a branch. trained [n]: tokens with a weight; drawn: by the policy."""
    weights_n = trained * weight
    length = len(sequence.tokens)
    turns = np.asarray(sequence.turns, np.int64) if sequence.turns else np.zeros(length, np.int64)
    # Context has turn -1; what it reads here is dropped below, where only trained tokens keep it.
    advantages_n = advantages_T[np.clip(turns, 0, len(advantages_T) - 1)]
    streams: dict[str, np.ndarray] = {}
    if builder.routes is not None:
        if sequence.routed is None and drawn:
            raise RunStopped(
                "rollout.router_replay: an answer came without a record of the experts that its"
                " tokens went to; an engine of your own must give Completion.routed, an environment"
                " that makes Episodes itself must hand it on (Episode.routed), or set it to false"
            )
        streams[ROUTED] = pad_routes(sequence.routed, length, builder.routes)
    return FlatSequence(
        np.asarray(sequence.tokens, np.int32),
        {name: np.where(name == builder.truth, 0.0, weights_n) for name in builder.all_components},
        {
            "advantage": np.where(trained, advantages_n, 0.0),
            "sampler_logp": np.where(trained, sequence.logprobs, 0.0),
            EPISODE: np.where(trained, number, -1),
            TURN: np.where(trained, turns, -1),
            # Placeholders that `prepare` fills: all batches of a run have the same streams, or each
            # kind would compile a program.
            "old_logp": np.zeros(length),
            "ref_logp": np.zeros(length),
            DRAWN: trained * float(drawn),
            **streams,
        },
        join_images([(sequence.images, length)], length),
    )


def grow(
    branches: Sequence[FlatSequence], row_tokens: int, share: bool, row_patches: int | None = None
) -> list[Tree]:
    """Return trees of at most row_tokens, and of row_patches; a larger group is split into several,
    in order."""
    if not share:
        return [tree for branch in branches for tree in merge_prefixes([branch])]
    trees: list[Tree] = []
    chunk: list[FlatSequence] = []
    grown: list[Tree] = []
    for branch in branches:
        # Only context is shared: a drawn token has its own advantage and log-prob in every branch.
        merged = merge_prefixes([*chunk, branch], share="context")
        if chunk and any(
            tree.num_tokens > row_tokens
            or (row_patches is not None and tree.num_patches > row_patches)
            for tree in merged
        ):
            trees += grown
            chunk = []
            merged = merge_prefixes([branch], share="context")
        chunk.append(branch)
        grown = merged
    return trees + grown


def pack(trees: Sequence[Tree], builder: BatchBuilder) -> Batch:
    """Pack trees into rows [A, B, T] by first-fit-decreasing."""
    shape = builder.shape
    rows = [[index] for index in range(len(trees))]
    if builder.packing:
        rows = fit_trees(trees, shape.row_tokens, builder.row_patches)
    packed = [[lay_out(trees[i], "branch") for i in row] for row in rows]
    fields = Fields(
        builder.all_components, builder.streams, dtype=builder.dtype, images=builder.images
    )
    return replace(shape, fields=fields).build(packed)


def average_over(batch: Batch, builder: BatchBuilder, episodes: int) -> Batch:
    """Return the batch with what its average needs: rescaled weights, constant denominators [A]."""
    if builder.average == "token":
        return batch
    weights, microsteps = batch.weights, batch.tokens.shape[0]
    if builder.average == "microstep":
        # Padded microsteps, without a trained token, do not count.
        counts_A = np.count_nonzero(batch.weights[builder.components[0]], axis=(1, 2))
        share_A11 = 1.0 / np.maximum(counts_A, 1)[:, None, None]
        weights = {
            name: w if name == builder.truth else (w * share_A11).astype(w.dtype)
            for name, w in batch.weights.items()
        }
        denominator = np.count_nonzero(counts_A)
    elif builder.average in ("sequence", "sum"):
        denominator = episodes
    else:
        assert builder.average == "constant", builder.average
        denominator = episodes * builder.longest
    denoms = {name: np.full(microsteps, denominator, builder.dtype) for name in builder.components}
    return batch._replace(weights=weights, denoms=denoms)
