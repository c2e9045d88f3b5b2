"""From section `env` to an environment."""

import inspect
from typing import Any

from jaxtrain import plugins
from jaxtrain.config import EnvConfig
from jaxtrain.errors import UserError
from jaxtrain.rollout.types import Env

BUILTIN = {
    "single_turn": "jaxtrain.envs.single_turn:SingleTurn",
    "calculator": "jaxtrain.envs.calculator:CalculatorEnv",
}


def open_env(config: EnvConfig, tokenizer: Any) -> Env:
    """The environment that the section names; UserError where a class cannot be found or made."""
    key, name = ("env.kind", config.kind) if config.path is None else ("env.path", config.path)
    made = plugins.find("envs", name, BUILTIN, key=key)
    match config.kind:
        case "single_turn":
            return made(tokenizer, config.prompt_column, config.system, config.raw)
        case "calculator":
            return made(tokenizer, config.max_turns)
    try:
        env = made(tokenizer, **config.options)
    except TypeError as error:
        raise UserError(
            f"{key} {name!r} cannot be made with (tokenizer, **env.options): {error}"
        ) from None
    if not inspect.iscoroutinefunction(getattr(env, "run", None)):
        raise UserError(
            f"{key} {name!r} needs a method `async def run(self, row, engine, sampling, index)`"
            " that returns an Episode"
        )
    return env
