"""Energy-based fine-tuning, structured (docs/ebft.md): answers that have the features of the truth.

    prompt ─ engine ─> G answers ─┐  one tree: the prompt once
    row    ─ ground truth ────────┴─ feature network ─> rewards ─> advantages ─> any RL objective
                                                                └─ and cross-entropy of the truth

Drawing and training are those of methods/rl. This module computes the rewards of answers, which
needs the round on the devices that train.
"""

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from typing_extensions import override

from jaxtrain.batch import Batch
from jaxtrain.config import Config, DatasetConfig
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.core.roles import ModelSnapshot
from jaxtrain.core.scorer import Scorer
from jaxtrain.core.task import POLICY, Round, Task, of_policy
from jaxtrain.data.chat.template import end_of_turn_ids
from jaxtrain.data.packing.pack import Fields
from jaxtrain.data.packing.steps import StepShape
from jaxtrain.data.sequences import Sequences
from jaxtrain.distributed.broadcast import broadcast_or_raise
from jaxtrain.distributed.feed import row_shards
from jaxtrain.distributed.mesh import is_main_process
from jaxtrain.errors import RunStopped
from jaxtrain.generation.episodes import Episode, Group
from jaxtrain.generation.group_player import AnswerOptions
from jaxtrain.generation.prompts import PromptRows, open_prompts
from jaxtrain.methods.ebft.config import EBFTTask
from jaxtrain.methods.ebft.feature_matching import rewards
from jaxtrain.methods.ebft.features import (
    FEATURES,
    FeatureCache,
    FeatureRequest,
    FeatureSequence,
    build_feature_request,
    feature_role,
)
from jaxtrain.methods.ebft.ground_truth import GroundTruthRows, GroundTruths, count_prompt
from jaxtrain.methods.ebft.loss import COMPONENT, ebft_loss
from jaxtrain.methods.offline import OfflineData
from jaxtrain.methods.rl import method as rl
from jaxtrain.methods.rl.advantages import RewardTable
from jaxtrain.methods.rl.batch_builder import BatchBuilder
from jaxtrain.methods.rl.judges import add_column, describe_table
from jaxtrain.methods.rl.prompt_data import PromptData
from jaxtrain.methods.rl.round import RolloutRounds
from jaxtrain.models.capabilities import follows_trees

Section = EBFTTask
REWARD = "features"
"""Name of the reward in tables and metrics."""


class FeatureMatchingData(PromptData):
    """`core.task.Data` of prompts with ground truths; held-out data are what SFT reads."""

    def __init__(self, config: Config, tokenizer: Any):
        task = config.task
        assert isinstance(task, EBFTTask)
        # Features of answers are those of texts: images of prompts are refused.
        tokenizer.image_format = None
        plan = rl.make_plan(config)
        truths = GroundTruths(
            config.data.datasets,
            tokenizer,
            config.env,
            row_tokens=config.data.sequence_len,
            multiplier=task.gt_length_multiplier if task.adaptive_max_tokens else None,
            least=task.adaptive_min_tokens,
        )
        plan = dataclasses.replace(
            plan,
            make_builder=partial(read_builder, task, config),
            fields=Fields(tuple(read_coef(task)), plan.fields.streams),
            answers=AnswerOptions(truths=truths, need_reward=False),
        )
        super().__init__(config, tokenizer, plan)
        self.task, self.held_out = task, OfflineData(config, Sequences(config.data, tokenizer))

    @override
    def check(self) -> Iterator[str]:
        yield from super().check()
        for dataset in self.config.data.eval_datasets:
            yield str(self.held_out.recipe.probe(dataset))

    def _open_prompts(self) -> Sequence[Any]:
        return [self._open(dataset, i) for i, dataset in enumerate(self.config.data.datasets)]

    def _open(self, dataset: DatasetConfig, index: int) -> GroundTruthRows:
        key = f"data.datasets.{index}"
        rows: PromptRows = open_prompts(dataset, key)
        task, column = self.task, self.config.env.prompt_column
        return GroundTruthRows(rows, task.turns, task.thinking, column, key)

    def evaluate(
        self, bundle: ModelBundle, snapshot: ModelSnapshot, scorer: Scorer
    ) -> dict[str, float]:
        """Return cross-entropy of the held-out data as for SFT: eval/loss, eval/perplexity."""
        numbers = {}
        for index, dataset in enumerate(self.config.data.eval_datasets):
            name, total, weight = "eval" if index == 0 else f"eval/{index}", 0.0, 0.0
            most = self.config.eval.max_batches or math.inf
            for number, batch in enumerate(self.held_out.eval_batches(dataset, bundle)):
                if number >= most:
                    break
                weights = batch.weights["nll"].astype(np.float64)
                logp = scorer.logp(batch, POLICY).astype(np.float64)
                total -= float(np.where(weights != 0, weights * logp, 0.0).sum())
                weight += float(weights.sum())
            if weight:
                numbers[f"{name}/loss"] = total / weight
                numbers[f"{name}/perplexity"] = math.exp(min(total / weight, 80.0))
        return numbers


