"""Ten public benchmarks as conversations: the rows used of each, and the wording of the prompts.

    "gsm8k=test.jsonl" ─ SETS["gsm8k"] ─ open_rows ─ shuffle, first n ─> Prompts.turns

Sets, wording, sizes and the draw are those of published draft models (DFlash), so that results are
comparable. A set larger than its size is shuffled with seed 0 like `datasets.Dataset.shuffle`, and
the first rows are taken; a smaller one is used in full, in its own order.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.config.data import DatasetConfig
from jaxtrain.config.evals import Benchmark
from jaxtrain.data.sources.dataset import open_rows
from jaxtrain.errors import UserError
from jaxtrain.safe_io import UnreadableRow
from jaxtrain.text_safety import name_type, show

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."

Row = Mapping[str, Any]


class UserTurns(NamedTuple):
    """User messages of the conversations of a prompt set."""

    name: str
    """Name of the set."""
    turns: list[tuple[str, ...]]
    """User messages of each conversation in order, at least one; the model answers each before the
    next."""
    rows: list[dict[str, Any]]
    """Row of each conversation."""
    origins: list[str]
    """File and row of each, for messages: "gsm8k_test.jsonl line 17"."""


@dataclass(frozen=True)
class PromptSet:
    """Definition of a benchmark."""

    hub: str
    """Dataset on the Hugging Face Hub."""
    split: str
    size: int
    """Number of rows used."""
    write: Callable[[Row], str | list[str]]
    """Writes the user messages of a row; KeyError for a missing column, TypeError for one of
    another type."""
    subset: str | None = None
    files: str | None = None
    """Pattern of its files in a folder, if their names lack the split's. Such a set is read from
    files only: the Hub's dataset is a script, which `datasets` no longer runs."""

    def describe(self) -> str:
        """Describe the data to download."""
        subset = f" of its subset {self.subset}" if self.subset else ""
        return f"split {self.split}{subset} of https://huggingface.co/datasets/{self.hub}" + (
            f" (files {self.files})" if self.files else ""
        )


def text(row: Row, column: str, default: str | None = None) -> str:
    """Return the text of a column, `default` if it is empty; KeyError if missing, TypeError for
    other types."""
    value = row[column] if default is None else row.get(column) or default
    if not isinstance(value, str):
        raise TypeError(f"column {column!r} is {name_type(value)}, not a text")
    return value


def ask_for_program(row: Row) -> str:
    """LiveCodeBench: the problem, and the starter code if there is any."""
    instruction = "Write your code in the following format:"
    if row.get("starter_code"):
        instruction = "Use the following code structure:"
    return (
        "You are an expert Python programmer. You will be given a question (problem specification)"
        " and will generate a correct Python program that matches the specification and passes all"
        " tests. You will NOT return anything except for the program\n\n"
        f"### Question:\n{text(row, 'question_content')}\n\n"
        f"### Format: {instruction}\n"
        f"```python\n{text(row, 'starter_code', '# YOUR CODE HERE')}\n```\n\n"
        "### Answer: (use the provided format with backticks)"
    )


