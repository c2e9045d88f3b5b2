"""docs/command_line.md: every verb with what it takes, made of the table of verbs and parsers."""

import argparse
from collections.abc import Collection, Iterator
from contextlib import suppress
from importlib.metadata import EntryPoint
from unittest.mock import patch

from jaxtrain.arguments import Parser, expand_path
from jaxtrain.cli import TRAINING, VERBS

TRAIN = "jaxtrain.cli.train:run_train"
HEAD = """# The command line

`jaxtrain VERB -h` tells the same. `python -m jaxtrain.main` is the same program; `jaxtrain --help`
lists every key of the config, `jaxtrain --version` what is installed. RUN is a run's output_dir,
MODEL a Hugging Face folder or Hub id. What it ends with: [exit codes](exit_codes.md).

This page is generated: `make docs`.
"""


def find_parser(function: str) -> Parser:
    """The parser by which "package.module:function" reads its command line: the one that is asked
    for help. Without a verb, to train, it stands behind a config."""
    parsers: list[Parser] = []

    def keep(self: Parser, file: object = None) -> None:
        parsers.append(self)

    arguments = ["--config", "c.toml", "-h"] if function == TRAIN else ["-h"]
    with patch.object(Parser, "print_help", keep), suppress(SystemExit):
        EntryPoint("verb", function, "verbs").load()(arguments)
    return parsers[0]


def render_commands() -> str:
    """The page."""
    parts = [HEAD, "\n".join(["## Training", "", *_describe(TRAIN, "jaxtrain", list(TRAINING))])]
    for name, verb in VERBS.items():
        head = [f"## {name}", "", _sentence(verb.purpose), ""]
        parts.append(
            "\n".join([*head, *_describe(verb.function, f"jaxtrain {name}", [verb.arguments])])
        )
    return "\n".join(parts)


def _describe(function: str, program: str, forms: list[str]) -> list[str]:
    """Usage, purpose and a table of what one verb takes."""
    parser = find_parser(function)
    lines = ["```sh", *(f"{program} {form}".rstrip() for form in forms), "```", ""]
    if parser.description:
        lines += [_sentence(parser.description), ""]
    hidden = [  # required, and not in any form: the verb says it itself
        action
        for action in parser._actions
        if action.required and action.option_strings and action.option_strings[0] not in str(forms)
    ]
    rows = list(_rows(parser, skip=hidden))
    if rows:
        lines += ["| | takes | |", "|---|---|---|"]
        lines += ["| " + " | ".join(row) + " |" for row in rows] + [""]
    return lines


def _rows(
    parser: argparse.ArgumentParser, before: str = "", skip: Collection[argparse.Action] = ()
) -> Iterator[tuple[str, str, str]]:
    """(name, values, meaning) of each argument, those of subcommands behind their names."""
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or action in skip:
            continue
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield (f"`{before}{name}`", "", _cell(inner.description or ""))
                yield from _rows(inner, f"{before}{name} ")
            continue
        values = "" if action.nargs == 0 else _values(action)
        names = ", ".join(f"`{before}{name}`" for name in action.option_strings or [action.dest])
        needed = "required; " if action.required and action.option_strings else ""
        yield names, values, needed + _cell(action.help or "")


def _values(action: argparse.Action) -> str:
    if action.choices is not None:
        return " \\| ".join(f"`{choice}`" for choice in action.choices)
    words = action.metavar or (
        action.dest.upper().replace("-", "_") if action.option_strings else ""
    )
    text = " ".join(words) if isinstance(words, tuple) else words
    many = {"*": "any number", "+": "one or more", "?": "may be left out"}
    return _cell(text or many.get(str(action.nargs), ""))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("%%", "%")


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def run_docs(argv: list[str]) -> None:
    """Print every key of the config, with type, default and meaning, as Markdown."""
    Parser("jaxtrain docs", description=run_docs.__doc__).parse_args(argv)
    from jaxtrain.config.docs import render_pages

    print("\n".join(render_pages().values()), end="")


def run_schema(argv: list[str]) -> None:
    """Print the config's JSON schema, for editors, or write it to a file that the first line of a
    config names: `#:schema schema.json` in TOML, `# yaml-language-server: $schema=schema.json`."""
    parser = Parser("jaxtrain schema", description=run_schema.__doc__)
    parser.add_argument("--output", type=expand_path, help="JSON file; without: the terminal")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it is there")
    args = parser.parse_args(argv)
    from jaxtrain.config.schema import render_schema
    from jaxtrain.runs.run_files import require_writable, write_output

    if args.output is None:
        print(render_schema(), end="")
        return
    require_writable(args.output, args.overwrite)
    write_output(args.output, render_schema().encode())
    print(args.output)
