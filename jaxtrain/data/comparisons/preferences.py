"""Preference data: rows that compare or label answers, as trees for a method.

    row ──preference_row.py──> texts ──answers.py──> Ranked ──build──> Tree or Forest

The prompt is the trunk, each answer a branch. A tree that does not fit a row, because a prompt has
many answers, becomes several trees that each contain the prompt.
"""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, Literal

from rich.console import Console
from typing_extensions import override

from jaxtrain.config.data import FORMATS, DataConfig, DatasetConfig
from jaxtrain.data.chat.messages import KEYS, MalformedRow
from jaxtrain.data.chat.tokenize import open_row_images
from jaxtrain.data.comparisons.answers import Answers
from jaxtrain.data.comparisons.preference_row import (
    COLUMNS,
    PreferenceRow,
    key_of,
    label_judged,
    merge_judged,
    read_judged,
)
from jaxtrain.data.comparisons.preview import probe_preferences, show_preferences, show_ranked
from jaxtrain.data.comparisons.ranked import Ranked
from jaxtrain.data.formats import call_custom_format, check_names, find_custom_format
from jaxtrain.data.packing.pack import Fields, Normalize
from jaxtrain.data.pipeline import Recipe
from jaxtrain.data.preview import Probe
from jaxtrain.data.sample import Dropped, RowNote, note_unread
from jaxtrain.data.sequences import SHAPING as SEQUENCE_SHAPING
from jaxtrain.data.sources.dataset import open_rows
from jaxtrain.data.sources.readers import MixturePart
from jaxtrain.data.sources.row_views import GroupedRows
from jaxtrain.errors import UserError

Want = Literal["pairs", "labels"]
Build = Callable[[Ranked], Any]
"""(Ranked) -> Tree, Forest or Dropped. Picklable."""

SHAPING = SEQUENCE_SHAPING | {"pairing", "margin", "group_prompts"}
"""Keys of a dataset that shape the trees of a row."""
MAX_GROUPED = 64
"""Limit of rows of one prompt in one tree."""


class Preferences(Recipe):
    """`pipeline.Recipe` of preference data."""

    normalize: Normalize
    held_out_normalize: Normalize
    want: Want

    def __init__(
        self,
        data: DataConfig,
        tokenizer: Any,
        build: Build,
        fields: Fields,
        want: Want = "pairs",
        *,
        row_tokens: int | None = None,
        normalize: Normalize = "branch",
        units: int | None = None,
    ):
        """want: "pairs" for methods that compare answers, "labels" for those that judge each.

        data.sequence_len limits a prompt with one answer. row_tokens is T; unset: twice that, so
        that any pair fits.
        """
        self.data, self.tokenizer, self.build, self.want = data, tokenizer, build, want
        self.row_tokens = row_tokens or 2 * data.sequence_len
        self.normalize = self.held_out_normalize = normalize
        self.units, self.fields = units, fields

    @override
    def open(self, dataset: DatasetConfig) -> MixturePart:
        reader = self.reader(dataset)
        return MixturePart(
            dataset.shown_path,
            self._rows(dataset, reader),
            ComparisonTokenizer(reader, self.build, self.row_tokens, self.data.too_long),
            dataset.weight,
        )

    open_held_out = open

    def reader(self, dataset: DatasetConfig) -> "RankedReader":
        """Build the reader that turns rows of the dataset into `Ranked`."""
        return RankedReader(
            dataset, self.tokenizer, self.data.sequence_len, self.data.too_long, self.want
        )

    @override
    def settings(self, dataset: DatasetConfig) -> str | None:
        build = describe_build(self.build)
        if type(self) is not Preferences or dataset.format not in FORMATS or build is None:
            return None  # code outside jaxtrain shapes the trees; it has no digest
        if self.fields.images is not None:
            return None  # so do files beside the rows
        keys = dataset.model_dump_json(include=SHAPING)
        lengths = (self.data.sequence_len, self.data.too_long, self.row_tokens)
        return repr((keys, lengths, self.want, build))

    @override
    def probe(self, dataset: DatasetConfig) -> Probe:
        return probe_preferences(self.open(dataset), self.reader(dataset), self.row_tokens)

    @override
    def show(self, dataset: DatasetConfig, num_samples: int, console: Console) -> None:
        show_preferences(
            self.open(dataset), self.reader(dataset), self.row_tokens, num_samples, console
        )

    @override
    def show_example(self, probe: Probe, console: Console) -> None:
        show_ranked(probe.samples[0], self.tokenizer, console)

    def _rows(self, dataset: DatasetConfig, reader: "RankedReader") -> Any:
        rows = open_rows(dataset)
        if not dataset.group_prompts:
            return rows
        if dataset.streaming:
            raise UserError(
                f"{dataset.path}: group_prompts needs all rows; set its streaming to false"
            )
        return GroupedRows(rows, reader.key, MAX_GROUPED)


