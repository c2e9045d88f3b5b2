"""The prompts of `generate`: rows of the command line and of --input, each read as one request."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.errors import UserError
from jaxtrain.safe_io import UnreadableRow, parse_json, read_text
from jaxtrain.text_safety import escape_control_chars

if TYPE_CHECKING:
    from jaxtrain.config import DatasetConfig

MAX_INPUT = 2**29
"""Bytes of a file of prompts."""


def list_rows(
    args: argparse.Namespace, words: list[str]
) -> tuple[list[tuple[dict[str, Any], str]], DatasetConfig | None]:
    """Return the rows of --prompt and --input in order and where each stands (none: a
    conversation), and the dataset that --input and `words`, dataset.key=value, name."""
    dataset = None
    if args.ids:
        rows = [parse_line(text, f"--prompt {text!r:.60}") for text in args.prompt]
    else:
        rows = [({"prompt": text}, f"--prompt {text!r}") for text in args.prompt]
    if args.image:
        if len(rows) != 1 or args.raw or args.ids:
            raise UserError(
                "generate: --image is for one --prompt, without --raw and --ids; rows of --input"
                " name their images"
            )
        rows[0][0]["images"] = [os.path.abspath(path) for path in args.image]
    if words and not args.input:
        raise UserError(f"generate: {words[0].partition('=')[0]} has no effect without --input")
    if args.input and (words or Path(args.input).suffix != ".jsonl" or "://" in args.input):
        from jaxtrain.cli.processes import read_dataset

        dataset = read_dataset(args.input, words)
        rows += read_rows(dataset, args.drop_malformed)
    elif args.input:
        rows += read_lines(Path(args.input))
    if not rows and (args.output or args.raw or args.ids):
        raise UserError("generate: --raw, --ids and --output need --prompt or --input")
    return rows, dataset


def read_rows(dataset: DatasetConfig, drops: bool) -> list[tuple[dict[str, Any], str]]:
    """Return the rows of a dataset and where each stands; UserError for one that cannot be read,
    unless such rows are dropped later."""
    from jaxtrain.data.chat.messages import MalformedRow, check_readable
    from jaxtrain.data.sources.dataset import open_rows

    if dataset.streaming:
        raise UserError("generate: dataset.streaming true is not for prompts; remove it")
    source = open_rows(dataset)
    rows = [(source[index], source.origin(index)) for index in range(len(source))]
    for row, origin in () if drops else rows:
        try:
            check_readable(row)
        except MalformedRow as error:
            raise UserError(error.describe(origin)) from None
    return rows


def read_lines(path: Path) -> list[tuple[dict[str, Any], str]]:
    """Return the rows of a jsonl file and where each stands."""
    try:
        text = read_text(path, MAX_INPUT)
    except FileNotFoundError:
        raise UserError(f"--input {path}: no such file") from None
    except OSError as error:
        raise UserError(f"--input {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"--input {path} {error}") from None
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        rows.append(parse_line(line, f"{path} line {number}"))
    if not rows:
        raise UserError(f"--input {path} is empty")
    return rows


def parse_line(line: str, origin: str) -> tuple[dict[str, Any], str]:
    """Return (row, origin) of a line of JSON; a list stands for its prompt_ids."""
    try:
        row = parse_json(line, unique=True)
    except ValueError as error:
        raise UserError(f"{origin} is not valid JSON: {error}") from None
    if isinstance(row, list) and all(type(token) is int for token in row):
        row = {"prompt_ids": row}
    if not isinstance(row, dict):
        ids = (
            "must be a list of token ids (whole numbers), or"
            if isinstance(row, list)
            else "must be"
        )
        raise UserError(f"{origin} {ids} an object with prompt, messages or prompt_ids")
    return row, origin


def report_unread(requests: list[dict[str, Any]], tokenizer: Any) -> None:
    """Print the keys of messages that nothing reads, each with the number of its prompts."""
    from jaxtrain.data.chat.omissions import list_unwritten_names
    from jaxtrain.data.counts import Counts, add_items, describe_unread
    from jaxtrain.data.sample import note_unread

    counts = Counts()
    for request in (request for request in requests if "unread" in request):
        names = {*request["unread"], *list_unwritten_names(tokenizer, request["prompt"])}
        add_items(counts, note_unread(sorted(names), request["origin"]))
    if line := describe_unread(counts):
        print(f"generate: {line}", file=sys.stderr)


def leave_out_malformed(
    rows: list[tuple[dict[str, Any], str]],
    read: Callable[[dict[str, Any], str], Any],
    dataset: DatasetConfig | None,
) -> list[tuple[dict[str, Any], str]]:
    """Return the rows that hold a prompt; those with images are read later, and stay."""
    from jaxtrain.cli.prompt_images import holds_images

    usable, reasons = [], []
    for row, origin in rows:
        try:
            if isinstance(row, UnreadableRow) or not holds_images(row, dataset):
                read(row, origin)
        except UserError as error:
            reasons.append(str(error))
        else:
            usable.append((row, origin))
    if not usable:
        raise UserError(f"generate: no row holds a prompt; the first: {reasons[0]}")
    line = f"{len(reasons):,} of {len(rows):,} rows left out"
    line += f"; the first: {reasons[0]}" if reasons else ""
    print(escape_control_chars(line), file=sys.stderr)
    return usable


def read_request(
    row: dict[str, Any],
    origin: str,
    args: argparse.Namespace,
    dataset: DatasetConfig | None,
    images: Any = None,
) -> dict[str, Any]:
    """Read one prompt: ids, text for --raw, else messages that end before the assistant speaks.
    images: reader of its images; None refuses them."""
    from jaxtrain.cli.prompt_input import read_raw_prompt
    from jaxtrain.data.chat.messages import SYSTEM_ROLES, MalformedRow
    from jaxtrain.data.chat.prompt import read_prompt
    from jaxtrain.data.chat.rows import MESSAGES, PROMPTS, Row
    from jaxtrain.data.chat.tokenize import open_row_images
    from jaxtrain.data.images.markers import show_pictures

    request = {"row": row, "origin": origin}
    if args.ids:
        if not isinstance(row.get("prompt_ids"), list):
            raise UserError(f"{origin}: --ids needs a list of token ids in the key prompt_ids")
        return {**request, "prompt": row["prompt_ids"], "shown": f"{origin}: prompt_ids"}
    try:
        columns = Row(row, **dataset.reading) if dataset else Row(row)
        columns.images = open_row_images(images, origin)
        if args.raw:
            text = read_raw_prompt(columns)
            return {**request, "prompt": text, "shown": text}
        prompt = read_prompt(columns)
    except MalformedRow as error:
        raise UserError(error.describe(origin)) from None
    if prompt is None and any(name in columns.columns for name in PROMPTS):
        raise UserError(f"{origin}: its prompt is empty")
    if prompt is None and "prompt_ids" in row:
        raise UserError(f"{origin}: token ids are continued with --ids")
    if prompt is None:
        raise UserError(
            f"{origin}: needs messages (a list of role and content) or prompt (a text); found keys"
            f" {', '.join(row) or 'none'}; dataset.fields.prompt=KEY takes another one"
        )
    messages = prompt.messages
    keywords = {**(dataset.chat_template_kwargs if dataset else {})}
    keywords |= prompt.chat_template_kwargs or {}
    if args.system and messages[0]["role"] not in SYSTEM_ROLES:
        messages = [{"role": "system", "content": args.system}, *messages]
    # Columns whose contents are part of `prompt`; read again beside it, they would contradict.
    replaced = [name for name in (*MESSAGES, "system", "history") if name in columns]
    if columns.get("continue_final_message"):
        replaced.append("continue_final_message")  # the turn is complete then
    return {
        **request,
        "prompt": messages,
        "tools": prompt.tools,
        "chat_template_kwargs": keywords or None,
        "shown": show_pictures(messages[-1]["content"]),
        "images": prompt.images,
        "unread": columns.unread_keys,
        "replaced": [columns.renamed.get(name, name) for name in replaced],
    }
