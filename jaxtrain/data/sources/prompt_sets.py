"""Public benchmarks as conversations: the rows used of each, and the wording of the prompts.

    "gsm8k=test.jsonl" ─ SETS["gsm8k"] ─ open_rows ─ shuffle, first n ─> Prompts.turns

The sets from gsm8k to alpaca that draft models are measured with have DFlash's wording and draw;
GPQA's wording is simple-evals', MMLU-Pro's its authors'. A set larger than its size is shuffled
with seed 0 like `datasets.Dataset.shuffle`, and the first rows are taken; a smaller one is used in
full, in its own order. An evaluation asks all rows.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
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
    answer: Callable[[Row], Any] | None = None
    """Reads what the set's grader compares with, as column `answer`; raises like `write`."""
    preface: Callable[[Row, Sequence[Row]], str] | None = None
    """Writes what precedes the first message, from solved rows of the split "validation"."""
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


def find_column(row: Row, columns: Sequence[str]) -> str:
    """Return the first of several columns that the row has, else the first of all."""
    return next((column for column in columns if column in row), columns[0])


def solve(*columns: str) -> Callable[[Row], str]:
    """Return a writer of problems with a short answer, which are in one of these columns."""
    return lambda row: text(row, find_column(row, columns)) + BOXED


def read_short_answer(row: Row) -> str | int | float:
    """The answer to a problem: a text or a number."""
    value = row[find_column(row, ("answer", "Answer"))]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError(f"column 'answer' is {name_type(value)}, not a text or a number")
    return value


