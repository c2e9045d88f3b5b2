"""Answers in steps with labels, right or wrong: the data of process reward models.

    row      {"prompt": "2+2+3?", "completions": ["2+2=4", "4+3=8"], "labels": [true, false]}
    tokens   2 + 2 + 3 ? 2 + 2 = 4 \\n 4 + 3 = 8 \\n
    label                          1               0     on the last token of each separator

The columns are those of TRL and Axolotl. A prompt of messages is rendered by the chat template.
"""

from typing import Any

import numpy as np
from rich.console import Console
from typing_extensions import override

from jaxtrain.config.data import DataConfig, DatasetConfig
from jaxtrain.data.chat import template
from jaxtrain.data.chat.control_tokens import encoder_of
from jaxtrain.data.chat.messages import MalformedRow, check_values, read_flag
from jaxtrain.data.chat.prompt import prompt_tokens, read_prompt
from jaxtrain.data.chat.rows import Row
from jaxtrain.data.chat.tokenize import open_images, open_row_images
from jaxtrain.data.packing.pack import Fields, ImagePacker, Normalize
from jaxtrain.data.packing.tree import Node, PlacedImages, Tree, join_images
from jaxtrain.data.pipeline import Recipe
from jaxtrain.data.preview import Probe, probe_trees, show_tree, show_trees
from jaxtrain.data.sample import Dropped, RowNote, note_unread
from jaxtrain.data.sources.dataset import open_rows
from jaxtrain.data.sources.readers import MixturePart
from jaxtrain.errors import UserError

STEP, LABEL = "step", "label"
"""Component of weights: 1 on a labeled token; stream: its class, 0 wrong and 1 right."""
COLUMNS = ("prompt", "completions", "labels")
MAX_STEPS = 10_000


class Stepwise(Recipe):
    """`pipeline.Recipe` of rows with labeled steps."""

    normalize: Normalize = "branch"
    held_out_normalize: Normalize = "branch"
    units: int | None = None

    def __init__(
        self,
        data: DataConfig,
        tokenizer: Any,
        *,
        separator: str,
        last_only: bool = False,
        max_completion: int | None = None,
        dtype: Any = np.float32,
        images: ImagePacker | None = None,
    ):
        """separator: text after each step. last_only: in training data only the last label of an
        answer counts. max_completion: limit of tokens of all steps. dtype: dtype of the weights.
        images: what makes patches of the images of prompts; None: text alone."""
        self.data, self.tokenizer = data, tokenizer
        self.separator, self.last_only, self.max_completion = separator, last_only, max_completion
        self.row_tokens = data.sequence_len
        self.fields = Fields((STEP,), {LABEL: np.int32}, dtype=dtype, images=images)

    @override
    def open(self, dataset: DatasetConfig) -> MixturePart:
        return self._open(dataset, self.last_only)

    def open_held_out(self, dataset: DatasetConfig) -> MixturePart:
        """Open a held-out dataset, in which every label counts."""
        return self._open(dataset, False)

    def _open(self, dataset: DatasetConfig, last_only: bool) -> MixturePart:
        read = StepwiseReader(
            dataset, self.tokenizer, self.data, self.separator, last_only, self.max_completion
        )
        return MixturePart(dataset.shown_path, open_rows(dataset), read, dataset.weight)

    @override
    def settings(self, dataset: DatasetConfig) -> str | None:
        if type(self) is not Stepwise or self.fields.images is not None:
            return None
        keys = dataset.model_dump_json(
            include={"fields", "roles", "special_tokens", "chat_template_kwargs"}
        )
        rules = (self.separator, self.last_only, self.max_completion)
        return repr((keys, rules, self.data.sequence_len, self.data.too_long))

    @override
    def probe(self, dataset: DatasetConfig) -> Probe:
        return probe_trees(self.open(dataset))

    @override
    def show(self, dataset: DatasetConfig, num_samples: int, console: Console) -> None:
        show_trees(self.open(dataset), self.tokenizer, num_samples, console)

    @override
    def show_example(self, probe: Probe, console: Console) -> None:
        show_tree(probe.samples[0], self.tokenizer, console)


