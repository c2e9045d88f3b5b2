"""Sections task of EBFT: drawn answers or blocks of text, rewarded by their features."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from jaxtrain.config.base import Place, Section, unread
from jaxtrain.config.limits import PASS_TOKENS, ROWS, TOKENS
from jaxtrain.config.task import TaskSection
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
        indices = []
        for layer in self.layers:
            number = layer if isinstance(layer, int) else max(int(layer * num_layers), 1)
            if not 1 <= number <= num_layers:
                raise ValueError(
                    f"task.features.layers has {layer}, but the feature network has {num_layers}"
                    " layers; name them by whole numbers from 1, or by fractions up to 1.0"
                )
            indices.append(number - 1)
        return tuple(dict.fromkeys(indices))

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
        keys = "task.gt_length_multiplier task.adaptive_min_tokens"
        yield from unread(keys, "task.adaptive_max_tokens", bool)(config)


class EBFTStridedTask(TaskSection):
    """EBFT inside of documents: blocks drawn at many places of a text at once, each rewarded for
    looking like what the text has there to a frozen network."""

    kind: Literal["ebft_strided"] = "ebft_strided"
    """The training method."""
    stride: int = Field(8, ge=1, le=TOKENS)
    """Tokens from the beginning of a block to that of the next."""
    context_length: int = Field(8, ge=1, le=TOKENS)
    """Tokens of a text before its first block. A block sees all that stands before it."""
    generate_max_len: int = Field(8, ge=1, le=4096)
    """Tokens of a block, which are drawn."""
    n_samples: int = Field(4, ge=1, le=ROWS)
    """Draws of each block; they are compared with each other."""
    min_completion_prefix: int = Field(0, ge=0, le=TOKENS)
    """Texts with a prompt: tokens of the answer before the first block."""
    blocks: Literal["text", "trained"] = "text"
    """Texts with a prompt: where blocks may stand. text: anywhere behind the prompt, in later user
    turns, too. trained: where all tokens that a block stands for are trained."""
    temperature: float = Field(0.6, ge=0, le=1000)
    """Of the draws; 0 takes the most probable token."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draw only from the most probable tokens that together reach this probability."""
    tempered_logp: bool = False
    """Whether gradients are those of the log-probs at `temperature`, as the draws were made; else
    at 1, which favors what the model is sure of. Neither knows of top_p."""
    advantage: Literal["rloo", "group_norm", "reinforce"] = "rloo"
    """From rewards to advantages, over the draws of a block. rloo: minus the mean of the others;
    group_norm: minus the mean, over the deviation; reinforce: as they are."""
    rl_coef: float = Field(1.0, ge=0)
    """Factor of the policy gradient."""
    ce_coef: float = Field(0.0, ge=0)
    """Factor of the likelihood of the texts' trained tokens."""
    mask_thinking: bool = False
    """Leave what stands between <think> and </think>, as the tokenizer writes these alone, out of
    that likelihood."""
    features: FeatureConfig = FeatureConfig()
    """The frozen network that blocks are compared by."""

    def find_conflicts(self, config: Any) -> Iterator[str]:
        """Yield one sentence for each impossible combination."""
        yield from self.features.find_conflicts(config.adapter)
        length = config.data.sequence_len
        least = self.context_length + self.generate_max_len
        if least > length:
            yield (
                f"task.context_length {self.context_length} + task.generate_max_len"
                f" {self.generate_max_len} is more than data.sequence_len {length}: no block has"
                " room; lower the first, or raise the last"
            )
        if not self.rl_coef and not self.ce_coef:
            yield "task.rl_coef and task.ce_coef are both 0: nothing would train"
        if self.tempered_logp and not self.temperature:
            yield "task.tempered_logp has no meaning with task.temperature 0; remove it"
        if self.n_samples == 1 and self.advantage != "reinforce":
            yield (
                f'task.advantage "{self.advantage}" compares the draws of a block, and'
                ' task.n_samples is 1; set it to "reinforce", or draw more'
            )
        if self.n_samples == 1 and self.features.diversity_coef:
            yield (
                "task.features.diversity_coef compares the draws of a block, and task.n_samples is"
                " 1; set it to 0, or draw more"
            )
        drawn = (length // self.stride + 1) * self.n_samples * self.generate_max_len
        grown = config.data.micro_batch_size * (length + drawn)
        if grown > PASS_TOKENS:
            yield (
                f"data.micro_batch_size {config.data.micro_batch_size} rows of {length} tokens and"
                f" {drawn:,} drawn ones are {grown:,} tokens of one forward pass, more than"
                f" {PASS_TOKENS:,}; raise task.stride, or lower task.n_samples or the rows"
            )