GPQA_COLUMNS = ("Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3)))


def shuffle_choices(row: Row) -> list[str]:
    """GPQA's columns in the order in which they are shown: by a hash of question and choice."""
    question = text(row, "Question")

    def rank(column: str) -> bytes:
        return hashlib.sha256(f"{question}\n{text(row, column).strip()}".encode()).digest()

    return sorted(GPQA_COLUMNS, key=rank)


def ask_gpqa(row: Row) -> str:
    """GPQA: a question with four choices."""
    choices = [text(row, column).strip() for column in shuffle_choices(row)]
    return (
        "Answer the following multiple choice question. The last line of your response should be of"
        " the following format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD."
        f" Think step by step before answering.\n\n{text(row, 'Question').strip()}\n\n"
        + "\n".join(f"{letter}) {choice}" for letter, choice in zip("ABCD", choices, strict=True))
    )


def list_options(row: Row) -> list[str]:
    """Options of a question of MMLU-Pro: without "N/A", which fills some rows up to ten."""
    options = row["options"]
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        raise TypeError(f"column 'options' is {name_type(options)}, not a list of texts")
    return [option.strip() for option in options if option != "N/A"]


def ask_mmlu_pro(row: Row) -> str:
    """MMLU-Pro: a question with up to ten options."""
    options = "".join(
        f"{letter}. {option}\n"
        for letter, option in zip("ABCDEFGHIJ", list_options(row), strict=False)
    )
    return (
        f"Question:\n{text(row, 'question')}\nOptions:\n{options}Answer: Let's think step by step."
    )


def introduce_mmlu_pro(row: Row, examples: Sequence[Row]) -> str:
    """MMLU-Pro: the task, and five solved questions of the same category."""
    solved = [example for example in examples if example.get("category") == row["category"]][:5]
    return (
        "The following are multiple choice questions (with answers) about"
        f' {text(row, "category")}. Think step by step and then finish your answer with "the answer'
        ' is (X)" where X is the correct letter choice.\n\n'
    ) + "".join(
        ask_mmlu_pro(example)
        + text(example, "cot_content").removeprefix("A: Let's think step by step.")
        + "\n\n"
        for example in solved
    )


def list_instructions(row: Row) -> list[str]:
    """IFEval: names of the instructions in a prompt."""
    names, arguments = row["instruction_id_list"], row["kwargs"]
    if not (isinstance(names, list) and isinstance(arguments, list) and names):
        raise TypeError("columns 'instruction_id_list' and 'kwargs' should be lists, not empty")
    if len(names) != len(arguments):
        raise TypeError(f"there are {len(names)} instructions but {len(arguments)} kwargs")
    return names


SETS: dict[Benchmark, PromptSet] = {
    "gsm8k": PromptSet(
        "openai/gsm8k", "test", 128, solve("question"), read_short_answer, subset="main"
    ),
    "math500": PromptSet(
        "HuggingFaceH4/MATH-500", "test", 128, solve("problem"), read_short_answer
    ),
    "aime24": PromptSet(
        "HuggingFaceH4/aime_2024", "train", 30, solve("problem", "Problem"), read_short_answer
    ),
    "aime25": PromptSet(
        "MathArena/aime_2025", "train", 30, solve("problem", "Problem"), read_short_answer
    ),
    "amc23": PromptSet(
        "math-ai/amc23", "test", 40, solve("question", "problem"), read_short_answer
    ),
    "minerva": PromptSet(
        "math-ai/minervamath", "test", 128, solve("question", "problem"), read_short_answer
    ),
    "gpqa": PromptSet(
        "Idavidrein/gpqa",
        "train",
        128,
        ask_gpqa,
        lambda row: "ABCD"[shuffle_choices(row).index("Correct Answer")],
        subset="gpqa_diamond",
    ),
    "mmlu_pro": PromptSet(
        "TIGER-Lab/MMLU-Pro",
        "test",
        128,
        ask_mmlu_pro,
        lambda row: text(row, "answer"),
        introduce_mmlu_pro,
    ),
    "ifeval": PromptSet(
        "google/IFEval", "train", 128, lambda row: text(row, "prompt"), list_instructions
    ),
    "humaneval": PromptSet("openai/openai_humaneval", "test", 164, ask_for_function),
    "mbpp": PromptSet(
        "google-research-datasets/mbpp",
        "test",
        128,
        lambda row: text(row, "prompt"),
        subset="sanitized",
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
    name: Benchmark,
    path: str | None,
    key: str,
    most: int | None = None,
    all_turns: bool = False,
    examples: str | None = None,
) -> UserTurns:
    """Open a prompt set by name and path (None: its dataset on the Hub); `key` names the setting of
    the path in messages. examples: path of solved rows, where the set has such."""
    prompt_set = SETS[name]
    path = path or prompt_set.hub
    if prompt_set.files and path == prompt_set.hub:
        raise UserError(
            f"{name} cannot be read from the Hub; download {prompt_set.describe()} and name their"
            f" folder: {key}"
        )
    if prompt_set.files and os.path.isdir(os.path.expanduser(path)):
        path = str(Path(path) / prompt_set.files)
    rows = open_split(name, path, prompt_set.split, key)
    solved: list[Row] = []
    if prompt_set.preface and (examples or path == prompt_set.hub):
        shots = open_split(name, examples or path, "validation", key.replace("path", "examples"))
        solved = [shots[index] for index in range(len(shots))]
    conversations = UserTurns(name, [], [], [])
    for index in sample(len(rows), prompt_set.size if most is None else most):
        row, origin = rows[index], rows.origin(index)
        turns = read_turns(name, row, origin)
        if introduce := prompt_set.preface:
            preface = read_columns(
                name, row, origin, lambda row, write=introduce: write(row, solved)
            )
            turns = (preface + turns[0], *turns[1:])
        conversations.turns.append(turns if all_turns else turns[:1])
        conversations.rows.append(row)
        conversations.origins.append(origin)
    return conversations


def sample(total: int, most: int) -> list[int]:
    """Return the indices of the rows used, in order: the shuffle of `datasets` with seed 0."""
    if total <= most:
        return list(range(total))
    return np.random.default_rng(0).permutation(total)[:most].tolist()


def open_split(name: Benchmark, path: str, split: str, key: str) -> Any:
    """Open the rows of a split; a UserError says where they can be had."""
    subset = SETS[name].subset if path == SETS[name].hub else None
    try:
        return open_rows(DatasetConfig(path=path, name=subset, split=split))
    except UserError as error:
        message = str(error).replace("data.datasets[].path", key).replace("data.datasets[]", name)
        raise UserError(
            f"{name}: {message.rstrip('.')}. Its rows are {SETS[name].describe()}"
        ) from None


def read_turns(name: Benchmark, row: Row, origin: str) -> tuple[str, ...]:
    """Return the user messages of a row; UserError if it is not a row of the set."""
    turns = read_columns(name, row, origin, SETS[name].write)
    turns = [turns] if isinstance(turns, str) else turns
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise UserError(f"{name}: {origin} should hold a list of texts, found {show(turns)}")
    return tuple(turns)


def read_answer(name: Benchmark | None, row: Row, origin: str) -> dict[str, Any]:
    """Return the column `answer` of a row for the set's grader; empty for a set without one."""
    read = SETS[name].answer if name else None
    return {"answer": read_columns(name, row, origin, read)} if name and read else {}


def read_columns(name: Benchmark, row: Row, origin: str, read: Callable[[Row], Any]) -> Any:
    """Return what `read` makes of a row; UserError if it is not a row of the set."""
    if isinstance(row, UnreadableRow):
        raise UserError(f"{name}: {origin} cannot be read: {row.reason}")
    try:
        return read(row)
    except KeyError as error:
        raise UserError(
            f"{name}: {origin} has no column {error}; its columns are"
            f" {', '.join(map(show, row)) or 'none'}. Its rows are {SETS[name].describe()}"
        ) from None
    except TypeError as error:
        raise UserError(f"{name}: {origin}: {error}") from None