class RankedReader:
    """Callable (row, origin) -> Ranked and drops, for one dataset. Picklable."""

    def __init__(
        self, dataset: DatasetConfig, tokenizer: Any, sequence_len: int, too_long: str, want: Want
    ):
        check_dataset(dataset)
        self.outside = find_custom_format(dataset)
        self.dataset, self.tokenizer, self.want = dataset, tokenizer, want
        self.sequence_len = sequence_len
        self.answers = Answers(dataset, tokenizer, sequence_len, too_long)
        self.images = self.answers.images

    def __reduce__(self) -> tuple[Any, ...]:
        limits = (self.sequence_len, self.answers.too_long)
        return RankedReader, (self.dataset, self.tokenizer, *limits, self.want)

    def __call__(self, row: dict[str, Any], origin: str) -> list[Ranked | RowNote]:
        """Read a row, or {"group": rows of one prompt}: at most one Ranked, then notes."""
        members: list[PreferenceRow] = []
        notes: list[Ranked | RowNote] = []
        grouped = set(row) == {"group"}
        for member in row["group"] if grouped else [row]:
            try:
                members.append(self._read(member, grouped, origin))
            except MalformedRow as error:
                notes.append(Dropped(f"malformed row: {error}", error.locate(origin)))
        notes += [note for member in members for note in note_unread(member.unread, origin)]
        if not members:
            return notes
        judged = merge_judged(members, self.want) if grouped else members[0]
        try:
            return [*self.answers(judged, origin), *notes]
        except UserError as error:
            raise UserError(f"{origin}: {error}") from None

    def key(self, row: dict[str, Any]) -> str | None:
        """Return a key that is equal for rows of one prompt; None for a row without a prompt."""
        try:
            return key_of(self._read(row, True))
        except MalformedRow:
            return None

    def _read(self, row: dict[str, Any], grouped: bool, origin: str = "") -> PreferenceRow:
        if self.outside is not None:
            row = call_custom_format(self.outside, row, self.tokenizer, self.dataset)
            if not isinstance(row, dict):
                raise UserError(
                    f"format {self.dataset.format!r} must return a row of preference data, a dict"
                )
        images = open_row_images(self.images, origin)
        judged = read_judged(row, self.dataset, images, self.tokenizer)
        if self.want == "labels":
            return label_judged(judged)
        if judged.labels and not grouped:
            raise MalformedRow("a label where answers are to be compared")
        return judged


class ComparisonTokenizer:
    """Callable (row, origin) -> trees and drops: reads `Ranked`, and builds the method's trees."""

    def __init__(self, reader: RankedReader, build: Build, row_tokens: int, too_long: str):
        self.reader, self.build = reader, build
        self.row_tokens, self.too_long = row_tokens, too_long

    def __call__(self, row: dict[str, Any], origin: str) -> list[Any]:
        items: list[Any] = []
        for item in self.reader(row, origin):
            items += self._fit(item) if isinstance(item, Ranked) else [item]
        return items

    def _fit(self, ranked: Ranked) -> list[Any]:
        """Build one tree, or several that each fit a row."""
        built = self.build(ranked)
        if isinstance(built, Dropped) or built.num_tokens <= self.row_tokens:
            return [built]
        halves = halve(ranked)
        if not halves:
            if self.too_long == "error":
                raise UserError(
                    f"{ranked.origin}: a prompt with its answers has {built.num_tokens} tokens, but"
                    f' a row {self.row_tokens}; raise that, or set data.too_long to "drop"'
                )
            return [Dropped("too long for a row", ranked.origin)]
        return [item for half in halves for item in self._fit(half)]


def halve(ranked: Ranked) -> list[Ranked]:
    """Split the comparisons (or labeled answers) in two, each with the prompt and the answers that
    it needs; [] if there is only one."""
    if ranked.labels:
        middle = len(ranked.labels) // 2
        index_ranges = [range(middle), range(middle, len(ranked.labels))] if middle else []
        return [_select(ranked, list(part), (), number) for number, part in enumerate(index_ranges)]
    pairs = sorted(ranked.pairs, key=lambda pair: pair[:2])
    middle = len(pairs) // 2
    halves = [pairs[:middle], pairs[middle:]] if middle else []
    return [
        _select(ranked, sorted({i for pair in part for i in pair[:2]}), part, number)
        for number, part in enumerate(halves)
    ]


def _select(ranked: Ranked, indices: list[int], pairs: Sequence[Any], number: int) -> Ranked:
    new_index = {index: new for new, index in enumerate(indices)}
    return replace(
        ranked,
        answers=tuple(ranked.answers[index] for index in indices),
        pairs=tuple(
            pair._replace(chosen=new_index[pair.chosen], rejected=new_index[pair.rejected])
            for pair in pairs
        ),
        labels=tuple(ranked.labels[index] for index in indices) if ranked.labels else (),
        controls=ranked.controls if number == 0 else 0,
    )


def check_dataset(dataset: DatasetConfig) -> None:
    """Raise UserError for keys that do not apply to preference data."""
    if dataset.format in FORMATS and dataset.format != "auto":
        raise UserError(
            f"{dataset.path}: format {dataset.format!r} is one of sft; preference data are told"
            ' from their columns: leave format out ("auto"), or name a function of your own'
        )
    names = [*COLUMNS, *(f"messages.{key}" for key in KEYS)]
    check_names(dataset, names if dataset.format in FORMATS else None)


def describe_build(build: Build) -> str | None:
    """Describe everything that shapes the output of `build`, for the cache key; None for code
    outside jaxtrain.data, which the key cannot cover."""
    if isinstance(build, functools.partial):
        inner = describe_build(build.func)
        arguments = [build.args, sorted(build.keywords.items())]
        try:
            return inner and f"{inner} {json.dumps(arguments)}"
        except TypeError:
            return None
    made_of = type(build) if is_dataclass(build) and not isinstance(build, type) else build
    module, name = getattr(made_of, "__module__", ""), getattr(made_of, "__qualname__", "<")
    if not module.startswith("jaxtrain.data.") or "<" in name:
        return None
    return f"{module}.{name} {build}" if made_of is not build else f"{module}.{name}"
