"""Reward models as judges of a round: on the devices that train, asked before its first update.

    [[rewards]] model.path ──> Role "judge_0" (weights of its own, frozen)
    batches of a round ──Scorer.scores──> [A, B, T, n] ──> what each episode, or turn, has earned
                                          ──> its column of the reward table ──> advantages anew

A judge reads the very tokens that the policy drew, so both must have the same ones. A model that
scores texts is read at an episode's last drawn token; a process reward model at the last one of
each turn, where the probability that it is right is the turn's reward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.config import Config
from jaxtrain.core.architecture import find_architecture, find_tokenizer
from jaxtrain.core.bundle import ModelBundle, build_auxiliary_bundle
from jaxtrain.core.roles import Role
from jaxtrain.core.scorer import Scorer
from jaxtrain.errors import UserError
from jaxtrain.generation.reward_table import deviation, weigh
from jaxtrain.huggingface.config_checks import check_names
from jaxtrain.methods.offline import reads_same_images
from jaxtrain.methods.reward_model.method import HEADS
from jaxtrain.methods.rl.advantages import RewardTable
from jaxtrain.methods.rl.batch_builder import EPISODE, TURN
from jaxtrain.models.scores import split_architecture


@dataclass(frozen=True)
class RewardModelJudge:
    """A [[rewards]] table with a model."""

    role: str
    label: str
    weight: float
    steps: bool
    """Whether it scores turns instead of episodes."""
    sees: bool = False
    """Whether it reads the policy's images."""


def open_judges(config: Config, bundle: ModelBundle) -> dict[RewardModelJudge, Role]:
    """Return the judges of a run with the roles of their models, once the data are open, so that
    the tokenizer has the format of the policy's images; raises UserError for a folder that
    is no reward model, or that reads other tokens than the policy."""
    judges = {}
    for index, reward in enumerate(config.rewards):
        if reward.model is None:
            continue
        key = f"rewards.{index}.model"
        named, _ = check_names(find_architecture(reward.model)[1])
        per = split_architecture(named[0])[1] if named else None
        if per is None:
            raise UserError(
                f"{key} holds {named[0] if named else 'no architecture'}, which gives no scores;"
                ' name a reward model, such as one that task.kind "reward_model" trained'
            )
        head = next(head for head in HEADS.values() if head.per == per)
        if find_tokenizer(reward.model).get_vocab() != bundle.tokenizer.get_vocab():
            raise UserError(
                f"{key} reads other tokens than the policy, whose tokens it is to judge; serve it"
                ' with vLLM and use function "vllm_reward", which sends texts'
            )
        role = Role(build_auxiliary_bundle(reward.model, bundle, key, head), "own", in_loss=False)
        sees = reads_same_images(reward.model, bundle.tokenizer)
        name = f"judge_{index}"
        judge = RewardModelJudge(name, reward.label, reward.weight, per == "token", sees)
        judges[judge] = role
    return judges


def ask_judges(
    judges: Sequence[RewardModelJudge], batch: Batch, scorer: Scorer
) -> dict[str, np.ndarray]:
    """Return {role: float [A, B, T]}, the score of each judge at every token of a batch; on all
    processes. UserError for images that a judge does not read."""
    answers = {}
    for judge in judges:
        if batch.images is not None and not judge.sees:
            raise UserError(
                f"rewards.{judge.role.removeprefix('judge_')}.model reads no images, or other"
                " patches and tokens of a picture than the policy, and prompts have images; name a"
                " reward model of the policy's family with the same preprocessor_config.json, or"
                " judge answers by a function"
            )
        scores = scorer.scores(batch, judge.role).astype(np.float64)
        gap = scores[..., -1] - scores[..., 0]
        answers[judge.role] = 1 / (1 + np.exp(-gap)) if judge.steps else scores[..., 0]
    return answers


def judge_table(
    table: RewardTable, judges: Sequence[RewardModelJudge], batches: Sequence[Batch]
) -> tuple[RewardTable, dict[str, float]]:
    """Return the rewards with a column for each judge, and the metrics that change with it.

    batches: with the judges' scores among the streams.
    """
    num_episodes, metrics = len(table.rewards_TNK[0]), {}
    for judge in judges:
        earned_NT = read_turns(batches, judge.role, num_episodes)
        if not judge.steps:
            earned_NT = keep_last(earned_NT)
        table = add_column(table, earned_NT, judge.weight)
        earned = table.rewards_TNK[0][:, -1]
        earned = earned[~np.isnan(earned)]
        if len(earned):
            metrics[f"rewards/{judge.label}/mean"] = float(earned.mean())
            metrics[f"rewards/{judge.label}/std"] = float(deviation(earned))
    return table, metrics | describe_table(table)


def describe_table(table: RewardTable) -> dict[str, float]:
    """Return means and spreads of the weighted rewards, under TRL's names."""
    totals_N = weigh(table.rewards_TNK[0], table.weights)
    spreads = [float(deviation(p)) for p in np.split(totals_N, np.cumsum(table.sizes)[:-1])]
    return {
        "reward": float(np.nan_to_num(totals_N).mean()),
        "reward_std": float(np.mean(spreads)),
        "frac_reward_zero_std": float(np.mean(np.isclose(spreads, 0.0))),
    }


def read_turns(batches: Sequence[Batch], name: str, num_episodes: int) -> np.ndarray:
    """Return a stream at the last drawn token of each turn, float64 [N, turns]; NaN for turns
    without a trained token."""
    masks = [batch.streams[EPISODE] >= 0 for batch in batches]
    episode, turn, position, value = (
        np.concatenate(
            [np.asarray(of(batch))[mask] for batch, mask in zip(batches, masks, strict=True)]
        )
        for of in (
            lambda batch: batch.streams[EPISODE],
            lambda batch: batch.streams[TURN],
            lambda batch: batch.positions,
            lambda batch: batch.streams[name],
        )
    )
    values_NT = np.full((num_episodes, int(turn.max(initial=0)) + 1), np.nan)
    order = np.lexsort((position, turn, episode))
    values_NT[episode[order], turn[order]] = value[order]  # the last one of a place stays
    return values_NT


def keep_last(values_NT: np.ndarray) -> np.ndarray:
    """Return the last value of each row that is not NaN, [N, 1]; NaN for a row without any."""
    valid = ~np.isnan(values_NT)
    last = values_NT.shape[1] - 1 - valid[:, ::-1].argmax(axis=1)
    return np.where(valid.any(axis=1), values_NT[np.arange(len(values_NT)), last], np.nan)[:, None]


def add_column(table: RewardTable, earned_NT: np.ndarray, weight: float) -> RewardTable:
    """Return the table with another reward, as rewards-to-go at each turn.

    earned [N, turns]; with one column it is earned by the episode as a whole.
    """
    turns = earned_NT.shape[1]
    nothing_N = np.isnan(earned_NT).all(axis=1)
    tables = []
    for turn in range(max(turns, len(table.rewards_TNK))):
        rest_N = np.nansum(earned_NT[:, turn if turns > 1 else 0 :], axis=1)
        column_N = np.where(nothing_N, np.nan, rest_N)
        before = table.rewards_TNK[min(turn, len(table.rewards_TNK) - 1)]
        tables.append(np.concatenate([before, column_N[:, None]], axis=1))
    return replace(table, rewards_TNK=tables, weights=(*table.weights, weight))
