"""Look up what a name in the config refers to, inside or outside jaxtrain.

    "chat"                  built in; imported on first use
    "dialogue"              an installed package's, by its entry point in group jaxtrain.formats
    "package.module:name"   any importable module, the working directory included
    "file.py:name"          from a file

docs/extending.md has an example for each of GROUPS but tools, which docs/environments.md has.
"""

import difflib
import functools
import importlib
import importlib.util
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.text_safety import escape_control_chars

GROUPS = {
    "tasks": "task.kind",
    "formats": "data.datasets.N.format",
    "models": "architectures of a config.json; model.family",
    "rewards": "rewards.N.function",
    "envs": "env.kind",
    "tools": "env.tools",
    "engines": "rollout.engine",
    "curators": "rollout.curator",
    "sinks": "log.sinks",
    "observers": "observers.N.kind",
    "optimizers": "optim.name",
    "schedules": "optim.lr_scheduler",
    "verbs": "the word behind jaxtrain",
}
"""Extension points, and the config keys or words that select them."""
FAILURES = (Exception, SystemExit)
"""Exceptions of foreign code that are reported under its name; sys.exit() would otherwise end a run
as if it had succeeded."""
SLOW_SECONDS = 10.0
"""After so long an import is named, and again whenever that time has doubled."""

before_import: list[Callable[[], None]] = []
"""Functions that are called before code from outside jaxtrain is imported."""


def find(
    group: str,
    name: str,
    builtin: Mapping[str, Any],
    *,
    key: str,
    modules: bool = False,
    instead: str | None = None,
) -> Any:
    """Return what `name` refers to among the built-ins, the entry points of a group, and import
    paths.

    builtin: a value may be "package.module:name" or "package.module", and is then imported here.
    key: the config key that messages name. modules: accept a module, "package.module" or "file.py",
    as well as a member of one. instead: for a group without import paths, the advice in the error
    about an unknown name.
    """
    entry = check(group, name, builtin, key=key, modules=modules, instead=instead)
    if name in builtin:
        value = builtin[name]
        return EntryPoint(name, value, group).load() if isinstance(value, str) else value
    module_name, attribute = split_path(name, modules)
    if entry is not None:
        module_name, attribute = entry.module, entry.attr or ""
    target = load_module(module_name, key=f"{key} {name!r}")
    for part in filter(None, attribute.split(".")):
        if not hasattr(target, part):
            raise UserError(
                f"{key} {name!r}: {module_name} has no {part!r}{suggest(part, dir(target))}"
            )
        target = getattr(target, part)
    if not callable(target) and not (modules and isinstance(target, ModuleType)):
        expected = "a module or a class" if modules else "a class or function"
        raise UserError(f"{key} {name!r} is a {type(target).__name__}; it must be {expected}")
    return target


def check(
    group: str,
    name: str,
    builtin: Collection[str],
    *,
    key: str = "",
    modules: bool = False,
    instead: str | None = None,
) -> EntryPoint | None:
    """Refuse a name that is unknown or ambiguous; return its entry point if it has one.

    Imports nothing, so an import path is not followed. Without `key` the message has no prefix.
    """
    prefix, entries = f"{key}: " if key else "", list_entry_points(group)
    matches = [entry for entry in entries if entry.name == name]
    owners = " and ".join(find_owner(entry) for entry in matches)
    if name in builtin and matches:
        raise UserError(
            f"{prefix}{name!r} is built in, but {owners} brings another one by entry point"
            f" jaxtrain.{group}; rename it there, or uninstall that package"
        )
    if len(matches) > 1:
        raise UserError(
            f"{prefix}{name!r} is brought by {owners}, all by entry point jaxtrain.{group};"
            " uninstall all but one, or give package.module:name"
        )
    if name in builtin or matches or (instead is None and split_path(name, modules)[0]):
        return matches[0] if matches else None
    choices = [*builtin, *(entry.name for entry in entries)]
    advice = instead or 'give "package.module:name" or "file.py:name"'
    brought = ", ".join(f"{entry.name} (of {find_owner(entry)})" for entry in entries) or "none"
    raise UserError(
        f"{prefix}there is no {name!r}{suggest(name, choices)}; built in:"
        f" {', '.join(builtin) or 'none'}; by entry point jaxtrain.{group}: {brought}; or {advice}"
    )


