"""Reinforcement learning on groups of answers: GRPO and its family (docs/rl.md).

Where answers come from is prompts.py; here is what the method makes of them: the loss, the models,
what is computed before a round's first update.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxtrain.batch import IMAGE_SLOT, ROUTED, Batch, RouteShape
from jaxtrain.config import Config
from jaxtrain.config.policies import list_trained
from jaxtrain.core.architecture import read_architecture
from jaxtrain.core.bundle import build_model_bundle
from jaxtrain.core.roles import Role
from jaxtrain.core.scorer import Scorer
from jaxtrain.core.task import POLICY, Round, Task, of_policy
from jaxtrain.core.weights import read_start
from jaxtrain.data.packing.pack import Fields, ImagePacker
from jaxtrain.data.packing.steps import StepShape
from jaxtrain.distributed.broadcast import broadcast
from jaxtrain.errors import UserError
from jaxtrain.generation.engines import find_engine
from jaxtrain.generation.group_player import AnswerOptions
from jaxtrain.methods.offline import check_packing, open_images
from jaxtrain.methods.reference_model import REFERENCE, find_reference, mixing
from jaxtrain.methods.rl.advantages import AdvantageOptions, RewardTable, turn_advantages
from jaxtrain.methods.rl.batch_builder import EPISODE, TURN, BatchBuilder, stream_dtypes
from jaxtrain.methods.rl.config import PolicyTask, RLTask
from jaxtrain.methods.rl.exact import make_exact, reuses_sampled_logp
from jaxtrain.methods.rl.judges import RewardModelJudge, ask_judges, judge_table, open_judges
from jaxtrain.methods.rl.loss import FIRST_UPDATE, LOGP_FLOOR, PolicyObjective, policy_loss
from jaxtrain.methods.rl.mismatch import RoundComparison
from jaxtrain.methods.rl.prompt_data import PromptData, RoundPlan
from jaxtrain.models.capabilities import require_trees, route_shape

Section = RLTask


def open_data(config: Config, tokenizer: Any) -> PromptData:
    """Return the prompts, and how answers to them become batches."""
    images = open_images(config, tokenizer, config.data.sequence_len)
    return PromptData(config, tokenizer, make_plan(config, images))


def make_plan(config: Config, images: ImagePacker | None = None) -> RoundPlan:
    """Return how a round is made and trained. images: makes patches of the images of prompts."""
    task = config.task
    assert isinstance(task, PolicyTask)
    return RoundPlan(
        make_builder=partial(read_builder, task, config, images=images),
        advantages=AdvantageOptions(
            task.resolved("baseline"),
            task.resolved("scale_rewards"),
            task.resolved("combine_rewards"),
            task.reward_clip_range,
            task.resolved("normalize_advantages"),
        ),
        updates=task.num_minibatches * task.num_iterations,
        parts=task.num_minibatches if config.rollout.streaming else 1,
        fields=Fields(tuple(rl_coef(task)), stream_dtypes(find_routes(config)), images=images),
        # A reward model scores answers on the devices that train, after they were drawn.
        answers=AnswerOptions(
            need_reward=not any(reward.model and reward.weight for reward in config.rewards)
        ),
    )


def make(config: Config) -> Task:
    """Build the policy, its reference if one is needed, and everything around a round."""
    task = config.task
    assert isinstance(task, PolicyTask)
    engine = find_engine(config)
    bundle = make_exact(config, build_model_bundle(config, engine.reserved(config)))
    engine.check(config, bundle)
    if list_trained(config) and bundle.adapter is not None and bundle.adapter.full:
        raise UserError(
            f"policies share one base, but the adapter of adapter.path trains"
            f" {', '.join(bundle.adapter.full)} in full; choose another one"
        )
    for name in list_trained(config):
        if (folder := config.policies[name].path) is not None:
            read_start(folder, bundle, f"policies.{name}.path")
    if task.share_prompts:
        option = "task.share_prompts packs answers behind one prompt"
        fix = "set task.share_prompts and data.packing to false"
        require_trees(bundle.architecture, option, fix)
    check_packing(config, bundle.architecture)
    data = open_data(config, bundle.tokenizer)
    roles, judges = {POLICY: Role(bundle)}, open_judges(config, bundle)
    roles |= {judge.role: role for judge, role in judges.items()}
    kind = find_reference(task.reference, bundle.adapter) if scores_reference(task) else None
    if kind is not None:
        roles[REFERENCE] = Role(bundle, kind, in_loss=False)
    return Task(
        roles=roles,
        loss=of_policy(
            partial(policy_loss, objective=read_objective(task, config), impl=config.model.logp)
        ),
        coef=rl_coef(task),
        data=data,
        prepare=PolicyPreparation(task, config, data, tuple(judges)),
        trained_streams=list_streams(task, config),
        compiles_ahead=True,
        varying_microsteps=True,
        after_round=mixing(kind, task.reference_every, task.reference_alpha),
    )


def list_streams(task: PolicyTask, config: Config) -> tuple[str, ...]:
    """Return the streams that the loss and the model read, the last two where they are there."""
    old = takes_sampled_logp(task, config) or scores_policy(task, config)
    names = ("old_logp",) * old + ("ref_logp",) * ("kl" in rl_coef(task))
    return ("advantage", "sampler_logp", *names, ROUTED, IMAGE_SLOT)


def rl_coef(task: PolicyTask) -> dict[str, float]:
    """Return the factor of each component of the loss."""
    coef = {"pg": 1.0}
    if task.beta > 0 and task.resolved("kl_in") == "loss":
        coef["kl"] = task.beta
    if task.entropy_coef > 0:
        coef["entropy"] = task.entropy_coef
    return coef


def scores_policy(task: PolicyTask, config: Config) -> bool:
    """Return whether the policy's log-probs are computed before a round's first update.

    They are not needed for a single update per round, nor for the parts of a streamed round, each
    of which is evaluated by the weights that it meets: there they are those of the update itself.
    Nor where the sampler's are the same.
    """
    if reuses_sampled_logp(config):
        return False
    streaming = config.rollout.streaming
    if task.objective == "m2po_mask" or (task.beta > 0 and task.resolved("kl_in") == "reward"):
        return True
    once = streaming or task.num_minibatches * task.num_iterations == 1
    return task.resolved("old_logp") == "recomputed" and not once


def takes_sampled_logp(task: PolicyTask, config: Config) -> bool:
    """Return whether the old policy's log-probs are the sampler's."""
    return task.resolved("old_logp") == "sampler" or reuses_sampled_logp(config)


def scores_reference(task: PolicyTask) -> bool:
    """Return whether a reference policy is needed."""
    return task.beta > 0


def read_objective(task: PolicyTask, config: Config) -> PolicyObjective:
    """Return the numbers of the loss."""
    temperature = config.sampling.temperature
    from_sampler = takes_sampled_logp(task, config)
    return PolicyObjective(
        ratio=task.resolved("ratio"),
        clip=task.resolved("clip"),
        low=task.resolved("epsilon"),
        high=task.resolved("epsilon_high"),
        delta=task.delta,
        sapo=(task.sapo_temperature_pos, task.sapo_temperature_neg),
        vespo=(
            (task.vespo_k_pos, task.vespo_lambda_pos),
            (task.vespo_k_neg, task.vespo_lambda_neg),
        ),
        own_old=not from_sampler and not scores_policy(task, config),
        sampled_old=from_sampler,
        m2_threshold=task.m2_threshold if task.objective == "m2po_clip" else None,
        correction="none" if from_sampler else task.importance_correction,
        correction_max=task.importance_max,
        correction_min=task.importance_min,
        off_policy_threshold=task.off_policy_threshold,
        top_entropy=task.top_entropy_quantile,
        kl=task.kl_estimator if "kl" in rl_coef(task) else None,
        kl_bias_correction=task.kl_bias_correction,
        entropy_bonus=task.entropy_coef > 0,
        temperature=None if temperature == 1.0 else temperature,
    )


def read_builder(
    task: PolicyTask, config: Config, rows: int, images: ImagePacker | None = None
) -> BatchBuilder:
    """Return how a round becomes batches with `rows` rows in a microstep. images: see make_plan."""
    data = config.data
    # units: the number of microsteps follows from what the groups fill.
    shape = StepShape(rows, None, data.sequence_len, tuple(data.length_buckets))
    return BatchBuilder(
        shape,
        task.resolved("average"),
        tuple(rl_coef(task)),
        longest=config.sampling.max_new_tokens,
        share_prompts=task.share_prompts,
        packing=data.packing,
        mask_truncated=task.mask_truncated_completions,
        # A streamed round comes out by minibatches already.
        num_minibatches=1 if config.rollout.streaming else task.num_minibatches,
        dtype=np.float64 if config.model.compute_dtype == "float64" else np.float32,
        routes=find_routes(config),
        images=images,
        recompute_replayed=config.rollout.replay_logp == "recomputed",
    )


def find_routes(config: Config) -> RouteShape | None:
    """Return the shape of the records of expert routing, None if none are kept; raises UserError
    for a model without experts."""
    if not config.rollout.router_replay:
        return None
    architecture = read_architecture(config.model)
    if architecture.experts_per_token is None:
        raise UserError(
            f"rollout.router_replay is for mixtures of experts, and {architecture.architecture} has"
            " none; remove it"
        )
    return route_shape(architecture)


COMPARE_EVERY = 20
"""Versions whose rounds are compared, if that costs a forward pass of its own. By version and not
by time, so that a resumed run compares the rounds that one compares which was never stopped."""


class PolicyPreparation:
    """Preparation of a round by the current weights, before its first update.

    Every process scores, since that takes all devices; what follows from the scores is computed on
    process 0 and broadcast.
    """

    def __init__(
        self,
        task: PolicyTask,
        config: Config,
        data: PromptData,
        judges: Sequence[RewardModelJudge] = (),
    ):
        """data: opened before the first round. judges: models that reward, among the roles."""
        self.task, self.data, self.judges = task, data, judges
        self.judges_late = bool(judges)
        """Whether some rewards are known only after the answers were scored."""
        temperature = config.sampling.temperature
        self.temperature = None if temperature == 1.0 else temperature
        # Log-probs over allowed tokens alone differ by right.
        silent = bool(config.sampling.structured_outputs)
        self.comparison = RoundComparison(
            temperature, (lambda text: None) if silent else (lambda text: data.log(text))
        )
        self.scores_policy = scores_policy(task, config)
        self.from_sampler = takes_sampled_logp(task, config)
        self.exact = reuses_sampled_logp(config)
        """Whether the sampler's log-probs stand for the policy's wherever these are needed."""
        self.updates = task.num_minibatches * task.num_iterations
        self.trained_streams = list_streams(task, config)
        self._compared: set[str] = set()
        """Policies of which a round was compared since the start."""

    def __call__(self, round: Round, scorer: Scorer) -> Round:
        """Return the round as it is trained: streams filled in, one batch for each update.

        Sampler and trainer are compared on the first part of a streamed round: the later ones meet
        other weights. The first round after a start is compared whatever its version, since servers
        may have changed; its numbers are then only used to log what is wrong with them.
        """
        if not round.batches:
            return round
        first = round.part == 0 or round.policy != ""
        due = first and (self.scores_policy or round.version % COMPARE_EVERY == 0)
        compares = due or (first and round.policy not in self._compared)
        if self.exact:
            due = compares = False
            if not self._compared:
                self.data.log(
                    "rollout.exact: old log-probs are the sampler's; no pass computes them again"
                )
        if first:
            self._compared.add(round.policy)
        scored = [self.score(batch, scorer, compares) for batch in round.batches]
        if any(scored) or self.judges_late:
            parts, metrics = broadcast(
                "scores of a round", lambda: self.finish(round.batches, scored, compares, due)
            )
        else:
            parts, metrics = self.finish(round.batches, scored, compares, due)
        # Only what the update reads travels to the devices; scores stay behind.
        slim = [
            batch._replace(weights=weights, streams=streams)
            for batch, (weights, streams) in zip(round.batches, parts, strict=True)
        ]
        batches = slim * self.task.num_iterations
        if self.from_sampler and self.updates > 1:
            # In later updates the policy has moved away from the sampler's by right.
            batches = [mark_update(batch, index == 0) for index, batch in enumerate(batches)]
        return round._replace(batches=batches, metrics=metrics)

    def score(self, batch: Batch, scorer: Scorer, compares: bool) -> dict[str, np.ndarray]:
        """Return the log-probs that a batch needs; on all processes."""
        scores = {}
        if self.scores_policy or compares or np.isnan(batch.streams["sampler_logp"]).any():
            scores["policy_logp"] = scorer.logp(batch, POLICY, self.temperature, drawable=True)
        if scores_reference(self.task):
            scores["ref_logp"] = scorer.logp(batch, REFERENCE, self.temperature, drawable=True)
        return {**scores, **ask_judges(self.judges, batch, scorer)}

    def finish(
        self,
        batches: list[Batch],
        scored: list[dict[str, np.ndarray]],
        compares: bool,
        reports: bool,
    ) -> tuple[list[tuple[dict, dict]], dict[str, float]]:
        """Return ([(weights, streams) of each batch], metrics).

        reports: whether the comparison with the sampler is among the metrics.
        """
        task, metrics = self.task, {}
        old = "sampler_logp" if self.from_sampler else "policy_logp"
        filled = []
        for batch, scores in zip(batches, scored, strict=True):
            streams = {**batch.streams, **scores}
            sampled = streams["sampler_logp"]
            if np.isnan(sampled).any():  # replayed, see BatchBuilder.recompute_replayed
                streams["sampler_logp"] = np.where(
                    np.isnan(sampled), streams["policy_logp"], sampled
                )
            if self.exact:
                streams["policy_logp"] = streams["sampler_logp"]
            streams["old_logp"] = streams.get(old, streams["old_logp"])
            filled.append(batch._replace(streams=streams))
        if compares:
            compared = self.compare(filled, batches)
            metrics |= compared if reports else {}
        in_reward = task.beta > 0 and task.resolved("kl_in") == "reward"
        if self.judges_late or in_reward:
            filled, changed_metrics = self.reward(filled, in_reward)
            metrics |= changed_metrics
        if task.objective == "m2po_mask":
            filled, metrics["m2/masked_share"] = self.mask(filled)
        parts = [
            (
                b.weights,
                {name: b.streams[name] for name in self.trained_streams if name in b.streams},
            )
            for b in filled
        ]
        return parts, metrics

    def compare(self, batches: list[Batch], drawn: list[Batch]) -> dict[str, float]:
        """Compare the sampler's log-probs of the round's trained tokens with the trainer's. drawn:
        the batches before the sampler's were filled in."""
        masks = [
            (batch.weights["pg"] != 0) & ~np.isnan(batch.streams["sampler_logp"]) for batch in drawn
        ]
        if not any(mask.any() for mask in masks):
            return {}
        sampler, trainer = (
            np.concatenate([b.streams[name][m] for b, m in zip(batches, masks, strict=True)])
            for name in ("sampler_logp", "policy_logp")
        )
        rounds = self.data.rounds
        assert rounds is not None, "opened before the first round"
        return self.comparison(sampler, trainer, rounds.metrics.get("lag/max") == 0)

    def reward(self, batches: list[Batch], in_reward: bool) -> tuple[list[Batch], dict[str, float]]:
        """Compute the advantages again with the judges' rewards and, if `in_reward`, with beta
        sum_t (old - reference) subtracted from each episode's clipped reward; returns metrics, too.
        """
        rounds = self.data.rounds
        assert rounds is not None and rounds.table is not None, "process 0 has drawn a round"
        table, metrics = self.judge(rounds.table, batches)
        penalty_N = None
        if in_reward:
            kl_N = np.zeros(len(table.rewards_TNK[0]))
            for batch in batches:
                mask = batch.weights["pg"] != 0
                gap = batch.streams["old_logp"] - batch.streams["ref_logp"]
                np.add.at(kl_N, batch.streams[EPISODE][mask].astype(int), gap[mask])
            penalty_N, metrics["kl"] = self.task.beta * kl_N, float(kl_N.mean())
        advantages_NT = turn_advantages(table, self.data.plan.advantages, penalty_N)
        last = advantages_NT.shape[1] - 1
        changed = []
        for batch in batches:
            episode = np.maximum(batch.streams[EPISODE], 0).astype(int)
            turn = np.clip(batch.streams[TURN], 0, last).astype(int)
            advantages = np.where(batch.weights["pg"] != 0, advantages_NT[episode, turn], 0.0)
            streams = {**batch.streams, "advantage": advantages.astype(np.float32)}
            changed.append(batch._replace(streams=streams))
        return changed, metrics

    def judge(
        self, table: RewardTable, batches: list[Batch]
    ) -> tuple[RewardTable, dict[str, float]]:
        """Return the table with the rewards that are known only now, and the metrics that they
        change."""
        return judge_table(table, self.judges, batches) if self.judges else (table, {})

    def mask(self, batches: list[Batch]) -> tuple[list[Batch], float]:
        """Apply M2PO's hard mask over the tokens of the whole round; returns the share that it
        drops, too."""
        masks = [batch.weights["pg"] != 0 for batch in batches]
        gaps = [
            np.maximum(b.streams["sampler_logp"][m], LOGP_FLOOR)
            - np.maximum(b.streams["policy_logp"][m], LOGP_FLOOR)
            for b, m in zip(batches, masks, strict=True)
        ]
        kept_tokens = m2_mask(np.concatenate(gaps).astype(np.float64), self.task.m2_threshold)
        parts = np.split(kept_tokens, np.cumsum([len(gap) for gap in gaps])[:-1])
        changed = []
        for batch, mask, part in zip(batches, masks, parts, strict=True):
            keep = np.zeros(mask.shape, bool)
            keep[mask] = part
            weights = {name: np.where(keep, w, 0) for name, w in batch.weights.items()}
            changed.append(batch._replace(weights=weights))
        return changed, 1.0 - float(kept_tokens.mean())


def mark_update(batch: Batch, is_first: bool) -> Batch:
    """Return the batch with the stream FIRST_UPDATE."""
    flags = np.full(batch.tokens.shape, is_first, np.float32)
    return batch._replace(streams={**batch.streams, FIRST_UPDATE: flags})


def m2_mask(log_ratio_n: np.ndarray, threshold: float) -> np.ndarray:
    """Return the tokens that M2PO's hard mask keeps, bool [n] (arXiv 2510.01161, AReaL's form).

    The largest squared log-ratios are dropped until the mean of the others is below `threshold`; at
    least one token stays. log_ratio: sampler - policy before the update.
    """
    if not len(log_ratio_n):
        return np.zeros(0, bool)
    squares = log_ratio_n**2
    order = np.argsort(-squares, kind="stable")
    counts = np.arange(len(squares), 0, -1)
    suffix_means = np.cumsum(squares[order][::-1])[::-1] / counts
    good = np.flatnonzero(suffix_means < threshold)
    first = int(good[0]) if len(good) else len(squares) - 1
    kept_tokens = np.zeros(len(squares), bool)
    kept_tokens[order[first:]] = True
    return kept_tokens
