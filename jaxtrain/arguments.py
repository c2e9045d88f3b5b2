"""How the verbs read their command lines."""

import argparse
import os
from pathlib import Path
from typing import NoReturn

from jaxtrain.errors import UserError


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are a UserError: one line, without control characters."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}; {self.prog} -h tells what it takes")


def expand_path(text: str) -> Path:
    """A path of the command line; a leading ~ is somebody's home, also after `--output=`."""
    return Path(os.path.expanduser(text))
