"""Turns of an agent (prompt, thought, response), and trees and samples built from them.

A thought is a side leaf of the conversation, because later turns do not see it:

    prompt ─┬─ reasoning              prompt 2 = prompt + response + next messages
            └─ response ── ... ─┬─ reasoning 2
                                └─ response 2

All modes of training on a trajectory (tree, per branch, flat samples) use these turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxtrain.data.packing.prefixes import FlatSequence, merge_prefixes
from jaxtrain.data.packing.tree import Tree, build_tree, chain


@dataclass(frozen=True, eq=False)
class AssistantTurn:
    """Assistant turn, as int32 token ids."""

    prompt: np.ndarray
    """All visible tokens before it, including the generation prompt."""
    reasoning: np.ndarray
    """Hidden thought; may be empty."""
    response: np.ndarray
    """Visible response."""
    trains: bool = True
    """False if the data say that the turn must not train."""


@dataclass(frozen=True)
class TrainedParts:
    """Parts of a turn that train."""

    response: bool = True
    reasoning: bool = True


def make_turns(
    parts: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]], trains: Sequence[bool] = ()
) -> list[AssistantTurn]:
    """Build turns from (context since the last response, reasoning, response). trains: of each;
    empty: all do."""
    turns, visible = [], np.zeros(0, np.int32)
    for index, (context, reasoning, response) in enumerate(parts):
        prompt = np.concatenate([visible, np.asarray(context, np.int32)])
        turn = AssistantTurn(
            prompt,
            np.asarray(reasoning, np.int32),
            np.asarray(response, np.int32),
            trains[index] if trains else True,
        )
        turns.append(turn)
        visible = np.concatenate([prompt, turn.response])
    return turns


def starts_with(tokens: np.ndarray, prefix: np.ndarray) -> bool:
    """Return True if `tokens` begin with `prefix`."""
    return len(tokens) >= len(prefix) and bool((tokens[: len(prefix)] == prefix).all())


def build_caterpillar(
    turns: Sequence[AssistantTurn], trained: TrainedParts, origin: str = ""
) -> Tree:
    """Build the tree of a trajectory, with K = number of turns with reasoning, plus one.

    Nodes per turn: context, thought (side leaf), response (trunk). If a chat template rewrites
    earlier turns, there is no such trunk, and the tree is built by merging prefixes of the visible
    sequences. Raises ValueError without turns, or for a turn without new context.
    """
    if not turns:
        raise ValueError("a trajectory needs at least one turn")
    parts: list[tuple[int, np.ndarray, np.ndarray, str]] = []
    trunk, visible = -1, np.zeros(0, np.int32)
    for turn in turns:
        if not starts_with(turn.prompt, visible):
            return _merge_rewritten(turns, trained, origin)
        context = turn.prompt[len(visible) :]
        if not len(context):
            raise ValueError("two assistant turns in a row, or a conversation that starts with one")
        parts.append((trunk, context, np.zeros(len(context)), "context"))
        fork = len(parts) - 1
        if len(turn.reasoning):
            parts.append((fork, turn.reasoning, reasoning_weights(turn, trained), "think"))
        weights = response_weights(turn, trained)
        parts.append((fork, turn.response, weights, "response"))
        trunk = len(parts) - 1
        visible = np.concatenate([turn.prompt, turn.response])
    return build_tree(parts, origin=origin)


def _merge_rewritten(turns: Sequence[AssistantTurn], trained: TrainedParts, origin: str) -> Tree:
    """Merge the visible sequences and their thoughts into a tree."""
    visible: list[tuple[np.ndarray, np.ndarray]] = []
    thoughts: list[FlatSequence] = []
    for turn in turns:
        index = next((i for i, v in enumerate(visible) if starts_with(turn.prompt, v[0])), None)
        before = visible.pop(index)[1] if index is not None else np.zeros(0)
        mask = np.concatenate([before, np.zeros(len(turn.prompt) - len(before))])
        if len(turn.reasoning):
            weights = reasoning_weights(turn, trained)
            tokens = np.concatenate([turn.prompt, turn.reasoning])
            thoughts.append(FlatSequence(tokens, {"nll": np.concatenate([mask, weights])}))
        weights = response_weights(turn, trained)
        tokens = np.concatenate([turn.prompt, turn.response])
        visible.append((tokens, np.concatenate([mask, weights])))
    branches = [*thoughts, *(FlatSequence(tokens, {"nll": mask}) for tokens, mask in visible)]
    trees = merge_prefixes(branches, origin=origin)
    assert len(trees) == 1, "all turns of a trajectory begin alike"
    return trees[0]


def build_current_rl(
    turns: Sequence[AssistantTurn], trained: TrainedParts, origin: str = ""
) -> list[Tree]:
    """Build flat samples like RL trainers: a turn extends the first sample that is its prefix.

    A response is conditioned on its thought. A turn with a thought cannot be extended, because the
    next prompt does not show it. Each turn trains once.
    """
    samples: list[tuple[np.ndarray, np.ndarray]] = []
    for turn in turns:
        completion = np.concatenate([turn.reasoning, turn.response])
        weights = _completion_weights(turn, trained)
        for index, (tokens, mask) in enumerate(samples):
            if starts_with(turn.prompt, tokens):
                context = np.zeros(len(turn.prompt) - len(tokens))
                samples[index] = (
                    np.concatenate([turn.prompt, completion]),
                    np.concatenate([mask, context, weights]),
                )
                break
        else:
            samples.append(
                (
                    np.concatenate([turn.prompt, completion]),
                    np.concatenate([np.zeros(len(turn.prompt)), weights]),
                )
            )
    return [chain(tokens, {"nll": mask}, origin=origin) for tokens, mask in samples]


def build_flat(turns: Sequence[AssistantTurn], trained: TrainedParts, origin: str = "") -> Tree:
    """Build a sequence with every thought in place: ordinary SFT on the full transcript."""
    tokens, weights = [], []
    visible = np.zeros(0, np.int32)
    for turn in turns:
        shared = 0
        if starts_with(turn.prompt, visible):
            shared = len(visible)
        tokens += [turn.prompt[shared:], turn.reasoning, turn.response]
        weights += [np.zeros(len(turn.prompt) - shared), _completion_weights(turn, trained)]
        visible = np.concatenate([turn.prompt, turn.response])
    return chain(np.concatenate(tokens), {"nll": np.concatenate(weights)}, origin=origin)


def _completion_weights(turn: AssistantTurn, trained: TrainedParts) -> np.ndarray:
    return np.concatenate([reasoning_weights(turn, trained), response_weights(turn, trained)])


def reasoning_weights(turn: AssistantTurn, trained: TrainedParts) -> np.ndarray:
    """Return the weights of a turn's thought."""
    return np.full(len(turn.reasoning), float(trained.reasoning and turn.trains))


def response_weights(turn: AssistantTurn, trained: TrainedParts) -> np.ndarray:
    """Return the weights of a turn's visible response."""
    return np.full(len(turn.response), float(trained.response and turn.trains))