def ask_for_function(row: Row) -> str:
    """HumanEval: the signature and docstring."""
    return (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{text(row, 'prompt')}\n```"
    )


def ask_for_fix(row: Row) -> str:
    """SWE-bench: the issue alone, without the repository."""
    issue = text(row, "problem_statement")
    return f"Problem Statement:\n{issue}\nPlease fix the issue described above."


def instruct(row: Row) -> str:
    """Alpaca."""
    extra_input = text(row, "input", "")
    return text(row, "instruction") + (f"\n\nInput:\n{extra_input}" if extra_input else "")


def converse(row: Row) -> list[str]:
    """MT-bench: `prompt` in the Hub's copy, `turns` in FastChat's own file."""
    return row["prompt"] if "prompt" in row else row["turns"]


def solve(row: Row) -> str:
    """A problem with a short answer."""
    return text(row, "problem") + BOXED


SETS: dict[Benchmark, PromptSet] = {
    "gsm8k": PromptSet(
        "openai/gsm8k", "test", 128, lambda row: text(row, "question") + BOXED, "main"
    ),
    "math500": PromptSet("HuggingFaceH4/MATH-500", "test", 128, solve),
    "aime24": PromptSet("HuggingFaceH4/aime_2024", "train", 30, solve),
    "aime25": PromptSet("MathArena/aime_2025", "train", 30, solve),
    "humaneval": PromptSet("openai/openai_humaneval", "test", 164, ask_for_function),
    "mbpp": PromptSet(
        "google-research-datasets/mbpp", "test", 128, lambda row: text(row, "prompt"), "sanitized"
    ),
    "livecodebench": PromptSet(
        "livecodebench/code_generation_lite", "test", 128, ask_for_program, files="test*.jsonl"
    ),
    "swe-bench": PromptSet("princeton-nlp/SWE-bench_Lite", "test", 128, ask_for_fix),
    "mt-bench": PromptSet("HuggingFaceH4/mt_bench_prompts", "train", 80, converse),
    "alpaca": PromptSet("tatsu-lab/alpaca", "train", 128, instruct),
}


def open_prompt_set(spec: str, most: int | None = None, all_turns: bool = False) -> UserTurns:
    """Open the conversations of "NAME" (from the Hub) or "NAME=PATH": a file, a folder, a pattern
    or another Hub id.

    most: number of rows instead of the set's size. all_turns: include later turns. Raises UserError
    for an unknown set, missing data, and rows with other columns.
    """
    name, _, path = spec.partition("=")
    if name not in SETS:
        raise UserError(
            f"no prompt set {show(name)}: there are {', '.join(SETS)}; with a file of its rows"
            f" write NAME=PATH, such as gsm8k=gsm8k_test.jsonl"
        )
    return read_prompt_set(name, path or SETS[name].hub, f"{name}=PATH", most, all_turns)


def read_prompt_set(
    name: Benchmark, path: str, key: str, most: int | None = None, all_turns: bool = False
) -> UserTurns:
    """Open a prompt set by name and path; `key` names the setting of the path in messages."""
    prompt_set = SETS[name]
    if prompt_set.files and path == prompt_set.hub:
        raise UserError(
            f"{name} cannot be read from the Hub; download {prompt_set.describe()} and name their"
            f" folder: {key}"
        )
    if prompt_set.files and os.path.isdir(os.path.expanduser(path)):
        path = str(Path(path) / prompt_set.files)
    dataset = DatasetConfig(
        path=path,
        name=prompt_set.subset if path == prompt_set.hub else None,
        split=prompt_set.split,
    )
    try:
        rows = open_rows(dataset)
    except UserError as error:
        message = str(error).replace("data.datasets[].path", key).replace("data.datasets[]", name)
        raise UserError(
            f"{name}: {message.rstrip('.')}. Its rows are {prompt_set.describe()}"
        ) from None
    conversations = UserTurns(name, [], [], [])
    for index in sample(len(rows), prompt_set.size if most is None else most):
        row, origin = rows[index], rows.origin(index)
        turns = read_turns(name, row, origin)
        conversations.turns.append(turns if all_turns else turns[:1])
        conversations.rows.append(row)
        conversations.origins.append(origin)
    return conversations


def sample(total: int, most: int) -> list[int]:
    """Return the indices of the rows used, in order: the shuffle of `datasets` with seed 0."""
    if total <= most:
        return list(range(total))
    return np.random.default_rng(0).permutation(total)[:most].tolist()


def read_turns(name: Benchmark, row: Row, origin: str) -> tuple[str, ...]:
    """Return the user messages of a row; UserError if it is not a row of the set."""
    if isinstance(row, UnreadableRow):
        raise UserError(f"{name}: {origin} cannot be read: {row.reason}")
    try:
        turns = SETS[name].write(row)
    except KeyError as error:
        raise UserError(
            f"{name}: {origin} has no column {error}; its columns are"
            f" {', '.join(map(show, row)) or 'none'}. Its rows are {SETS[name].describe()}"
        ) from None
    except TypeError as error:
        raise UserError(f"{name}: {origin}: {error}") from None
    turns = [turns] if isinstance(turns, str) else turns
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise UserError(f"{name}: {origin} should hold a list of texts, found {show(turns)}")
    return tuple(turns)
