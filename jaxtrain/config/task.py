"""Sections task, eval and sampling: the method, and how its result is looked at."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator

from jaxtrain.config.base import Section
from jaxtrain.config.data import DataConfig
from jaxtrain.config.evals import EvalSetConfig
from jaxtrain.config.limits import ITEMS, SEED, TOKENS, WORKERS
from jaxtrain.text_safety import show


class TaskSection(Section):
    """What the sections of all methods have in common; `kind` names the method."""

    reads: ClassVar[frozenset[str]] = frozenset()
    """Sections besides the common ones that the method reads: rollout, env, rewards."""
    trees: ClassVar[bool] = False
    """Whether rows of data become trees."""
    rewards_itself: ClassVar[bool] = False
    """Whether what it reads rewards for is judged without any of them."""

    kind: str
    """The training method."""

    def find_conflicts(self, config: Any) -> Iterator[str]:
        """Yield one sentence for each impossible combination with the rest of the config."""
        return iter(())

    def started_from(self, config: Any) -> str:
        """What the trained weights were at the start, for the model card."""
        pretrained = config.model.init == "pretrained" and config.model.path
        return config.model.path if pretrained else "random weights"


class SFTTask(TaskSection):
    """Supervised fine-tuning: next-token negative log-likelihood of the trained tokens."""

    kind: Literal["sft"] = "sft"
    """The training method."""


class TreeTask(TaskSection):
    """Tree training: each token of a branching trajectory is computed once; or a baseline on the
    same data."""

    trees: ClassVar[bool] = True

    renamed: ClassVar[Mapping[str, str]] = {"normalise": "normalize"}

    kind: Literal["tree"] = "tree"
    """The training method."""
    mode: Literal["tree", "per_branch", "grouped", "current_rl", "flat"] = "tree"
    """tree: packed trees. per_branch: every root-to-leaf path alone. grouped: the paths of a tree
    together, each with weight 1/K, which is the tree's loss at the cost of its branches.
    current_rl: flat samples that a turn extends while nothing hidden lies between. flat: the whole
    transcript with every thought in place."""
    normalize: Literal["token", "tree", "branch"] = "token"
    """What counts alike in a step: token: the tokens of a tree's average branch (weight g/K), tree:
    trees, branch: the tokens of every branch (weight g), which is per-branch training."""
    split: Literal["trajectory", "think"] = "trajectory"
    """trajectory: messages whose reasoning_content becomes side leaves. think: one answer whose
    text holds <think>...</think>: two leaves."""
    rendering: Literal["template", "chatml"] = "template"
    """The tokenizer's own chat template with tools, or a fixed ChatML with Qwen's XML calls."""
    train_response: bool = True
    """Train what stays visible."""
    train_reasoning: bool = True
    """Train the thoughts."""
    max_packed_tokens: int | None = Field(None, ge=8, le=TOKENS)
    """Tokens of a packed row, and so of the largest tree; data.sequence_len then limits only the
    root-to-leaf paths. Unset: data.sequence_len limits both."""
    units_per_step: int | None = Field(None, ge=1, le=ITEMS)
    """Trees (per_branch: branches, current_rl and flat: samples) of an optimizer step; the number
    of microsteps follows. Unset: as many as fill the rows."""
    group_by: str | None = None
    """Column; rows that share its value (trials of one task) become one tree by merging their
    prefixes."""
    selection: Literal["none", "branching_score", "num_turns"] = "none"
    """Order of the rows before max_examples: branching_score = (turns with reasoning + 1) x turns,
    or the column num_turns, largest first."""
    filter_by_token_estimate: bool = False
    """Leave out rows whose own token_usage says more than data.sequence_len tokens, or nothing."""
    max_examples: int | None = Field(None, ge=1)
    """Rows (groups, with group_by) of each dataset that are used, the first of the selection."""
    selection_workers: int = Field(0, ge=0, le=WORKERS)
    """Processes that score the rows."""

    def find_conflicts(self, config: Any) -> Iterator[str]:
        """Yield one sentence for each impossible combination."""
        data: DataConfig = config.data
        if self.max_packed_tokens is not None and self.max_packed_tokens < data.sequence_len:
            yield (
                f"task.max_packed_tokens {self.max_packed_tokens} is below data.sequence_len"
                f" {data.sequence_len}, the longest path of a tree; raise it or leave it out"
            )
        if not self.train_response and not self.train_reasoning:
            yield "task.train_response and task.train_reasoning are both false; nothing would train"
        if self.mode == "grouped" and self.units_per_step is None:
            yield "task.mode grouped needs task.units_per_step: the trees of an optimizer step"
        if self.mode == "grouped" and self.normalize != "token":
            yield (
                f"task.mode grouped weights branches by 1/K; task.normalize {self.normalize} has no"
                " meaning there, set it to token"
            )
        if self.units_per_step is not None and data.global_batch_size is not None:
            yield "task.units_per_step and data.global_batch_size both set a step; keep one"
        if self.split == "think" and (self.selection != "none" or self.rendering != "template"):
            yield (
                "task.split think has one turn and is rendered by the chat template; task.selection"
                " and task.rendering are for trajectories"
            )
        if data.too_long == "truncate":
            yield (
                'data.too_long truncate would cut branches off a tree; set it to "drop" or "error"'
            )
        needs_rows = {
            "task.group_by": self.group_by,
            "task.max_examples": self.max_examples,
            "task.selection": self.selection != "none",
            "task.filter_by_token_estimate": self.filter_by_token_estimate,
        }
        for dataset in data.datasets:
            for key in [key for key, used in needs_rows.items() if used and dataset.streaming]:
                yield f"{key} needs all rows of {dataset.path!r}; set its streaming to false"
            generated = dataset.path.startswith("builtin:caterpillar")
            if generated and (self.selection != "none" or self.group_by):
                yield (
                    f"task.selection and task.group_by read columns, which {dataset.path!r} has not"
                )


class SamplingConfig(Section):
    """How tokens are drawn from the model."""

    max_new_tokens: int = Field(256, ge=1, le=TOKENS)
    """Longest answer."""
    temperature: float = Field(0.0, ge=0, le=1000)
    """0 takes the most probable token."""
    top_k: int = Field(0, ge=0, le=ITEMS)
    """Only the k most probable tokens; 0: all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Only the most probable tokens that together reach this probability."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Only tokens with at least this share of the most probable one's probability."""
    stop: list[str] = []
    """Texts that end an answer, besides the end-of-turn token."""
    seed: int = Field(0, ge=0, le=SEED)
    """Seed of the draws."""


