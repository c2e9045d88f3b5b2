"""Section task of EBFT inside of documents: blocks drawn at many places, rewarded by features."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from jaxtrain.config.limits import PASS_TOKENS, ROWS, TOKENS
from jaxtrain.config.task import TaskSection
from jaxtrain.methods.ebft.config import FeatureConfig


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
