"""Parsing of the verbs' command lines."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jaxtrain.errors import UserError


class HelpPrinted(SystemExit):
    """The command line asked for help, which is printed."""


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are a UserError: one line, without control characters."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if message:
            self._print_message(message, sys.stderr)
        raise HelpPrinted(status)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}; {self.prog} -h tells what it takes")


def add_overrides(parser: Parser) -> None:
    """Add the argument of a verb that opens runs: changes of a run's config."""
    parser.add_argument(
        "overrides", nargs="*", help="of a run: section.key=value, such as model.path=MOVED_BASE"
    )


def add_model(parser: Parser, overrides: str) -> None:
    """Add the arguments of a verb that opens one model: the model, and changes of its config, with
    `overrides` as their help."""
    parser.add_argument(
        "model",
        type=os.path.expanduser,
        help="a run's output_dir, a Hugging Face folder or a Hub id",
    )
    parser.add_argument("overrides", nargs="*", help=overrides)


def require_run(verb: str, source: Path, overrides: Sequence[str], is_run: bool) -> None:
    """Raise UserError for overrides of something that is no run."""
    if overrides and not is_run:
        raise UserError(f"{verb}: {source} is no run, and {overrides[0]!r} changes a run's config")


def require_exists(verb: str, path: Path) -> None:
    """Raise UserError for a path that is not there, with where a relative one was looked for."""
    if not os.path.lexists(path):
        raise UserError(f"{verb}: {os.path.abspath(path)} does not exist")


def expand_path(text: str) -> Path:
    """Expand a leading ~ of a path on the command line, also after `--output=`."""
    return Path(os.path.expanduser(text))