class StepwiseReader:
    """Callable (row, origin) -> a labeled tree of one branch, or a drop. Picklable."""

    def __init__(
        self,
        dataset: DatasetConfig,
        tokenizer: Any,
        data: DataConfig,
        separator: str,
        last_only: bool = False,
        max_completion: int | None = None,
    ):
        if dataset.format != "auto":
            raise UserError(
                f"{dataset.path}: format {dataset.format!r}: rows of steps have the columns"
                f" {', '.join(COLUMNS)}; leave format out and rename columns with fields"
            )
        wrong = [name for name in dataset.fields if name.partition(".")[0] not in ALLOWED]
        if wrong:
            raise UserError(
                f"{dataset.path}: fields renames to {wrong[0]!r}; rows of steps have the columns"
                f" {', '.join(COLUMNS)} (wanted = found)"
            )
        self.arguments = (dataset, tokenizer, data, separator, last_only, max_completion)
        self.dataset, self.tokenizer, self.data = dataset, tokenizer, data
        self.last_only, self.max_completion = last_only, max_completion
        self.encoder = encoder_of(tokenizer, dataset.special_tokens)
        self.images = open_images(dataset, tokenizer)
        self.separator = template.encode(tokenizer, separator)
        if not self.separator:
            raise UserError(
                f"task.step_separator {separator!r} has no token of {tokenizer.name_or_path};"
                " choose another one"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return StepwiseReader, self.arguments

    def __call__(self, row: dict[str, Any], origin: str) -> list[Tree | RowNote]:
        try:
            columns = Row(row, **self.dataset.reading)
            columns.images = open_row_images(self.images, origin)
            columns.tokenizer = self.tokenizer
            prompt, placed, steps, labels = self.read(columns)
        except template.TemplateOmission as error:
            return [Dropped(str(error), origin)]
        except MalformedRow as error:
            return [Dropped(f"malformed row: {error}", error.locate(origin))]
        except template.TemplateFailed as error:
            return [Dropped(f"malformed row: {error}", origin)]
        if labels is None:
            return [Dropped("malformed row: column labels is missing or empty", origin)]
        tree = self._fit(prompt, placed, steps, labels, origin)
        return [tree, *note_unread(columns.unread, origin)]

    def read(
        self, row: Row
    ) -> tuple[list[int], PlacedImages | None, list[list[int]], list[int] | None]:
        """Return (tokens of the prompt, its images, tokens of each step with its separator, labels
        or None).

        Raises MalformedRow for columns of other types.
        """
        steps, labels = row.get("completions"), row.get("labels")
        if not isinstance(steps, list) or not steps:
            raise MalformedRow("column completions must be a list of steps, each a text")
        if len(steps) > MAX_STEPS:
            raise MalformedRow(f"more than {MAX_STEPS:,} steps")
        if not all(isinstance(step, str) for step in steps):
            raise MalformedRow("column completions must be a list of steps, each a text")
        check_values(steps)
        if labels is not None:
            if not isinstance(labels, list) or len(labels) != len(steps):
                raise MalformedRow("column labels must have a label for each of the completions")
            labels = [int(read_flag("a label", label)) for label in labels]
        tokens = [[*self.encoder.text(step), *self.separator] for step in steps]
        return *self._prompt(row), tokens, labels

    def _prompt(self, row: Row) -> tuple[list[int], PlacedImages | None]:
        prompt = read_prompt(row)
        if prompt is None:
            raise MalformedRow("column prompt is missing or empty")
        if isinstance(prompt.value, str) and not row.has_context:
            return template.begin_text(self.tokenizer, self.encoder, prompt.value), None
        tokens = prompt_tokens(
            self.tokenizer,
            prompt.messages,
            prompt.tools,
            self.dataset.special_tokens,
            {**self.dataset.chat_template_kwargs, **(prompt.chat_template_kwargs or {})},
        )
        if row.images is None:
            return tokens, None
        return tokens, row.images.find(np.array(tokens), prompt.messages)

    def _fit(
        self,
        prompt: list[int],
        placed: PlacedImages | None,
        steps: list[list[int]],
        labels: list[int],
        origin: str,
    ) -> Tree | Dropped:
        """Build the tree and apply the length rules."""
        ends = len(prompt) + np.cumsum([len(step) for step in steps]) - 1
        tokens = np.array([*prompt, *(token for step in steps for token in step)], np.int32)
        if self.max_completion is not None:
            tokens = tokens[: len(prompt) + self.max_completion]
        limit = self.data.sequence_len
        if len(tokens) > limit:
            if self.data.too_long == "error":
                raise UserError(
                    f"{origin}: {len(tokens)} tokens, but data.sequence_len is {limit}: raise it,"
                    ' or set data.too_long to "drop" or "truncate"'
                )
            if self.data.too_long == "drop":
                return Dropped("too long", origin)
            tokens = tokens[:limit]
        weights, label = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32)
        labeled = [index for index in range(len(ends)) if 0 < ends[index] < len(tokens)]
        if self.last_only:
            labeled = [index for index in labeled if index == len(ends) - 1]
        if not labeled:
            return Dropped("no trained token", origin)
        weights[ends[labeled]] = 1.0
        label[ends[labeled]] = np.array(labels)[labeled]
        # A step is labeled behind the prompt, so no cut is within an image.
        images = None
        if placed is not None:
            images = join_images([(placed, len(prompt))], len(tokens))
        node = Node(-1, tokens, {STEP: weights}, {LABEL: label}, images=images)
        return Tree((node,), origin=origin)


ALLOWED = (*COLUMNS, "messages")
