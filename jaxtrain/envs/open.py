"""From section `env` to an environment."""

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from jaxtrain.config import EnvConfig
from jaxtrain.envs.calculator import CalculatorEnv
from jaxtrain.envs.single_turn import SingleTurn
from jaxtrain.errors import UserError
from jaxtrain.rollout.types import Env


def open_env(config: EnvConfig, tokenizer: Any) -> Env:
    """The environment that the section names; UserError where a class cannot be found or made."""
    match config.kind:
        case "single_turn":
            return SingleTurn(tokenizer, config.prompt_column, config.system, config.raw)
        case "calculator":
            return CalculatorEnv(tokenizer, config.max_turns)
    assert config.path is not None  # section env checks it
    made = find_class(config.path)
    try:
        env = made(tokenizer, **config.options)
    except TypeError as error:
        raise UserError(
            f"env.path {config.path!r} cannot be made with (tokenizer, **env.options): {error}"
        ) from None
    if not inspect.iscoroutinefunction(getattr(env, "run", None)):
        raise UserError(
            f"env.path {config.path!r} needs a method `async def run(self, row, engine, sampling,"
            " index)` that returns an Episode"
        )
    return env


def find_class(path: str) -> Any:
    """What "package.module:Class" or "file.py:Class" names; UserError where it is not there."""
    place, _, name = path.rpartition(":")
    if not place:
        raise UserError(f'env.path {path!r} must read "package.module:Class" or "file.py:Class"')
    if place.endswith(".py"):
        module = import_file(Path(place))
    else:
        sys.path.insert(0, str(Path.cwd()))
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise UserError(
                f"env.path {path!r} cannot be imported ({error}); its folder must be the working"
                " directory or on PYTHONPATH"
            ) from None
        finally:
            sys.path.pop(0)
    if not callable(getattr(module, name, None)):
        raise UserError(f"env.path {path!r}: {place} has no class {name!r}")
    return getattr(module, name)


def import_file(path: Path) -> Any:
    """The module that a Python file is."""
    if not path.is_file():
        raise UserError(f"env.path: the file {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"jaxtrain_env_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # any file that ends in .py has one
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