class EvalConfig(Section):
    """Held-out loss and generated answers during training."""

    every: Annotated[int, Field(ge=1)] | Literal["never"] | None = None
    """Steps between evaluations; unset: only at the end; never: not even there."""
    per_epoch: float | None = Field(None, gt=0, le=1e6)
    """Also evaluate so many times in each of run.num_epochs, evenly; 0.5: every second epoch."""
    at_start: bool = False
    """Also evaluate before the first step."""
    patience: int | None = Field(None, ge=1)
    """End the run after so many evaluations in a row in which checkpoint.best_metric was not better
    than its best value before; unset: train to the end."""
    min_delta: float = Field(0.0, ge=0)
    """patience: by how much it must be better to count."""
    max_batches: int | None = Field(None, ge=1)
    """Evaluate at most this many batches of each held-out dataset."""
    sets: list[EvalSetConfig] = []
    """Sets of problems that the model answers k times each, through an environment, judged by the
    rewards: avg@k, pass@k. With rollout.engine vllm its servers answer, else the process itself.
    Every answer goes to samples.jsonl."""
    show: int = Field(3, ge=0, le=1000)
    """How many of the best and how many of the worst answers to each set to print."""

    @field_validator("every", mode="wrap")
    @classmethod
    def check_every(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        """One sentence for both of what it may be."""
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(
                f'must be a whole number of steps, at least 1, or "never"; found {show(value)}'
            ) from None
