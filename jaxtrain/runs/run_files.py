"""Files that a run may replace or delete: the names in its own record, and nothing else. No jax
here.

A run's folder holds run.json, {"names": [...]}: the names that the run creates there. A name is
recorded before it is created, and only if the folder has no such entry, so that files which existed
before, or which people add under other names, are never touched. "saved": true says that a
checkpoint was finished there once.

Commands write beside a run that trains, and beside each other: what they write has a temporary name
of its own until it is whole, and the moment of replacing something is one's alone (`locked`).
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

from jaxtrain.errors import UserError
from jaxtrain.runs.manifest import write_atomically

RECORD = "run.json"
MODEL_FILES = (
    *("config.json", "adapter_config.json", "tokenizer.json", "tokenizer_config.json"),
    "tekken.json",
    *("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.gguf"),
)
"""Files that identify a folder with a model, an adapter or a tokenizer."""
OUTPUTS = (
    *("model", "merged", "quantized-fp8", "quantized-int8", "quantized-int4"),
    *("draft", "base"),
)
"""Folders that export, merge, quantize and the run itself write in its folder, and may replace."""
UNFINISHED, RETIRED = ".unfinished", ".retired"
SET_ASIDE, DELETED = ".set-aside", ".deleted"
"""Where the run that run.overwrite replaces lies until the new one has begun, and then."""
KEPT = ".before-start"
"""Where a start keeps what it may have to bring back."""
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
        _update_record(folder, names)


def has_saved(folder: Path) -> bool:
    """Return whether a checkpoint was ever finished in a run's folder."""
    try:
        return json.loads((folder / RECORD).read_bytes()).get("saved") is True
    except (OSError, ValueError, AttributeError):
        return False


def note_saved(folder: Path) -> None:
    """Record that a checkpoint was finished in a run's folder."""
    if not has_saved(folder):
        _update_record(folder, (), saved=True)


def _update_record(folder: Path, names: Iterable[str], **facts: Any) -> None:
    with locked(folder):
        recorded = read_names(folder) or set()
        facts = {"saved": True, **facts} if has_saved(folder) else facts
        record = {"made_by": "jaxtrain", "names": sorted(recorded.union(names)), **facts}
        write_atomically(folder / RECORD, json.dumps(record, indent=1) + "\n")


def delete_own(folder: Path) -> None:
    """Delete what the run in `folder` created, its record last, and nothing else."""
    for path in list_own(folder):
        remove(path)


def list_own(folder: Path) -> list[Path]:
    """Return what the run in `folder` created, its record last."""
    names = sorted(read_names(folder) or ())
    record = [folder / RECORD] if (folder / RECORD).exists() else []
    return [path for name in names for path in _find(folder, name)] + record


def set_aside(folder: Path) -> None:
    """Move what the run in `folder` created to a folder in it, from which `put_back` brings it."""
    if read_names(folder) is None:
        return
    _update_record(folder, ())  # runs of older versions have none
    (folder / SET_ASIDE).mkdir()
    for path in list_own(folder):
        path.rename(folder / SET_ASIDE / path.name)


def put_back(folder: Path) -> None:
    """Undo `set_aside`, if the folder holds anything of it: also after a start that was killed."""
    remove(folder / DELETED)
    aside = folder / SET_ASIDE
    if not aside.is_dir():
        return
    # The record goes last and comes first: where it is, the rest was all set aside, and what lies
    # in the folder is of the start that failed.
    if (aside / RECORD).exists():
        if (folder / RECORD).exists():
            delete_own(folder)
        (aside / RECORD).rename(folder / RECORD)
    for path in aside.iterdir():
        path.rename(folder / path.name)
    aside.rmdir()


def delete_aside(folder: Path) -> None:
    """Delete what was set aside."""
    if (folder / SET_ASIDE).is_dir():
        # Renamed first: a kill while it is deleted must not bring half of it back.
        (folder / SET_ASIDE).rename(folder / DELETED)
        remove(folder / DELETED)


