"""Environments and rewards of a run's datasets, and whether their prompts fit the model."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from jaxtrain.config import Config, EnvConfig
from jaxtrain.data.counts import Counts, add_items, describe_unread, drops_of, list_drops
from jaxtrain.data.media_tokens import MediaTokens
from jaxtrain.data.sample import Dropped, RowNote, note_unread
from jaxtrain.environments.guarded import GuardedEnv, open_guarded
from jaxtrain.environments.rewards.score import Rewards
from jaxtrain.errors import UnusableRow, UserError
from jaxtrain.safe_io import UnreadableRow

MAX_INSPECTED = 4096
"""Rows of a dataset that are checked with servers before a run."""
MAX_MEASURED = 64
"""Prompts of a dataset whose lengths are checked before a run."""
PREFIX = "env: a row cannot be used"
"""Beginning of what an environment says about a single row."""


@dataclass(frozen=True, eq=False)
class DatasetEnvs:
    """Environment and rewards by dataset."""

    env: Any
    """The run's own, a GuardedEnv."""
    rewards: Any
    """Has `async score(episodes, row) -> list of {name: number or None}`, those that the
    environment gave among them; raises EpisodeFailed where a judge failed."""
    by_dataset: Sequence[tuple[Any, Any]] = ()
    """Those of each dataset; empty if all share the run's."""

    def of(self, dataset: int) -> tuple[Any, Any]:
        """Return (environment, rewards) of a dataset."""
        return self.by_dataset[dataset] if self.by_dataset else (self.env, self.rewards)

    @property
    def distinct(self) -> list[Any]:
        """Every environment once."""
        return list(dict.fromkeys([self.env, *(env for env, _ in self.by_dataset)]))

    def counters(self) -> dict[str, float]:
        """Return what all environments have counted so far."""
        counters: Counter[str] = Counter()
        for env in self.distinct:
            counters.update(env.counters())
        return dict(counters)

    def inspect(
        self, datasets: Sequence[Any], log: Callable[[str], None], wait: bool = True
    ) -> None:
        """Check the datasets' rows with the environments' servers; see GuardedEnv.inspect."""
        for index, rows in enumerate(datasets):
            env, _ = self.of(index)
            env.inspect(spread_rows(rows, MAX_INSPECTED), log, wait)

    def check_lengths(
        self, config: Config, datasets: Sequence[Any], longest: int, log: Callable[[str], None]
    ) -> None:
        """Warn of prompts that leave too little room for answers; UserError where all do.

        longest: row of the model.
        """
        for index, rows in enumerate(datasets):
            env, _ = self.of(index)
            name = f"data.datasets.{index} ({rows.dataset.path})"
            lengths = measure_prompts(rows, env.env, name, log)
            new, row = config.sampling.max_new_tokens, config.data.sequence_len
            if lengths and (text := explain_lengths(lengths, new, row, longest, name)):
                log(text)


def open_envs(
    config: Config,
    tokenizer: Any,
    rewards: Rewards,
    row_tokens: int,
    stack: ExitStack,
    media: MediaTokens | None = None,
    row_patches: int | None = None,
) -> DatasetEnvs:
    """Open the run's environment and those of datasets with a section of their own.

    row_tokens: longest sequence that can be drawn and trained. stack: closes them. media: tokens
    that no prompt may hold, see GuardedEnv. row_patches: limit of a prompt's images, see open_env.
    """
    datasets = config.data.datasets

    def open_env(section: EnvConfig, key: str) -> GuardedEnv:
        folder = config.run.output_dir
        env = open_guarded(section, tokenizer, row_tokens, key, media, folder, row_patches)
        stack.callback(env.close)
        return env

    env = open_env(config.env, "env")
    if all(dataset.env is None and dataset.rewards is None for dataset in datasets):
        return DatasetEnvs(env, rewards)
    by_dataset = [
        (
            env if dataset.env is None else open_env(dataset.env, f"data.datasets.{index}.env"),
            rewards.only(dataset.rewards),
        )
        for index, dataset in enumerate(datasets)
    ]
    return DatasetEnvs(env, rewards, by_dataset)


def spread_indices(rows: Any, max_rows: int) -> list[int]:
    """Return the indices of at most so many rows, evenly spread over all."""
    count = min(len(rows), max_rows)
    return [index * len(rows) // count for index in range(count)]


def spread_rows(rows: Any, max_rows: int) -> Iterator[Any]:
    """Yield at most so many rows, evenly spread over all."""
    return (rows[index] for index in spread_indices(rows, max_rows))


def measure_prompts(rows: Any, env: Any, name: str, log: Callable[[str], None]) -> list[int]:
    """Return the tokens of some prompts; [] for an environment that cannot know beforehand.

    Logs how many of them cannot be used and why, and which keys of messages are not read. Raises
    UserError if none can be used. rows: of prompts.PromptRows, or others with random access.
    """
    read, counts, lengths = getattr(env, "read", None), Counts(), []
    problem = None
    for index in spread_indices(rows, MAX_MEASURED):
        row, unread = rows.read(index) if hasattr(rows, "read") else (rows[index], ())
        origin = getattr(row, "origin", "")
        if not origin and hasattr(rows, "origin"):
            origin = rows.origin(index)
        notes: list[RowNote] = list(note_unread(unread, origin))
        if isinstance(row, UnreadableRow):
            notes.append(Dropped(row.reason, origin))
        elif read is not None:
            try:
                lengths.append(len(read(row)[1]))
            except UnusableRow as error:
                reason = str(error).removeprefix(PREFIX).lstrip(":, ")
                notes.append(Dropped(f"malformed row: {reason}", origin))
            except UserError as error:
                problem = problem or error
        add_items(counts, notes)
    if unread_line := describe_unread(counts):
        log(f"{name}: {unread_line} of {counts['rows']:,} looked at")
    bad = sum(drops_of(counts).values())
    if bad:
        text = f"{name}: {bad} of {counts['rows']:,} prompts looked at cannot be used: "
        if bad == counts["rows"]:
            raise UserError(text + list_drops(counts))
        log(text + list_drops(counts))
    if problem is not None and not lengths:
        raise UserError(f"{name}: {problem}")
    return lengths


def explain_lengths(lengths: Sequence[int], new: int, row: int, window: int, name: str) -> str:
    """Return a warning about prompts that leave no room, or too little, for `new` drawn tokens;
    empty if all fit. Raises UserError if no answer fits behind any of them.

    row: data.sequence_len. window: the longest row of the model. name: of the dataset.
    """
    room, key = min((row, "data.sequence_len"), (window, "the longest row of the model"))
    full = sum(length >= room for length in lengths)
    short = sum(length < room < length + new for length in lengths)
    if not full + short:
        return ""
    longest = max(lengths)
    advice = (
        f"prompt and sampling.max_new_tokens ({new}) together need {longest + new} tokens there,"
        f" and {key} is {room}; raise data.sequence_len, lower sampling.max_new_tokens, or leave"
        " out long prompts"
    )
    if full == len(lengths):
        raise UserError(f"{name}: all of {len(lengths)} prompts looked at fill a row: {advice}")
    parts = [f"{full} leave no room for an answer and fail"] if full else []
    parts += [f"{short} have their answers cut off earlier, or left out"] if short else []
    return f"warning: {name}: of {len(lengths)} prompts looked at {', '.join(parts)}: {advice}"
