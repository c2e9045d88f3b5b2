"""Section task for reinforcement learning: the objective, as a named preset and its knobs."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from jaxtrain.config.adapter import find_adapter_off_conflicts
from jaxtrain.config.base import at_most
from jaxtrain.config.limits import ROWS
from jaxtrain.config.rollout import find_drawing_conflicts
from jaxtrain.config.task import TaskSection

Ratio = Literal["token", "sequence", "sequence_token", "sequence_sum"]
"""Importance ratio of a token: its own, or that of its sequence."""
KLEstimator = Literal["k1", "k2", "k3"]
"""Estimators of the KL divergence, in the terms of Schulman's note."""
TRUNCATE_OR_MASK = Literal[
    "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
]

GRPO = {
    "ratio": "token",
    "clip": "ppo",
    "epsilon": 0.2,
    "epsilon_high": 0.2,
    "average": "sequence",
    "baseline": "group",
    "scale_rewards": "group",
    "combine_rewards": "sum_then_normalize",
    "normalize_advantages": False,
    "old_logp": "recomputed",
    "kl_in": "loss",
}

OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": GRPO,
    "dr_grpo": {**GRPO, "average": "constant", "scale_rewards": "none"},
    "bnpo": {**GRPO, "average": "microstep"},
    "dapo": {**GRPO, "average": "token", "epsilon_high": 0.28},
    "gdpo": {**GRPO, "average": "token", "combine_rewards": "normalize_then_sum"},
    "gspo": {**GRPO, "ratio": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "cispo": {**GRPO, "clip": "cispo", "average": "token", "epsilon_high": 5.0},
    "rloo": {
        **GRPO,
        "ratio": "sequence_sum",
        "baseline": "leave_one_out",
        "scale_rewards": "none",
        "kl_in": "reward",
    },
    "reinforce": {
        **GRPO,
        "clip": "reinforce",
        "average": "token",
        "baseline": "none",
        "scale_rewards": "none",
    },
    "reinforce_baseline": {
        **GRPO,
        "clip": "reinforce",
        "average": "token",
        "scale_rewards": "none",
        "normalize_advantages": True,
    },
    "m2po_mask": {**GRPO, "clip": "none", "average": "token", "old_logp": "sampler"},
    "m2po_clip": {**GRPO, "average": "token", "old_logp": "sampler"},
    "sapo": {**GRPO, "clip": "sapo"},
    "luspo": {
        **GRPO,
        "ratio": "sequence",
        "epsilon": 2e-3,
        "epsilon_high": 2.5e-3,
        "average": "sum",
    },
    "vespo": {**GRPO, "clip": "vespo", "average": "token"},
    "gmpo": {**GRPO, "clip": "gmpo", "epsilon": 0.4, "epsilon_high": 0.4},
}
"""Keys that each objective sets; a key in the config replaces the objective's."""