def list_entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of jaxtrain.<group>, sorted by name."""
    return _scan(f"jaxtrain.{group}", tuple(sys.path))


def list_groups() -> dict[str, tuple[EntryPoint, ...]]:
    """Entry points of all groups that begin with "jaxtrain.", by the rest; none is imported."""
    named = sorted(name for name in entry_points().groups if name.startswith("jaxtrain."))
    groups = [*GROUPS, *(name.removeprefix("jaxtrain.") for name in named)]
    return {group: list_entry_points(group) for group in dict.fromkeys(groups)}


def load_module(module_name: str, *, key: str) -> ModuleType:
    """Import the module that "package.module" or "file.py" names; a file is imported once per
    process.

    Raises UserError if it does not exist or its import fails, with the file and line of the error.
    """
    working_dir = str(Path.cwd())
    if working_dir not in sys.path:  # as with `python -m`; it stays, for what is imported later
        sys.path.insert(0, working_dir)
    is_file = module_name.endswith(".py")
    if is_file and not Path(module_name).is_file():
        raise UserError(f"{key}: the file {module_name} does not exist")
    prepare_import()
    try:
        with watch_import(key):
            return (
                _import_file(Path(module_name).resolve())
                if is_file
                else importlib.import_module(module_name)
            )
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the border: whatever an import of foreign code may raise
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(
            f"{error.name}."
        ):
            raise UserError(
                f"{key} cannot be imported: there is no module {error.name}; the folder that holds"
                " it must be the working directory or on PYTHONPATH"
            ) from None
        raise UserError(f"{key} cannot be imported: {describe(error)}") from error


def prepare_import() -> None:
    """Call what has to run before code from outside jaxtrain, or a package that imports PyTorch, is
    imported."""
    for prepare in tuple(before_import):
        prepare()


@contextmanager
def watch_import(key: str) -> Iterator[None]:
    """Name an import that takes long on stderr, with the line where it stands: what never ends is
    then known, and what takes an hour may."""
    done = threading.Event()
    arguments = (key, threading.get_ident(), done)
    threading.Thread(target=_watch, args=arguments, name="import", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _watch(key: str, thread: int, done: threading.Event) -> None:
    start, patience = time.monotonic(), SLOW_SECONDS
    while not done.wait(patience - (time.monotonic() - start)):
        frame = sys._current_frames().get(thread)
        if frame is None:
            return
        location = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        seconds = time.monotonic() - start
        print(
            f"warning: {key}: still being imported after {seconds:.0f} s, at {location}",
            file=sys.stderr,
            flush=True,
        )
        patience *= 2


def describe(error: BaseException) -> str:
    """Return an error of foreign code and where it was raised: "KeyError: 'x' (my_format.py:3)"."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{f.filename}:{f.lineno}" for f in frames if not f.filename.startswith("<frozen")]
    text: object = error
    if isinstance(error, SystemExit):
        text = f"it ends the program, by sys.exit({error.code!r})"
    return f"{type(error).__name__}: {text} ({places[-1]})"


def trace(error: BaseException, size: int = 1500) -> str:
    """Return the last `size` characters of an error's traceback, for a log."""
    text = escape_control_chars("".join(traceback.format_exception(error)).rstrip())
    return text if len(text) <= size else f"...{text[-size:]}"


def split_path(name: str, modules: bool) -> tuple[str, str]:
    """Split an import path into ("package.module", "name"). The last separator may be a dot, as in
    TRL; ("package.module", "") if `modules` allows that, ("", "") if it is no path."""
    if modules and ":" not in name:
        return (name, "") if "." in name else ("", "")
    module_name, _, attribute = name.rpartition(":" if ":" in name else ".")
    return (module_name, attribute) if attribute and not name.endswith(".py") else ("", "")


@functools.cache
def _scan(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Scan a group's entry points; cached per sys.path `path`, because a scan takes
    milliseconds."""
    return tuple(
        sorted(entry_points(group=group), key=lambda entry: (entry.name, find_owner(entry)))
    )


def _import_file(path: Path) -> ModuleType:
    name = f"jaxtrain_plugin_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None  # any file that ends in .py has one
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def find_owner(entry: EntryPoint) -> str:
    """Return the name of the distribution that provides an entry point."""
    return "an unnamed package" if entry.dist is None else entry.dist.name


def suggest(name: str, choices: Collection[str]) -> str:
    """Return the end of a message about an unknown name: "; did you mean 'chat'?", or ""."""
    near = difflib.get_close_matches(name, choices, 1)
    return f"; did you mean {near[0]!r}?" if near else ""
