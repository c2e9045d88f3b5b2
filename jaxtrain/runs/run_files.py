"""Files that a run may replace or delete: the names in its own record, and nothing else. No jax
here.

A run's folder holds run.json, {"names": [...]}: the names that the run creates there. A name is
recorded before it is created, and only if the folder has no such entry, so that files which existed
before, or which people add under other names, are never touched.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO

from jaxtrain.errors import UserError
from jaxtrain.runs.manifest import write_atomically

RECORD = "run.json"
MODEL_FILES = (
    *("config.json", "adapter_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.gguf"),
)
"""Files that identify a folder with a model, an adapter or a tokenizer."""
OUTPUTS = ("model", "merged", "quantized-fp8", "quantized-int8", "quantized-int4")
"""Folders that export, merge and quantize write in a run's folder, and may replace."""
UNRECORDED_NAMES = (
    "config.json attempts.jsonl checkpoints metrics.jsonl samples.jsonl log.txt curves.png eval"
    " stacks.txt heartbeat.json model merged tensorboard profile wandb wandb_id"
    " nonfinite_batch_step_*.npz"
).split()
"""Names that runs without a record created."""


def read_names(folder: Path) -> set[str] | None:
    """Return the names that the run in `folder` created or will create; None if there is no run.

    Raises UserError if its record is damaged.
    """
    path = folder / RECORD
    try:
        names = json.loads(path.read_bytes())["names"]
        if isinstance(names, list) and all(isinstance(n, str) and _is_name(n) for n in names):
            return set(names)
        raise ValueError
    except (FileNotFoundError, NotADirectoryError):
        return (
            {name for name in UNRECORDED_NAMES if _find(folder, name)}
            if _is_older(folder)
            else None
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(
            f"{path} is damaged, so it is unknown which files in {str(folder)!r} belong to the run;"
            f" name another folder, or delete {RECORD} if nothing there is to be kept by its name"
        ) from None


def find_foreign(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the entries of `folder` that match these names (or patterns) and do not belong to the
    run."""
    run_names = read_names(folder)
    existing = [path.name for name in sorted(names) for path in _find(folder, name)]
    if run_names is None:  # no run: then it must not hold a model either
        existing += [path.name for name in MODEL_FILES for path in _find(folder, name)]
    foreign = [name for name in existing if not _has(run_names or (), name)]
    return list(dict.fromkeys(foreign))


def require_own(folder: Path, names: Iterable[str], key: str = "run.output_dir") -> None:
    """Raise UserError if an entry of `folder` matches these names but does not belong to the run;
    only reads."""
    if foreign := find_foreign(folder, names):
        omitted = f" and {len(foreign) - 4} more" if len(foreign) > 4 else ""
        raise UserError(
            f"{key} {str(folder)!r} holds {describe(folder)}: {', '.join(foreign[:4])}{omitted} was"
            " not made by a run there and would be overwritten. Name another folder, or move it"
            " away; run.overwrite deletes only what a run made"
        )


def claim_names(folder: Path, names: Iterable[str], key: str = "run.output_dir") -> None:
    """Add these names to the folder's record; raise UserError if one exists and is foreign."""
    require_own(folder, names, key)
    recorded = read_names(folder) or set()
    if not recorded.issuperset(names) or not (folder / RECORD).exists():
        folder.mkdir(parents=True, exist_ok=True)
        record = {"made_by": "jaxtrain", "names": sorted(recorded.union(names))}
        write_atomically(folder / RECORD, json.dumps(record, indent=1) + "\n")


def delete_own(folder: Path) -> None:
    """Delete what the run in `folder` created, its record last, and nothing else."""
    for name in sorted(read_names(folder) or ()):
        for path in _find(folder, name):
            remove(path)
    remove(folder / RECORD)


def require_replaceable(target: Path, key: str = "--output") -> None:
    """Raise UserError unless a model may be written as the folder `target`: it does not exist, is
    empty, or is the exported or merged model of the surrounding run."""
    target = Path(os.path.abspath(target))
    if not os.path.lexists(target) or (_is_folder(target) and not any(target.iterdir())):
        return
    if target.name in OUTPUTS and not target.is_symlink():
        if target.name in (read_names(target.parent) or ()):
            return
    content = f"holds {describe(target)}" if target.is_dir() else "is no folder"
    linked = f" (a link to {os.path.realpath(target)})" if target.is_symlink() else ""
    raise UserError(
        f"{key} {str(target)!r}{linked} is there already and {content}, which is never overwritten;"
        " name a new folder, or move this one away"
    )


def require_writable(path: Path, overwrite: bool, key: str = "--output") -> None:
    """Raise UserError unless a command may write the file `path`: it does not exist, or `overwrite`
    allows replacing it. Pipes and devices are always writable."""
    if path.is_dir():
        raise UserError(f"{key} {str(path)!r} is a folder; name a file")
    around = next((folder for folder in path.absolute().parents if os.path.lexists(folder)), None)
    if around is not None and not around.is_dir():
        raise UserError(f"{key} {str(path)!r}: {str(around)!r} is no folder; name a file elsewhere")
    if os.path.lexists(path) and not overwrite and not _is_stream(path):
        raise UserError(
            f"{key} {str(path)!r} is there already; name another file, or add --overwrite to"
            " replace it"
        )


def write_output(path: Path, content: bytes, key: str = "--output") -> None:
    """Write a command's output file and create its folder; a failure leaves the previous file
    intact."""
    with open_output(path, key) as file:
        file.write(content)


@contextlib.contextmanager
def open_output(path: Path, key: str = "--output") -> Iterator[IO[bytes]]:
    """Open a file that takes the place of `path` when the block ends well."""
    try:
        if _is_stream(path):
            with path.open("wb") as stream:
                yield stream
            return
        path = Path(os.path.realpath(path))  # replace the target of a link, not the link
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with unfinished.open("wb") as file:
                yield file
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{key} {path} cannot be written: {error.strerror or error}") from None


def record_output(target: Path) -> None:
    """Record that a model or curves will be written to `target`, if that is a run's standard path
    for them."""
    target = Path(os.path.abspath(target))
    if (
        target.name in (*OUTPUTS, "curves.png", "report.html")
        and read_names(target.parent) is not None
    ):
        claim_names(target.parent, [target.name], "--output")


def describe(folder: Path) -> str:
    """Describe the content of a folder in words."""
    if (folder / RECORD).exists() or _is_older(folder):
        return "a run"
    if (folder / "adapter_config.json").exists():
        return "a PEFT adapter"
    if any(_find(folder, name) for name in MODEL_FILES):
        return "a Hugging Face model"
    return "files"


def remove(path: Path) -> None:
    """Delete a file, a folder or a link (never its target); do nothing if it does not exist."""
    if _is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_stream(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _has(names: Collection[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in names)


def _is_name(name: str) -> bool:
    """Return True if a recorded name stays inside the folder and does not match all of it."""
    return name not in ("", ".", "..") and "/" not in name and name.strip("*?[]!") != ""


def _find(folder: Path, name: str) -> list[Path]:
    """Return the paths in `folder` that match a name or a pattern, dangling links included."""
    if "*" in name:
        return sorted(folder.glob(name))
    return [folder / name] if os.path.lexists(folder / name) else []


def _is_older(folder: Path) -> bool:
    """Return True if the folder holds attempts of a run without a record, and that run's config or
    none."""
    try:
        with (folder / "attempts.jsonl").open("rb") as file:
            first = json.loads(file.readline(1 << 20))
        if not isinstance(first, dict) or "attempt" not in first:
            return False
        config = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError as error:
        return Path(error.filename).name == "config.json"
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and "architectures" not in config and "run" in config