class PolicyTask(TaskSection):
    """Keys that methods share which train a policy on groups of answers to one prompt."""

    renamed: ClassVar[Mapping[str, str]] = {
        "normalise_advantages": "normalize_advantages",
        "sum_then_normalise": "sum_then_normalize",
        "normalise_then_sum": "normalize_then_sum",
    }

    reads: ClassVar[frozenset[str]] = frozenset({"rollout", "env", "rewards"})

    objective: Literal[
        "grpo",
        "dr_grpo",
        "bnpo",
        "dapo",
        "gdpo",
        "gspo",
        "cispo",
        "rloo",
        "reinforce",
        "reinforce_baseline",
        "m2po_mask",
        "m2po_clip",
        "sapo",
        "luspo",
        "vespo",
        "gmpo",
    ] = "grpo"
    """A published objective. It sets the keys from ratio to kl_in, where they are left unset:
    docs/rl.md has the table."""
    ratio: Ratio | None = None
    """Unit that is compared with the old policy: each token; the sequence, by its mean log-ratio
    (GSPO); the same, with the gradient of each token alone (GSPO-token); the sequence, by its sum
    (RLOO)."""
    clip: Literal["ppo", "cispo", "reinforce", "none", "sapo", "vespo", "gmpo"] | None = None
    """ppo: the smaller of ratio and clipped ratio. cispo: log-probs weighed by the capped ratio.
    reinforce: no ratio at all. none: the bare ratio. sapo: a soft gate. vespo: log-probs weighed by
    the sequence's ratio. gmpo: the geometric mean of token ratios, each clipped."""
    epsilon: float | None = Field(None, ge=0)
    """Ratios below 1 - epsilon are clipped; with clip gmpo log-ratios below -epsilon."""
    epsilon_high: float | None = Field(None, ge=0)
    """Ratios above 1 + epsilon_high are clipped; with clip cispo the cap of the ratio itself, with
    gmpo the largest log-ratio."""
    average: Literal["sequence", "token", "sum", "microstep", "constant"] | None = None
    """Unit of the loss's mean: sequences, each a mean of its tokens; all tokens of the step;
    sequences, each the sum of its tokens (LUSPO); microsteps, each a mean of its tokens (BNPO);
    sequences x sampling.max_new_tokens (Dr.GRPO)."""
    baseline: Literal["group", "leave_one_out", "batch", "none"] | None = None
    """Value subtracted from a reward: its group's mean, the mean of the others in its group, the
    batch's mean, or none."""
    scale_rewards: Literal["group", "batch", "mean", "none"] | None = None
    """Standard deviation that advantages are divided by; mean: the mean reward of their group, and
    all are 0 where it is not above 0 (MaxRL)."""
    reward_clip_range: tuple[float, float] | None = None
    """Bounds of an answer's weighted reward before it is compared, such as [-1, 1]; a KL penalty
    in the reward is added afterwards. Metrics show rewards without bounds."""
    normalize_advantages: bool | None = None
    """Bring the advantages of a round to mean 0 and deviation 1 as the last step
    (REINFORCE++-baseline, and RLOO's whitening)."""
    combine_rewards: Literal["sum_then_normalize", "normalize_then_sum"] | None = None
    """Several rewards: add them up, or normalize each in its group first (GDPO)."""
    old_logp: Literal["recomputed", "sampler"] | None = None
    """Denominator of the ratio: the trainer's log-probs before the round's first update, or those
    that the sampler reported."""
    kl_in: Literal["loss", "reward"] | None = None
    """Place of beta's penalty: a term of the loss, or a part of the reward."""
    delta: float | None = Field(None, gt=1)
    """Upper bound of the ratio for negative advantages, too (dual clip)."""
    sapo_temperature_pos: float = Field(1.0, gt=0)
    """clip sapo: steepness of the gate for positive advantages."""
    sapo_temperature_neg: float = Field(1.05, gt=0)
    """clip sapo: steepness of the gate for all other advantages."""
    vespo_k_pos: float = Field(2.0, gt=0)
    """clip vespo: power of the ratio for advantages from 0 on."""
    vespo_lambda_pos: float = Field(3.0, gt=0)
    """clip vespo: rate at which larger ratios lose weight again."""
    vespo_k_neg: float = Field(3.0, gt=0)
    """clip vespo: the power for negative advantages."""
    vespo_lambda_neg: float = Field(2.0, gt=0)
    """clip vespo: the decay for negative advantages."""
    m2_threshold: float = Field(0.04, gt=0)
    """m2po_mask, m2po_clip: largest mean square of the log-ratios that are left."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL divergence from the reference policy."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of that divergence from one token (Schulman's names)."""
    kl_bias_correction: bool = False
    """Multiply the KL term by the policy's ratio, which makes its gradient unbiased."""
    reference: Literal["auto", "adapter_off", "frozen", "mixed"] = "auto"
    """adapter_off: the model without its adapter. frozen: a copy of the starting weights. mixed: a
    copy that follows the policy. auto: adapter_off with an adapter, else frozen."""
    reference_every: int = Field(512, ge=1)
    """mixed: steps between two mixings."""
    reference_alpha: float = Field(0.6, ge=0, le=1)
    """mixed: share of the policy in a mixing."""
    importance_correction: TRUNCATE_OR_MASK = "token_truncate"
    """Weigh the loss by trainer / sampler probability, of each token or of the whole sequence:
    truncate caps the weight, mask drops what is outside the bounds."""
    importance_max: float = Field(3.0, gt=0)
    """Upper bound of that weight."""
    importance_min: float | None = Field(None, ge=0)
    """Lower bound of that weight."""
    off_policy_threshold: float | None = Field(None, gt=0)
    """Leave out sequences with a negative advantage whose mean sampler - policy log-prob is above
    this (DeepSeek-V3.2); 0.5 is usual."""
    mask_truncated_completions: bool = False
    """Do not train answers that hit sampling.max_new_tokens; their rewards still count for the
    group."""
    top_entropy_quantile: float = Field(1.0, gt=0, le=1)
    """Train only this share of the tokens of a microstep: those with the largest entropy."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of an entropy bonus."""
    num_minibatches: int = Field(1, ge=1, le=ROWS)
    """Optimizer steps that the answers of a round are split into."""
    num_iterations: int = Field(1, ge=1, le=ROWS)
    """Passes over the answers of a round."""
    share_prompts: bool = True
    """Compute the prompt of a group once, its answers as branches of a tree; false: flat rows."""

    def resolved(self, name: str) -> Any:
        """A key's value, the objective's own where the config leaves it unset."""
        setting = getattr(self, name)
        return OBJECTIVES[self.objective][name] if setting is None else setting


