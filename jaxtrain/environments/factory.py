"""From section `env` to an environment."""

import inspect
from typing import Any

from jaxtrain import plugins
from jaxtrain.config import EnvConfig
from jaxtrain.config.secrets import reveal
from jaxtrain.environments.chat import ChatEnv, check_options, play_dialogue, takes_chat, use_tools
from jaxtrain.environments.tools import load_tools
from jaxtrain.errors import UserError
from jaxtrain.generation.episodes import Env

BUILTIN = {
    "single_turn": "jaxtrain.environments.single_turn:SingleTurn",
    "calculator": "jaxtrain.environments.calculator:CalculatorEnv",
    "tools": use_tools,
    "dialogue": play_dialogue,
    "nemo_gym": "jaxtrain.environments.nemo_gym:NemoGym",
    "openenv": "jaxtrain.environments.openenv:OpenEnv",
    "verifiers": "jaxtrain.environments.verifiers:Verifiers",
}


def open_env(
    config: EnvConfig,
    tokenizer: Any,
    row_tokens: int | None = None,
    section: str = "env",
    folder: str | None = None,
) -> Env:
    """The environment that the section names; UserError where it cannot be found or made.

    row_tokens: longest sequence that can be trained; conversations end there. section: its key.
    folder: the run's, for logs of processes. Nothing is started before the first episode; what then
    was is ended by the environment's `close()`, where it has one.
    """
    key = f"{section}.kind" if config.path is None else f"{section}.path"
    name = config.path or config.kind
    made = plugins.find("envs", name, BUILTIN, key=key)
    match config.kind:
        case "single_turn":
            return made(
                tokenizer, config.prompt_column, config.system, config.raw, config.special_tokens
            )
        case "calculator":
            return made(tokenizer, config.max_turns, config.history == "template")
        case "openenv":
            play = made(config, section).run
            return ChatEnv(
                tokenizer, play, config, name="openenv", row_tokens=row_tokens, remote=True
            )
        case "verifiers":
            return made(tokenizer, config, row_tokens, section)
        case "nemo_gym":
            return made(tokenizer, config.gym, row_tokens, f"{section}.gym", folder)
    tools = load_tools(config.tools, f"{section}.tools")
    options, what = reveal(config.options, f"{section}.options"), f"{key} {name!r}"
    if config.kind in ("tools", "dialogue"):
        options = {"column": config.prompt_column, "system": config.system}
    play: Any = made
    label = getattr(made, "__name__", name)
    if inspect.isclass(made) or not (inspect.iscoroutinefunction(made) or takes_chat(made)):
        env = make_env(made, tokenizer, options, f"{what} cannot be made with", section)
        play, options = getattr(env, "run", None), {}
        if not takes_chat(play):
            if inspect.iscoroutinefunction(play) and not tools:
                return env
            raise UserError(
                f"{what} needs a method `async def run(self, row, chat)`, or"
                " `async def run(self, row, engine, sampling, index)` that returns an Episode"
                + (f"; {section}.tools goes with the first" if tools else "")
            )
    check_options(what, play, options)
    return ChatEnv(
        tokenizer, play, config, name=label, tools=tools, options=options, row_tokens=row_tokens
    )


def make_env(made: Any, tokenizer: Any, options: dict[str, Any], what: str, section: str) -> Any:
    """What a class or a factory makes; a class that plays a chat gets the tokenizer only if it asks
    for it."""
    arguments = (tokenizer,)
    if takes_chat(getattr(made, "run", None)):
        asked = list(inspect.signature(made).parameters)[:1] == ["tokenizer"]
        arguments = (tokenizer,) if asked else ()
    try:
        return made(*arguments, **options)
    except TypeError as error:
        given = "(tokenizer, **" if arguments else "(**"
        raise UserError(f"{what} {given}{section}.options): {error}") from None
