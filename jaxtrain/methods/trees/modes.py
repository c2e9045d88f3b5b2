"""Training units of rows by mode: the tree, or one of the baselines on the same data.

| mode       | unit of a row                                          | a shared token is computed |
|------------|--------------------------------------------------------|----------------------------|
| tree       | one tree                                               | once                       |
| per_branch | each root-to-leaf path alone, weight 1                 | g times                    |
| grouped    | all paths of one tree together, each with weight 1/K   | g times, loss of the tree  |
| current_rl | flat samples by prompt-prefix extension                | once a turn with a thought |
| flat       | the transcript with every thought in place             | once                       |
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from jaxtrain.data.chat.control_tokens import SpecialTokens
from jaxtrain.data.chat.messages import MalformedRow
from jaxtrain.data.chat.rows import Row
from jaxtrain.data.chat.template import (
    Renderer,
    RetokenizationError,
    TemplateFailed,
    TemplateOmission,
)
from jaxtrain.data.packing.branches import list_branches
from jaxtrain.data.packing.prefixes import FlatSequence, merge_prefixes
from jaxtrain.data.packing.tree import Tree, TreeGroup, chain
from jaxtrain.data.sample import Dropped, RowNote, note_unread
from jaxtrain.errors import UserError
from jaxtrain.methods.trees.rendering import (
    read_row,
    render_chatml,
    render_template,
    split_thinking,
)
from jaxtrain.methods.trees.turns import (
    AssistantTurn,
    TrainedParts,
    build_caterpillar,
    build_current_rl,
    build_flat,
    make_turns,
)

Mode = Literal["tree", "per_branch", "grouped", "current_rl", "flat"]
Split = Literal["trajectory", "think", "turns"]


@dataclass(frozen=True)
class LengthLimits:
    """Limits of tree sizes."""

    path_tokens: int
    """Longest root-to-leaf path or flat sample."""
    packed_tokens: int
    """Largest packed tree; at least path_tokens."""

    def allow(self, tree: Tree) -> bool:
        """Return True if a tree fits both limits."""
        longest = max(tree.branch_lengths())
        return tree.num_tokens <= self.packed_tokens and longest <= self.path_tokens


def build_units(
    group: Sequence[Sequence[AssistantTurn]],
    mode: Mode,
    trained: TrainedParts,
    limits: LengthLimits,
    origin: str = "",
) -> list[Tree | TreeGroup | RowNote]:
    """Build the units of trajectories that begin alike: one tree of all their branches."""
    if mode in ("current_rl", "flat"):
        samples = []
        for turns in group:
            if mode == "flat":
                samples.append(build_flat(turns, trained, origin))
            else:
                samples += build_current_rl(turns, trained, origin)
        if any(sample.num_tokens > limits.path_tokens for sample in samples):
            return [Dropped("too long", origin)]
        return samples
    try:
        trees = [build_caterpillar(turns, trained, origin) for turns in group]
    except ValueError as error:
        return [Dropped(f"no tree: {error}", origin)]
    if len(trees) > 1:
        trees = merge_trees(trees, origin)
    units: list[Tree | TreeGroup | RowNote] = []
    for tree in trees:
        units += _units_of_tree(tree, mode, limits, origin)
    return units


def merge_trees(trees: Iterable[Tree], origin: str = "") -> list[Tree]:
    """Merge the branches of trees into one tree, or several if they do not begin alike."""
    branches = [
        FlatSequence(branch.tokens, branch.weights)
        for tree in trees
        for branch in list_branches(tree)
    ]
    return merge_prefixes(branches, origin=origin)


def _units_of_tree(
    tree: Tree, mode: Mode, limits: LengthLimits, origin: str
) -> list[Tree | TreeGroup | RowNote]:
    if mode == "tree":
        return [tree if limits.allow(tree) else Dropped("too long", origin)]
    fits = [length <= limits.path_tokens for length in tree.branch_lengths()]
    if mode == "per_branch":
        return [
            chain(branch.tokens, branch.weights, origin=origin)
            if fit
            else Dropped("too long", origin)
            for branch, fit in zip(list_branches(tree), fits, strict=True)
        ]
    assert mode == "grouped", mode
    if not all(fits):
        return [Dropped("too long", origin)]
    k = tree.num_branches
    return [
        TreeGroup(
            tuple(
                chain(b.tokens, {name: w / k for name, w in b.weights.items()}, origin=origin)
                for b in list_branches(tree)
            )
        )
    ]


@dataclass(frozen=True)
class TreeBuilder:
    """Callable (row, origin) -> units and drops of tree training. Picklable."""

    tokenizer: Any
    split: Split
    """trajectory: messages with reasoning_content; think: an answer with <think>...</think>;
    turns: token ids of the synthetic generator."""
    mode: Mode
    rendering: Literal["template", "chatml"]
    trained: TrainedParts
    limits: LengthLimits
    reading: Mapping[str, Any]
    """How columns and messages are read: DatasetConfig.reading."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Schemas for rows without tools."""
    too_long: Literal["drop", "error"] = "drop"
    special_tokens: SpecialTokens = "text"
    """Meaning of control tokens that a text spells."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Variables of the chat template, which those of a row replace."""
    grouping: frozenset[str] = frozenset()
    """Columns by which rows were selected and grouped, so that they count as read."""

    def __call__(self, row: dict[str, Any], origin: str) -> list[Tree | TreeGroup | RowNote]:
        members = row["group"] if set(row) == {"group"} else [row]
        try:
            rows = [Row(member, **self.reading) for member in members]
            for member in rows:
                member.tokenizer = self.tokenizer
            group = [self.read_turns(member) for member in rows]
        except TemplateOmission as error:
            return [Dropped(str(error), origin)]
        except (MalformedRow, TemplateFailed) as error:
            where = getattr(error, "location", "")
            where = f"{origin}, {where}" if where else origin
            return [Dropped(f"malformed row: {error}", where)]
        except RetokenizationError:
            return [Dropped("turn is tokenized differently in context", origin)]
        units = build_units(group, self.mode, self.trained, self.limits, origin)
        for member in rows:
            names = [name for name in member.unread if name not in self.grouping]
            units += note_unread(names, origin)
        if self.too_long == "error" and any(
            isinstance(unit, Dropped) and unit.reason == "too long" for unit in units
        ):
            raise UserError(
                f"{origin}: a path is longer than data.sequence_len {self.limits.path_tokens}, or"
                f" the tree larger than {self.limits.packed_tokens}; raise data.sequence_len or"
                ' task.max_packed_tokens, or set data.too_long to "drop"'
            )
        return units

    def read_turns(self, row: Row) -> list[AssistantTurn]:
        """Read the turns of a row; raises MalformedRow, TemplateFailed or RetokenizationError."""
        if self.split == "turns":
            return make_turns(row.require("turns"))
        if self.split == "think" and isinstance(answers := row.columns.get("completion"), list):
            row.columns["completion"] = answers[:1]
        conversation = read_row(row)
        messages, tools = conversation.messages, conversation.tools or self.tools
        if self.split == "think":
            keywords = {**self._renderer.kwargs, **(conversation.chat_template_kwargs or {})}
            return split_thinking(messages, tools, self.tokenizer, self.special_tokens, keywords)
        if self.rendering == "chatml":
            return render_chatml(messages, self.tokenizer, self.special_tokens)
        keywords = conversation.chat_template_kwargs
        return render_template(messages, tools, self._renderer, keywords)

    @cached_property
    def _renderer(self) -> Renderer:
        return Renderer(self.tokenizer, self.special_tokens, self.chat_template_kwargs)
