"""Rows for distillation: SFT's sequences, with a teacher's log-probs where rows hold them.

Log-probs come in any of these forms, one entry for each of the last n tokens of the sequence, n at
least the answer's; each entry says what the teacher gave to the token that stands there (as vLLM
and Axolotl write them), never to the one behind it:

    target_token_ids, target_logprobs (or logprobs)    [n][k] ids, [n][k] numbers
    logprobs                                           [n][k] of {"token": "token_id:7", "logprob"}
    logprobs                                           vLLM's {"content": [{"top_logprobs": [...]}]}
    prompt_logprobs                                    [n] of {"7": {"logprob": -0.1}} or null

Where the row also holds input_ids or prompt_token_ids, they must be the tokens that the tokenizer
makes of it: log-probs of other tokens teach nonsense. So must the tokens that vLLM's entries are
about.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console
from typing_extensions import override

from jaxtrain.config.data import DataConfig, DatasetConfig
from jaxtrain.data.chat.messages import MalformedRow
from jaxtrain.data.packing.pack import Fields
from jaxtrain.data.packing.tree import Tree
from jaxtrain.data.preview import Probe, probe_samples
from jaxtrain.data.sample import Dropped, RowNote, Sample, to_tree
from jaxtrain.data.sequences import Sequences
from jaxtrain.data.sources.dataset import open_rows
from jaxtrain.data.sources.readers import MixturePart
from jaxtrain.errors import UserError
from jaxtrain.text_safety import show

COLUMNS = ("target_token_ids", "target_logprobs", "logprobs", "prompt_logprobs")
TOKENS = ("input_ids", "prompt_token_ids")
MAX_PROBABILITY = 1.02
"""Largest sum of an entry's probabilities: those of log-probs in bfloat16 are off by less than 2
%."""
ALSO_CALLED = {"logprobs": ("llm_text_generation_vllm_logprobs",)}
"""Other names that published data have for a column."""
NOTHING = -1
"""Id of an empty place where fewer than k tokens are known."""


class TeacherRecipe(Sequences):
    """`pipeline.Recipe` of chat, completion and text data whose weights are a component's, with
    streams of the teacher's likeliest tokens where rows hold them."""

    def __init__(
        self,
        data: DataConfig,
        tokenizer: Any,
        *,
        component: str,
        fields: Fields,
        trees: bool = False,
        streams: tuple[str, str] | None = None,
        top_k: int | None = None,
    ):
        """streams: names of those of ids and of log-probs, [T, top_k] each, or None."""
        super().__init__(data, tokenizer, trees and streams is None)
        self.component, self.fields = component, fields
        self.streams, self.top_k = streams, top_k

    @override
    def open(self, dataset: DatasetConfig) -> MixturePart:
        part = super().open(without_columns(dataset))
        renamed = {w: f for w, f in dataset.fields.items() if w in (*COLUMNS, *TOKENS)}
        reader = None
        if self.streams is not None:
            assert self.top_k is not None, "the config has both"
            reader = LogProbReader(self.streams, self.top_k, renamed, len(self.tokenizer))
        tokenize = TeacherTokenizer(part.tokenize, self.component, reader)
        return MixturePart(part.name, part.rows, tokenize, part.weight)

    open_held_out = open

    def settings(self, dataset: DatasetConfig) -> str | None:
        """Return nothing: log-probs are larger than what a cache would save."""
        return None

    def probe(self, dataset: DatasetConfig) -> Probe:
        """Check a dataset; raises UserError if hardly a row has log-probs that fit its tokens."""
        plain = without_columns(dataset)
        if self.streams is None:
            return probe_samples(plain, self.tokenizer, self.data, self.trees)
        reads = list_read(dataset.fields)
        probe = probe_samples(plain, self.tokenizer, self.data, self.trees, reads)
        part, rows = self.open(dataset), open_rows(dataset)
        reasons: list[str] = []
        for index, row in enumerate(rows if not hasattr(rows, "__len__") else map_rows(rows)):
            if index == 16:
                break
            items = part.tokenize(row, f"row {index}")
            if any(isinstance(item, Tree) for item in items):
                return probe
            reasons += [item.reason for item in items if isinstance(item, Dropped)]
        common = max(set(reasons), key=reasons.count, default="no row gives anything")
        raise UserError(
            f"{dataset.path}: no row looked at has a teacher's log-probs that fit it:\n  {common}\n"
            'task.teacher.kind "data" reads the columns target_token_ids + target_logprobs,'
            " logprobs or prompt_logprobs (docs/distillation.md); fields renames others"
        )

    @override
    def show_example(self, probe: Probe, console: Console) -> None:
        super().show_example(probe, console)
        if self.streams is not None:
            console.print(f"with the teacher's {self.top_k} likeliest tokens of each", markup=False)