class RLTask(PolicyTask):
    """Reinforcement learning on groups of answers to one prompt: GRPO and its family."""

    kind: Literal["rl"] = "rl"
    """The training method."""

    @override
    def find_conflicts(self, config: Any) -> Iterator[str]:
        yield from find_policy_conflicts(config)
        if config.data.eval_datasets:
            yield (
                "data.eval_datasets (or data.validation_split) have a held-out loss, which"
                " task.kind rl has not; use"
                " [[eval.sets]] instead"
            )


def find_policy_conflicts(config: Any) -> Iterator[str]:
    """Yield one sentence for each impossible combination around a policy's objective."""
    task, rollout, sampling = config.task, config.rollout, config.sampling
    for key, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        if getattr(sampling, key) != off:
            yield (
                f"sampling.{key} cuts the distribution that answers are drawn from, so their"
                f" log-probs are not the policy's; remove it for task.kind {task.kind}"
            )
    yield from find_drawing_conflicts(config)
    if rollout.group_size == 1 and task.resolved("baseline") in ("group", "leave_one_out"):
        yield (
            f"task.baseline {task.resolved('baseline')} compares answers to the same prompt; set"
            " rollout.group_size to 2 or more"
        )
    yield from at_most("task.importance_min", "task.importance_max")(config)
    if task.reward_clip_range is not None:
        low, high = task.reward_clip_range
        if not low < high:
            yield f"task.reward_clip_range [{low}, {high}] is empty; give the lower bound first"
        if task.resolved("combine_rewards") == "normalize_then_sum":
            yield (
                "task.reward_clip_range bounds a sum of rewards, which combine_rewards"
                ' normalize_then_sum does not form; remove it or set "sum_then_normalize"'
            )
    if (
        task.resolved("normalize_advantages")
        and task.resolved("combine_rewards") == "normalize_then_sum"
    ):
        yield "task.normalize_advantages is what combine_rewards normalize_then_sum does; remove it"
    if rollout.prompts_per_step % task.num_minibatches:
        yield (
            f"rollout.prompts_per_step {rollout.prompts_per_step} does not divide into"
            f" task.num_minibatches {task.num_minibatches}"
        )
    yield from find_adapter_off_conflicts(task.reference, config.adapter)
    if task.off_policy_threshold and task.objective == "m2po_mask":
        yield "task.off_policy_threshold and objective m2po_mask both mask; keep one"
    if rollout.streaming:
        yield from find_streaming_conflicts(task, rollout)


def find_streaming_conflicts(task: PolicyTask, rollout: Any) -> Iterator[str]:
    """Yield one sentence for whatever must see a whole round before its first update."""
    reason = "needs the whole round, of which rollout.streaming has a part"
    if task.num_minibatches == 1:
        yield (
            "rollout.streaming trains the minibatches of a round one after the other, and"
            " task.num_minibatches is 1; set it to 2 or more, or rollout.streaming to false"
        )
    if task.num_iterations > 1:
        yield (
            f"task.num_iterations {task.num_iterations} passes over the whole round, which"
            " rollout.streaming trains as it comes; set one of them to 1 or false"
        )
    for key in ("baseline", "scale_rewards"):
        if (
            task.resolved(key) == "batch"
            and task.resolved("combine_rewards") == "sum_then_normalize"
        ):
            yield (
                f'task.{key} "batch" {reason}; set task.{key} to "group" or "none", or streaming to'
                " false"
            )
    if task.resolved("combine_rewards") == "normalize_then_sum":
        yield (
            f'task.combine_rewards "normalize_then_sum" {reason}; set it to'
            ' "sum_then_normalize", or'
            " streaming to false"
        )
    if task.resolved("normalize_advantages"):
        yield f"task.normalize_advantages {reason}; set one of them to false"
    if task.objective == "m2po_mask":
        yield f'objective m2po_mask {reason}; take "m2po_clip", or set streaming to false'
    if rollout.engine == "vllm" and rollout.vllm.sleep:
        yield (
            "rollout.vllm.sleep stops the servers while training, but with rollout.streaming they"
            " sample then; set one of them to false"
        )