def open_data(config: Config, tokenizer: Any) -> FeatureMatchingData:
    """Return prompts with ground truths."""
    return FeatureMatchingData(config, tokenizer)


def make(config: Config) -> Task:
    """Build reinforcement learning with an additional feature network."""
    task = config.task
    assert isinstance(task, EBFTTask)
    base = rl.make(config)
    bundle = base.roles[POLICY].bundle
    role = feature_role(task.features, config, bundle)
    data = FeatureMatchingData(config, bundle.tokenizer)
    judges = base.prepare.judges if isinstance(base.prepare, rl.PolicyPreparation) else ()
    objective = rl.read_objective(task, config)
    return dataclasses.replace(
        base,
        roles={**base.roles, FEATURES: role},
        loss=of_policy(partial(ebft_loss, objective=objective, impl=config.model.logp)),
        coef=read_coef(task),
        data=data,
        prepare=FeatureMatchingPreparation(task, config, data, judges, role.bundle),
        evaluate=partial(data.evaluate, bundle),
    )


def read_coef(task: EBFTTask) -> dict[str, float]:
    """Return the factor of each component of the loss."""
    return rl.rl_coef(task) | ({COMPONENT: task.ce_coef} if task.ce_coef > 0 else {})


def read_builder(task: EBFTTask, config: Config, rows: int) -> BatchBuilder:
    """Return the builder of a round's batches; with ce_coef it packs the ground truth as a branch
    next to the answers."""
    builder = rl.read_builder(task, config, rows)
    return dataclasses.replace(builder, truth=COMPONENT) if task.ce_coef > 0 else builder


