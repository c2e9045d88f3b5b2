"""Helpers for tests of untrusted files: a verb run in this process, judged as people see it."""

import time
from pathlib import Path

import pytest

from jaxtrain.main import main
from jaxtrain.text_safety import UNSEEN


def run_verb(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """(exit code, what was printed) of a command line that ends well or with a message.

    Fails where it ends with a traceback, takes 20 s, says more than 2,000 characters on stderr, or
    prints what a terminal would obey.
    """
    capsys.readouterr()
    began = time.monotonic()
    try:
        code = main(argv)
    except SystemExit as end:  # argparse's -h
        code = int(end.code or 0)
    shown = capsys.readouterr()
    assert time.monotonic() - began < 20
    assert code in (0, 1, 2), argv
    assert len(shown.err) <= 2000 and "Traceback" not in shown.err, shown.err
    assert not UNSEEN.search(shown.err) and not UNSEEN.search(shown.out)
    return code, shown.out + shown.err


def damage(path: Path, how: str) -> None:
    """Make of a file what disks, editors and kills make of files."""
    content = path.read_bytes() if path.is_file() else b""
    path.unlink(missing_ok=True)
    if how == "folder":
        path.mkdir()
    elif how == "cut":
        path.write_bytes(content[: len(content) * 2 // 3])
    else:
        path.write_bytes(
            {
                "empty": b"",
                "binary": b"\xff\xfe\x00\x1b[31m" * 9,
                "nul": b"\0" * 300,
                "list": b"[]\n",
                "number": b"5\n",
                "null": b"null\n",
                "deep": b'{"step":' * 5000 + b"1\n",
                "types": b'{"step": "\\u001b[31m", "run": 5, "model": [], "optim": null}\n',
            }[how]
        )


DAMAGES = ["folder", "cut", "empty", "binary", "nul", "list", "number", "null", "deep", "types"]
