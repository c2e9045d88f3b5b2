"""Opens the environment of section `env`."""

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
    row_patches: int | None = None,
) -> Env:
    """Build the environment that the section names; UserError if that fails.

    row_tokens: longest sequence that can be trained; conversations end there. section: its key in
    the config. folder: folder of the run, for logs of processes. row_patches: patches of images
    that a row can hold; prompts with more are refused before they are answered. Nothing starts
    before the first episode; `close()` of the environment, if it has one, stops what was started.
    """
    key = f"{section}.kind" if config.path is None else f"{section}.path"
    name = config.path or config.kind
    factory = plugins.find("envs", name, BUILTIN, key=key)
    match config.kind:
        case "single_turn":
            column, controls = config.prompt_column, config.special_tokens
            return factory(tokenizer, column, config.system, config.raw, controls, row_patches)
        case "calculator":
            return factory(tokenizer, config.max_turns, config.history == "template")
        case "openenv":
            play = factory(config, section).run
            return ChatEnv(
                tokenizer, play, config, name="openenv", row_tokens=row_tokens, remote=True
            )
        case "verifiers":
            return factory(tokenizer, config, row_tokens, section)
        case "nemo_gym":
            return factory(tokenizer, config.gym, row_tokens, f"{section}.gym", folder)
    tools = load_tools(config.tools, f"{section}.tools")
    options, label_of_key = reveal(config.options, f"{section}.options"), f"{key} {name!r}"
    if config.kind in ("tools", "dialogue"):
        options = {"column": config.prompt_column, "system": config.system}
    play: Any = factory
    label = getattr(factory, "__name__", name)
    if inspect.isclass(factory) or not (
        inspect.iscoroutinefunction(factory) or takes_chat(factory)
    ):
        env = make_env(factory, tokenizer, options, f"{label_of_key} cannot be made with", section)
        play, options = getattr(env, "run", None), {}
        if not takes_chat(play):
            if inspect.iscoroutinefunction(play) and not tools:
                return env
            raise UserError(
                f"{label_of_key} needs a method `async def run(self, row, chat)`, or"
                " `async def run(self, row, engine, sampling, index)` that returns an Episode"
                + (f"; {section}.tools goes with the first" if tools else "")
            )
    check_options(label_of_key, play, options)
    return ChatEnv(
        tokenizer,
        play,
        config,
        name=label,
        tools=tools,
        options=options,
        row_tokens=row_tokens,
        row_patches=row_patches,
    )


def make_env(
    factory: Any, tokenizer: Any, options: dict[str, Any], problem: str, section: str
) -> Any:
    """Call a class or factory. A class that plays a chat receives the tokenizer only if `tokenizer`
    is its first parameter."""
    arguments = (tokenizer,)
    if takes_chat(getattr(factory, "run", None)):
        takes_tokenizer = list(inspect.signature(factory).parameters)[:1] == ["tokenizer"]
        arguments = (tokenizer,) if takes_tokenizer else ()
    try:
        return factory(*arguments, **options)
    except TypeError as error:
        signature = "(tokenizer, **" if arguments else "(**"
        raise UserError(f"{problem} {signature}{section}.options): {error}") from None