def map_rows(rows: Any) -> Any:
    """Rows with random access, one after the other."""
    return (rows[index] for index in range(len(rows)))


def list_read(fields: Mapping[str, str]) -> set[str]:
    """Return the notes of unread columns that the log-probs' reader reads, as `Row.unread` has
    them."""
    names = {*COLUMNS, *TOKENS, *(name for names in ALSO_CALLED.values() for name in names)}
    return {f"column {show(fields.get(name, name), 60)}" for name in names}


def without_columns(dataset: DatasetConfig) -> DatasetConfig:
    """The dataset without renamed columns that only the log-probs' reader knows."""
    fields = {w: f for w, f in dataset.fields.items() if w not in (*COLUMNS, *TOKENS)}
    return dataset.model_copy(update={"fields": fields})


class TeacherTokenizer:
    """(row, origin) -> trees and drops of another row_tokenizer, under another component."""

    def __init__(self, tokenize: Any, component: str, reader: "LogProbReader | None"):
        self.tokenize, self.component, self.reader = tokenize, component, reader

    def __call__(self, row: dict[str, Any], origin: str) -> list[Tree | RowNote]:
        """Log-probs belong to one sequence: a row that becomes several is dropped."""
        items = self.tokenize(row, origin)
        if self.reader is None:
            return [self.rename(item) for item in items]
        notes = [item for item in items if isinstance(item, RowNote)]
        dropped = [item for item in notes if isinstance(item, Dropped)]
        samples = [item for item in items if isinstance(item, Sample)]
        if len(samples) != 1 or dropped or len(items) != 1 + len(notes):
            return [*(dropped or [Dropped("several sequences, log-probs of one", origin)])]
        try:
            streams = self.reader(row, samples[0])
        except MalformedRow as error:
            return [Dropped(f"log-probs: {error}", origin)]
        tree = self.rename(samples[0])
        assert isinstance(tree, Tree)
        (node,) = tree.nodes
        node = replace(node, streams=streams)
        notes = [note for note in notes if note.reason not in self.reader.reads]
        return [Tree((node,), origin=tree.origin, controls=tree.controls), *notes]

    def rename(self, item: Sample | Tree | RowNote) -> Tree | RowNote:
        """Convert an item to a tree whose weights are the component's."""
        if isinstance(item, RowNote):
            return item
        if isinstance(item, Sample):
            return to_tree(item, self.component)
        nodes = tuple(
            replace(node, weights={self.component: node.weights["nll"]}) for node in item.nodes
        )
        return Tree(nodes, item.ends, item.origin, item.controls)