class StartUndo:
    """Record from which a refused start restores a run's folder."""

    REPLACED = (
        *("heartbeat.json", "servers.json", "evaluating.json"),
        *("metrics.jsonl", "samples.jsonl"),
    )
    GROWING = ("log.txt", "stacks.txt")

    def __init__(self, folder: Path, *, overwrite: bool):
        """overwrite: everything that the run there made makes room for the new one."""
        self.folder, self.overwrite = folder, overwrite
        self.names = read_names(folder) or set()
        self.kept = folder / KEPT
        if overwrite:
            set_aside(folder)
            return
        remove(self.kept)
        self.kept.mkdir()
        for name in (RECORD, *self.REPLACED):
            if (folder / name).is_file():
                # These files are replaced, never changed in place: a link keeps the content.
                try:
                    os.link(folder / name, self.kept / name)
                except OSError:  # a file system without links
                    shutil.copy2(folder / name, self.kept / name)
        self.sizes = {
            name: (folder / name).stat().st_size
            for name in self.GROWING
            if (folder / name).is_file()
        }

    def run(self) -> None:
        """Restore the folder."""
        if self.overwrite:
            put_back(self.folder)
            return
        for name in (read_names(self.folder) or set()) - self.names:
            for path in _find(self.folder, name):
                remove(path)
        for name in (RECORD, *self.REPLACED):
            if (self.kept / name).exists():
                os.replace(self.kept / name, self.folder / name)
            else:
                remove(self.folder / name)
        for name in self.GROWING:
            if name in self.sizes:
                os.truncate(self.folder / name, self.sizes[name])
            else:
                remove(self.folder / name)
        remove(self.kept)

    def forget(self) -> None:
        """Accept the start: delete the record."""
        delete_aside(self.folder)
        remove(self.kept)


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[bool]:
    """Context in which this process alone changes entries of `folder`, among those that ask; yields
    False, without waiting, where another one does. File systems without locks have none."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        free = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            free = False
        except OSError:
            pass
        yield free
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write to, which replaces `folder` when the block succeeds.

    Several processes may do so at once: each result is whole, and the last one stays. Raises
    UserError if `folder` exists but no run wrote it.
    """
    folder = Path(os.path.abspath(folder))
    require_replaceable(folder)
    unfinished = None
    try:
        record_output(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(folder)
        # Beside the folder and not in a temporary one: a rename must stay within a file system.
        name = f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}{UNFINISHED}"
        unfinished = folder.with_name(name)
        unfinished.mkdir()
        with locked(unfinished):  # as long as it is written: see remove_abandoned
            yield unfinished
        # What is still unfinished is its writer's alone, who holds its lock: several policies.
        nested = folder.parent.name.endswith(UNFINISHED)
        with contextlib.nullcontext() if nested else locked(folder.parent):
            require_replaceable(folder)  # another process may have written there meanwhile
            retired = unfinished.with_suffix(RETIRED)
            if folder.exists():
                # Two renames: a folder that is not empty cannot be replaced by one. Killed between
                # them, a process leaves the old model in `retired` and the new one in `unfinished`,
                # both whole.
                os.replace(folder, retired)
            os.replace(unfinished, folder)
            remove(retired)
    except OSError as error:
        raise UserError(
            f"cannot write the model to {folder}: {error.strerror or error}; verbs take another"
            " place with --output, runs with run.output_dir"
        ) from None
    finally:
        if unfinished is not None:
            with contextlib.suppress(OSError):
                remove(unfinished)


def remove_abandoned(folder: Path) -> None:
    """Remove what killed processes left unfinished beside `folder`."""
    for path in folder.parent.glob(f".{folder.name}.*{UNFINISHED}"):
        with contextlib.suppress(OSError), locked(path, wait=False) as free:
            if free:
                remove(path)


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


def require_rows_file(path: Path, overwrite: bool) -> None:
    """Raise UserError unless a command may write rows, which are JSON lines, to `path`."""
    if path.suffix.lower() in (".csv", ".parquet", ".arrow"):
        raise UserError(
            f"--output {str(path)!r}: rows are written as JSON lines; let its name end in .jsonl"
        )
    require_writable(path, overwrite)


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
        raise UserError(
            f"{key} {path} cannot be written: {error.strerror or error}; name another place with"
            f" {key}"
        ) from None


def record_output(target: Path) -> None:
    """Record that a model or curves will be written to `target`, if that is a run's standard path
    for them; UserError if the run cannot be written."""
    target = Path(os.path.abspath(target))
    if (
        target.name in (*OUTPUTS, "curves.png", "report.html")
        and read_names(target.parent) is not None
    ):
        try:
            claim_names(target.parent, [target.name], "--output")
        except OSError as error:
            raise UserError(
                f"{target.parent} cannot be written: {error.strerror or error}; name another place"
                " with --output"
            ) from None


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