class FeatureMatchingPreparation(rl.PolicyPreparation):
    """Preparation of reinforcement learning, after the answers were rewarded by their features."""

    def __init__(
        self,
        task: EBFTTask,
        config: Config,
        data: FeatureMatchingData,
        judges: Any,
        network: ModelBundle,
    ):
        """network: bundle of the feature role."""
        super().__init__(task, config, data, judges)
        self.judges_late = True
        self.features, self.network = task.features, network
        self.layers = task.features.find_layers(network.architecture.num_hidden_layers)
        share = task.share_prompts and follows_trees(network.architecture)
        self.share = share and config.data.packing
        self.ends = end_of_turn_ids(network.tokenizer, config.env.raw)
        rows = config.data.micro_batch_size * row_shards(network.mesh)
        row_tokens, buckets = config.data.sequence_len, tuple(config.data.length_buckets)
        self.shape = StepShape(rows, None, row_tokens, buckets)
        parts = task.num_minibatches if config.rollout.streaming else 1
        self.most_groups = config.rollout.prompts_per_step // parts
        self.truth_features = FeatureCache()
        """Features of ground truths; on process 0."""
        self.rewards_N: np.ndarray | None = None
        self.numbers: dict[str, float] = {}
        self.match = jax.jit(
            partial(
                rewards,
                alignment=self.features.alignment_coef,
                diversity=self.features.diversity_coef,
                whitening=self.features.whitening,
            )
        )

    @override
    def __call__(self, round: Round, scorer: Scorer) -> Round:
        if round.batches:
            self.reward_answers(scorer)
        return super().__call__(round, scorer)

    @property
    def rounds(self) -> RolloutRounds:
        """The rounds, with groups on process 0 alone."""
        assert self.data.rounds is not None, "opened before the first round"
        return self.data.rounds

    def reward_answers(self, scorer: Scorer) -> None:
        """Compute the rewards of the part's episodes for `judge`, features on all processes."""
        start, requests = time.monotonic(), []

        def begin() -> Batch:
            requests.append(self.request_features(self.rounds.groups))
            return requests[0].batch

        batch = broadcast_or_raise("answers that need features", begin)
        places = 3 if self.features.pooling == "concat" else 1
        features = scorer.features(batch, FEATURES, self.layers, places)
        if is_main_process():
            features_NF = np.stack([features[index] for index in requests[0].places])
            self.compute_rewards(self.rounds.groups, features_NF)
            self.numbers["ebft/feature_seconds"] = time.monotonic() - start

    def request_features(self, groups: Sequence[Group]) -> FeatureRequest:
        """Return a request for the features of all answers, and of ground truths that are not
        cached."""
        sequences = []
        for group in groups:
            answers = [self.read_sequence(episode) for episode in group.episodes]
            truth = self.read_sequence(truth_of(group))
            is_cached = self.truth_features.get(FeatureCache.key(truth)) is not None
            sequences.append(answers if is_cached else [*answers, truth])
        return build_feature_request(sequences, self.features.pooling, self.shape, share=self.share)

    def read_sequence(self, episode: Episode) -> FeatureSequence:
        """Return the last sequence of an episode without the token that ended it, which an answer
        that was cut off lacks."""
        tokens = episode.tokens
        if len(tokens) > 1 and tokens[-1] in self.ends:
            tokens = tokens[:-1]
        return FeatureSequence(np.asarray(tokens, np.int32), count_prompt(episode))

    def compute_rewards(self, groups: Sequence[Group], features_NF: np.ndarray) -> None:
        """Compute rewards and metrics from the features that `request_features` requested. Raises
        RunStopped if they are not finite."""
        if not np.isfinite(features_NF).all():
            raise RunStopped("the feature network's hidden states are not finite")
        generated, truths, start, cached = [], [], 0, 0
        for group in groups:
            stop = start + len(group.episodes)
            generated.append(features_NF[start:stop])
            key = FeatureCache.key(self.read_sequence(truth_of(group)))
            feature = self.truth_features.get(key)
            cached += feature is not None
            if feature is None:
                feature, stop = features_NF[stop], stop + 1
            truths.append((key, feature))
            start = stop
        assert start == len(features_NF), "every feature belongs to a group"
        for key, feature in truths:
            self.truth_features.put(key, feature)
        count, empty = len(groups), max(self.most_groups - len(groups), 0)
        padded = self.match(  # padded to the most groups of a round, to compile only one program
            np.pad(np.stack(generated), ((0, empty), (0, 0), (0, 0))),
            np.pad(np.stack([feature for _, feature in truths]), ((0, empty), (0, 0))),
        )
        matched = jax.tree.map(lambda values: np.asarray(values)[:count], padded)
        self.rewards_N = matched.rewards.reshape(-1).astype(np.float64)
        for group, rewards_G in zip(groups, matched.rewards, strict=True):
            group.rewards = [
                {**row, REWARD: float(value)}
                for row, value in zip(group.rewards, rewards_G, strict=True)
            ]
        self.numbers = {
            "ebft/reward": float(matched.rewards.mean()),
            "ebft/alignment": float(matched.alignment.mean()),
            "ebft/diversity": float(matched.diversity.mean()),
            "ebft/cfm_loss": float(matched.cfm.mean()),
            "ebft/cached_truths": cached / count,
        }

    @override
    def judge(
        self, table: RewardTable, batches: list[Batch]
    ) -> tuple[RewardTable, dict[str, float]]:
        assert self.rewards_N is not None, "answers were rewarded before"
        table = add_column(table, self.rewards_N[:, None], 1.0)
        table, metrics = super().judge(table, batches)
        if self.rounds.last_part:
            self.rounds.samples = self.rounds.choose_samples()
        return table, {**metrics, **describe_table(table), **self.numbers}


def truth_of(group: Group) -> Episode:
    """Return a group's ground truth, which every group of this method has."""
    assert group.truth is not None, "groups are played with their ground truths"
    return group.truth