class LogProbReader:
    """(row, sample) -> {ids' stream: int32 [n, k], log-probs' stream: float32 [n, k]}."""

    def __init__(self, names: tuple[str, str], k: int, renamed: Mapping[str, str], vocabulary: int):
        """vocabulary: ids from there on are refused."""
        self.names, self.k, self.renamed, self.vocabulary = names, k, dict(renamed), vocabulary
        self.reads = list_read(renamed)

    def __call__(self, row: Mapping[str, Any], sample: Sample) -> dict[str, np.ndarray]:
        """Return the streams of a sample; raises MalformedRow for log-probs that do not belong to
        its tokens."""
        length = len(sample.tokens)
        for name in TOKENS:
            tokens = self._column(row, name)
            if tokens is not None and list(tokens)[-length:] != sample.tokens.tolist():
                raise MalformedRow(f"{name} are not the tokens that the tokenizer makes of the row")
        entries = self._entries(row)
        if len(entries) > length:
            raise MalformedRow(f"{len(entries)} entries for a sequence of {length} tokens")
        self._check_tokens(row, sample.tokens[length - len(entries) :].tolist())
        ids = np.full((length, self.k), NOTHING, np.int32)
        logp = np.zeros((length, self.k), np.float32)
        first = length - len(entries)
        for position in np.flatnonzero(sample.weights):
            pairs = entries[position - first] if position >= first else []
            if not pairs:
                raise MalformedRow("a trained token has none")
            pairs = sorted(pairs, key=lambda pair: -pair[1])[: self.k]
            ids[position, : len(pairs)] = [pair[0] for pair in pairs]
            logp[position, : len(pairs)] = [pair[1] for pair in pairs]
        return dict(zip(self.names, (ids, logp), strict=True))

    def _column(self, row: Mapping[str, Any], name: str) -> Any:
        for column in (self.renamed.get(name, name), *ALSO_CALLED.get(name, ())):
            if row.get(column) is not None:
                return row[column]
        return None

    def _entries(self, row: Mapping[str, Any]) -> list[list[tuple[int, float]]]:
        ids = self._column(row, "target_token_ids")
        columns = {name: self._column(row, name) for name in COLUMNS[1:]}
        values = next((value for value in columns.values() if value is not None), None)
        if values is None:
            raise MalformedRow("no column target_logprobs, logprobs or prompt_logprobs")
        if isinstance(values, Mapping) and "content" in values:
            values = values["content"]
        if not isinstance(values, Sequence | np.ndarray) or isinstance(values, str):
            raise MalformedRow(f"a list is needed, one entry a token, found {show(values)}")
        if ids is None:
            return [self._checked(read_entry(entry)) for entry in values]
        if len(ids) != len(values):
            raise MalformedRow(f"{len(ids)} target_token_ids for {len(values)} log-probs")
        return [
            self._checked(list(zip(token_ids, numbers, strict=True)))
            if len(token_ids) == len(numbers)
            else []
            for token_ids, numbers in zip(ids, values, strict=True)
        ]

    def _check_tokens(self, row: Mapping[str, Any], tokens: Sequence[int]) -> None:
        """Raise MalformedRow where an entry names the token that it is about, and another stands
        there."""
        if self._column(row, "target_token_ids") is not None:
            return
        values = next(filter(lambda v: v is not None, (self._column(row, n) for n in COLUMNS[1:])))
        values = values["content"] if isinstance(values, Mapping) else values
        for index, (entry, token) in enumerate(zip(values, tokens, strict=True)):
            named = read_subject(entry)
            if named and token not in named:
                raise MalformedRow(
                    f"entry {index} is about token {named[0]}, where the tokenizer puts {token}:"
                    " another tokenizer, template or answer"
                )

    def _checked(self, pairs: list[tuple[Any, Any]]) -> list[tuple[int, float]]:
        """Pairs of which something is known; Malformed for what is no log-prob of a token."""
        checked = []
        for token, value in pairs:
            if value is None or value == -math.inf:
                continue
            try:
                token, value = int(token), float(value)
            except (TypeError, ValueError, OverflowError):
                raise MalformedRow(
                    f"{show(token)}: {show(value)} is no log-prob of a token"
                ) from None
            if not 0 <= token < self.vocabulary:
                raise MalformedRow(
                    f"token id {token} is outside the vocabulary of {self.vocabulary}"
                )
            if not value < 1e-3:  # a little above 0 is rounding
                raise MalformedRow(f"{value:g} is no log-probability")
            checked.append((token, min(value, 0.0)))
        if len({token for token, _ in checked}) < len(checked):
            raise MalformedRow("a token occurs twice in one entry")
        total = math.fsum(math.exp(value) for _, value in checked)
        if total > MAX_PROBABILITY:
            raise MalformedRow(
                f"the probabilities of one entry sum to {total:.3g}, not to 1 or less; are they"
                " logits, or log-probs to another base or temperature?"
            )
        return checked


def read_subject(entry: Any) -> list[int]:
    """Return the tokens that an entry may be about: the drawn one of a chat's answer, or any that
    vLLM lists for a prompt's token, itself among them. Empty if it does not say."""
    if not isinstance(entry, Mapping):
        return []
    if "top_logprobs" in entry:
        token = entry.get("token_id", entry.get("token"))
        names = [str(token).removeprefix("token_id:")]
        is_known = token is not None and (isinstance(token, int) or names[0] != token)
        return [int(name) for name in names if is_known and name.isdecimal()]
    # As vLLM writes them, with a table for each: others may have left the token itself out.
    named = [token for token, value in entry.items() if isinstance(value, Mapping)]
    return [int(token) for token in named if str(token).isdecimal()]


def read_entry(entry: Any) -> list[tuple[Any, Any]]:
    """[(token id, log-prob)] of what one token of the sequence has."""
    if entry is None:
        return []
    if isinstance(entry, Mapping) and "top_logprobs" in entry:
        entry = entry["top_logprobs"]
    if isinstance(entry, Mapping):  # vLLM's prompt_logprobs
        return [
            (token, value.get("logprob") if isinstance(value, Mapping) else value)
            for token, value in entry.items()
            if value is not None  # a table's columns are those of all its rows
        ]
    if not isinstance(entry, Sequence | np.ndarray) or isinstance(entry, str):
        raise MalformedRow(f"an entry must be a list or a table, found {show(entry)}")
    pairs = []
    for candidate in entry:
        if not isinstance(candidate, Mapping) or "logprob" not in candidate:
            raise MalformedRow(
                f"without target_token_ids an entry needs token and logprob: {show(candidate)}"
            )
        token = candidate.get("token_id", candidate.get("token"))
        if isinstance(token, str):
            token = token.removeprefix("token_id:")
        pairs.append((token, candidate["logprob"]))
    return pairs
