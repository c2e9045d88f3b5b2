"""Parsing of the verbs' command lines."""

import argparse
import os
from pathlib import Path
from typing import NoReturn

from jaxtrain.errors import UserError


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are a UserError: one line, without control characters."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}; {self.prog} -h tells what it takes")


def expand_path(text: str) -> Path:
    """Expand a leading ~ of a path on the command line, also after `--output=`."""
    return Path(os.path.expanduser(text))
