"""Section task of EBFT, structured: whole answers to prompts, rewarded by their features."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from jaxtrain.config.base import Place, Section
from jaxtrain.config.limits import TOKENS
from jaxtrain.methods.rl.config import PolicyTask, find_policy_conflicts

PLAYED = ("single_turn", "dialogue")
"""Environments whose prompts are the data's, so that a ground truth stands behind them."""


class FeatureConfig(Section):
    """The frozen network whose hidden states answers and ground truth are compared by."""

    network: Place = "auto"
    """bare: the trained model without its adapter. start: a frozen copy of the starting weights, in
    bfloat16. auto: bare with an adapter, else start. Anything else: another model's folder or Hub
    id, which reads the same tokens."""
    layers: list[int | float] = [0.25, 0.5, 0.75]
    """Whose outputs make a feature, one behind the other: whole numbers count layers from 1,
    fractions up to 1.0 are of the network's depth, rounded down."""
    pooling: Literal["last_token", "mean_pooling", "completion_mean", "concat"] = "last_token"
    """From the states of a sequence to one: the last token's, the mean over all tokens, the mean
    over the answer's, or those at 1/4, 2/4 and 3/4 of the length behind one another."""
    whitening: bool = False
    """Whiten each prompt's answers and its ground truth by these answers, instead of bringing all
    to norm 1. Only answers that repeat each other then have a diversity at all."""
    alignment_coef: float = Field(1.0, ge=0)
    """Factor of the likeness to the ground truth in the reward."""
    diversity_coef: float = Field(1.0, ge=0)
    """Factor of the likeness of the answers to each other, which is taken off."""

    def find_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers of a network of `num_layers`, counted from 0 and each once; ValueError for one
        that it has not."""
        found = []
        for layer in self.layers:
            number = layer if isinstance(layer, int) else max(int(layer * num_layers), 1)
            if not 1 <= number <= num_layers:
                raise ValueError(
                    f"task.features.layers has {layer}, but the feature network has {num_layers}"
                    " layers; name them by whole numbers from 1, or by fractions up to 1.0"
                )
            found.append(number - 1)
        return tuple(dict.fromkeys(found))

    def find_conflicts(self, adapter: Any) -> Iterator[str]:
        """Yield one sentence for each impossible combination with section adapter."""
        key = "task.features"
        if not self.layers:
            yield f"{key}.layers is empty; name at least one, such as 0.5"
        for layer in self.layers:
            if layer <= 0 or (isinstance(layer, float) and layer > 1):
                yield (
                    f"{key}.layers has {layer}; write whole numbers from 1, or fractions above 0"
                    " and up to 1.0"
                )
        if not self.alignment_coef and not self.diversity_coef:
            yield f"{key}.alignment_coef and diversity_coef are both 0: nothing is rewarded"
        if self.network == "bare" and adapter.kind == "none":
            yield (
                f'{key}.network "bare" is the model without its adapter; set adapter.kind, or'
                ' network to "start"'
            )
        if self.network == "bare" and (adapter.train_embeddings or adapter.train_head):
            yield (
                f'{key}.network "bare" is not frozen where adapter.train_embeddings or train_head'
                ' trains a table in full; set it to "start"'
            )


class EBFTTask(PolicyTask):
    """Energy-based fine-tuning on prompts with a ground truth: drawn answers are rewarded for
    having its features, and unlike each other; the objective is any of reinforcement learning."""

    rewards_itself: ClassVar[bool] = True

    kind: Literal["ebft"] = "ebft"
    """The training method."""
    features: FeatureConfig = FeatureConfig()
    """What answers are compared by."""
    ce_coef: float = Field(0.0, ge=0)
    """Factor of the usual negative log-likelihood of the ground truth, a mean over its tokens, at
    temperature 1."""
    turns: Literal["first", "last", "all"] = "first"
    """Of conversations: which of the assistant's turns are ground truths. first: env.kind
    "dialogue" then plays those that remain, too. all: each is an example with its history, which
    reads all rows at the start."""
    thinking: Literal["keep", "split", "answer_only"] = "keep"
    """Thoughts of ground truths: as they stand there; those between tags (<think>, <reasoning>,
    <|begin_of_thought|>) as reasoning_content, which the chat template writes; or left out."""
    adaptive_max_tokens: bool = True
    """Let the answers to a prompt have gt_length_multiplier times the tokens of its ground truth,
    within sampling.max_new_tokens, instead of sampling.max_new_tokens."""
    gt_length_multiplier: float = Field(1.5, ge=0.1, le=1000)
    """See adaptive_max_tokens."""
    adaptive_min_tokens: int = Field(64, ge=1, le=TOKENS)
    """adaptive_max_tokens: what answers may have however short the ground truth is."""

    def find_conflicts(self, config: Any) -> Iterator[str]:
        """Yield one sentence for each impossible combination."""
        yield from find_policy_conflicts(config)
        yield from self.features.find_conflicts(config.adapter)
        if config.env.kind not in PLAYED:
            yield (
                f"env.kind {config.env.kind!r} makes prompts of its own, behind which no ground"
                f" truth of the data stands; set it to one of {', '.join(PLAYED)}"
            )
        if config.env.kind == "dialogue" and self.turns != "first":
            yield (
                f'task.turns "{self.turns}" leaves no turns for env.kind "dialogue" to go on with;'
                ' set it to "first", or env.kind to "single_turn"'
            )
        for index, dataset in enumerate(config.data.datasets):
            if dataset.env is not None:
                yield f"data.datasets.{index}.env has no effect with task.kind ebft; remove it"
        if config.rollout.replay_size:
            yield (
                "rollout.replay_size keeps answers by rewards that are known when they are drawn;"
                " set it to 0 with task.kind ebft"
            )
        if config.rollout.zero_advantage == "refill":
            yield (
                'rollout.zero_advantage "refill" needs rewards that are known when answers are'
                " drawn; remove it with task.kind ebft"
            )
        given = self.model_dump(exclude_defaults=True)
        for key in ("gt_length_multiplier", "adaptive_min_tokens"):
            if key in given and not self.adaptive_max_tokens:
                yield f"task.{key} has no effect while task.adaptive_max_tokens is false; remove it"
