"""Prompts for the verb `speculate`: known benchmarks, or the rows of any dataset.

Of a conversation each turn of the assistant is asked for anew, behind the data's own messages.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from jaxtrain.cli.processes import read_dataset
from jaxtrain.config import DatasetConfig
from jaxtrain.data.chat.messages import MalformedRow, without_flags
from jaxtrain.data.chat.prompt import read_prompt
from jaxtrain.data.chat.rows import Row
from jaxtrain.data.sources.dataset import open_rows
from jaxtrain.data.sources.prompt_sets import open_prompt_set
from jaxtrain.errors import UserError

MOST = 128
"""Prompts of a dataset, unless --most is given."""


class EvalPrompt(NamedTuple):
    """Prompts to be answered."""

    name: str
    prompts: list[Any]
    """Messages of each, or its text with --raw."""
    tools: list[Any]
    """Of each; None: none."""
    kwargs: list[Any]
    """Of each, its variables of the chat template; None: none."""
    origins: list[str]


def open_asked(
    sets: Sequence[str], data: str | None, overrides: list[str], most: int | None, raw: bool
) -> list[EvalPrompt]:
    """Open all prompts that the command line names. sets: as data.prompt_sets.open_prompt_set
    takes them. data: a dataset's path, which `overrides` (dataset.key=value) go with. most:
    prompts of each. raw: texts in the column `prompt`. UserError."""
    if raw and sets:
        raise UserError("speculate: --raw continues texts of --input; the sets are conversations")
    if data is None and overrides:
        raise UserError(
            f"speculate: {overrides[0].partition('=')[0]} has no effect without --input"
        )
    if data is None and not sets:
        raise UserError("speculate: give --set NAME[=PATH], --input DATA, or both")
    prompt_sets = []
    for source in sets:
        benchmark = open_prompt_set(source, most)
        messages = [[{"role": "user", "content": turns[0]}] for turns in benchmark.turns]
        empty = [None] * len(messages)
        prompt_sets.append(EvalPrompt(benchmark.name, messages, empty, empty, benchmark.origins))
    if data is not None:
        prompt_sets.append(open_data(data, overrides, MOST if most is None else most, raw))
    return prompt_sets


def open_data(path: str, overrides: list[str], most: int, raw: bool) -> EvalPrompt:
    """Read the first prompts of a dataset."""
    dataset = read_dataset(path, overrides)
    rows = open_rows(dataset)
    if dataset.streaming:
        raise UserError("speculate: dataset.streaming true is not for prompts; remove it")
    named = getattr(rows, "origin", lambda index: f"{path} row {index}")

    def read_all() -> Iterator[tuple[Any, Any, Any, str]]:
        for index in range(len(rows)):
            try:
                yield from read_prompts(rows[index], dataset, named(index), raw)
            except MalformedRow as error:
                raise UserError(error.describe(named(index))) from None

    entries = list(islice(read_all(), most))
    if not entries:
        raise UserError(f"{path}: no row has a turn of an assistant to ask for")
    columns = map(list, zip(*entries, strict=True))
    return EvalPrompt(path.rpartition("/")[2], *columns)


def read_raw_prompt(row: Row) -> str:
    """Return the prompt of a row for --raw: the text of its column, which may be messages as JSON.
    MalformedRow for one that only a chat template can write."""
    value = row.prompt()
    text = row.original.get(row.renamed.get("prompt", "prompt"))
    if not isinstance(value, str) and isinstance(text, str) and not row.has_context:
        value = text
    if not isinstance(value, str) or not value:
        raise MalformedRow("--raw needs a text in the column prompt")
    return value


def read_prompts(
    row: Mapping[str, Any], dataset: DatasetConfig, origin: str, raw: bool
) -> Iterator[tuple[Any, Any, Any, str]]:
    """(prompt, tools, variables of the chat template, where it stands) of each turn of the
    assistant in a row; of a row that ends before one, the row itself."""
    columns = Row(row, **dataset.reading)
    if raw:
        yield read_raw_prompt(columns), None, None, origin
        return
    messages = columns.messages()
    kwargs = {**dataset.chat_template_kwargs, **(columns.chat_template_kwargs() or {})} or None
    if messages is None:
        prompt = read_prompt(columns)
        if prompt is None:
            raise UserError(
                f"{origin}: needs the column messages or prompt; it has {', '.join(row) or 'none'};"
                " see dataset.fields"
            )
        yield prompt.messages, prompt.tools, kwargs, origin
        return
    messages, tools = without_flags(columns.with_context(messages)), columns.tools()
    ends = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if messages[-1]["role"] != "assistant":
        ends.append(len(messages))
    for end in ends:
        if end:
            yield messages[:end], tools, kwargs, origin
