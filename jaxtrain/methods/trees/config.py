"""Section task of tree training."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from jaxtrain.config.base import broken
from jaxtrain.config.data import PACKING_RULES, DataConfig
from jaxtrain.config.limits import ITEMS, TOKENS, WORKERS
from jaxtrain.config.task import TaskSection


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
        yield from broken(PACKING_RULES, config)
        if not self.train_response and not self.train_reasoning:
            yield "task.train_response and task.train_reasoning are both false; nothing would train"
        if self.mode == "grouped" and self.units_per_step is None:
            yield "task.mode grouped needs task.units_per_step: the trees of an optimizer step"
        if self.mode == "grouped" and self.normalize != "token":
            yield (
                f"task.mode grouped weights branches by 1/K; task.normalize {self.normalize} has no"
                " meaning there, set it to token"
            )
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
