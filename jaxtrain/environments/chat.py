"""Environments defined by a function `async def run(row, chat, **options)`, and two built-in ones:
answers with tools, and continued dialogues of the data."""

import copy
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from jaxtrain.config import EnvConfig
from jaxtrain.data.chat.messages import SYSTEM_ROLES
from jaxtrain.environments.conversation import ChatRules, Conversation
from jaxtrain.environments.single_turn import find_prompt
from jaxtrain.environments.token_history import TurnTemplate
from jaxtrain.environments.tools import Tool, Toolbox
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Engine, Sampling
from jaxtrain.generation.episodes import Episode, as_game

Play = Callable[..., Awaitable[Any]]


class ChatEnv:
    """`episodes.Env` around a function that plays one episode through a Conversation."""

    def __init__(
        self,
        tokenizer: Any,
        play: Play,
        config: EnvConfig,
        *,
        name: str,
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
        row_tokens: int | None = None,
        row_patches: int | None = None,
        remote: bool = False,
    ):
        """name: name of its rewards. row_tokens: longest sequence that can be trained. row_patches:
        patches of its images, at most. remote: True if episodes run on other machines."""
        self.template, self.play, self.config = TurnTemplate(tokenizer), play, config
        self.name, self.tools = name, tools
        self.row_tokens, self.row_patches = row_tokens, row_patches
        self.options, self.remote = dict(options or {}), remote

    def close(self) -> None:
        """Close the object that plays, if it has a method `close`."""
        if (close := getattr(getattr(self.play, "__self__", None), "close", None)) is not None:
            close()

    async def run(
        self, row: Mapping[str, Any], engine: Engine, sampling: Sampling, index: int
    ) -> Episode:
        """Play an episode on a copy of the row; UserError if the function returns anything else."""
        config = self.config
        rules = ChatRules(
            name=self.name,
            max_turns=config.max_turns,
            rewritten=config.history == "template",
            kwargs=row.get("chat_template_kwargs"),
            row_tokens=self.row_tokens,
            row_patches=self.row_patches,
        )
        tools = Toolbox(self.tools, config.tool_seconds)
        chat = Conversation(self.template, engine, sampling, index, rules, tools=tools)
        outcome = await self.play(copy.deepcopy(dict(row)), chat, **self.options)
        if isinstance(outcome := as_game(outcome), Episode):
            return outcome
        if outcome is None or isinstance(outcome, int | float | Mapping):
            return chat.finish(outcome)
        raise UserError(
            f"environment {self.name}: it returned {outcome!r:.80}; return chat.finish(reward=...),"
            " a number, or nothing where section rewards judges"
        )


async def use_tools(
    row: Mapping[str, Any], chat: Conversation, column: str, system: str | None
) -> Episode:
    """Play the environment `tools`: the row's prompt, then turns and tool calls up to an answer."""
    ask(row, chat, column, system)
    await chat.answer()
    return chat.finish()


async def play_dialogue(
    row: Mapping[str, Any], chat: Conversation, column: str, system: str | None
) -> Episode:
    """Play the environment `dialogue`: the row's prompt, an answer, then its `remaining_turns`,
    with assistant turns sampled again and all others as given. Only the first answer trains."""
    ask(row, chat, column, system)
    chat.schemas = list(row.get("tools") or [])
    await chat.draw()
    for message in row.get("remaining_turns") or []:
        if chat.full:
            break
        if message["role"] == "assistant":
            await chat.draw()
        else:
            chat.say(message)
    episode = chat.finish()
    for sequence in episode.sequences:
        sequence.sampled[:] = [
            d and turn == 0 for d, turn in zip(sequence.sampled, sequence.turns, strict=True)
        ]
    return episode


def ask(row: Mapping[str, Any], chat: Conversation, column: str, system: str | None) -> None:
    """Add a row's prompt to the conversation, after `system` unless it has a system message."""
    prompt = find_prompt(row, column, chat.images)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system is not None and messages[0].get("role") not in SYSTEM_ROLES:
        chat.say(system, "system")
    chat.say(messages)


def takes_chat(function: Any) -> bool:
    """Return True for a function of (row, chat, **options), False for one of (row, engine,
    sampling, index)."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    names = [name for name in names if name != "self"]
    return len(names) == 2 or names[1:2] == ["chat"]


def check_options(key: str, play: Play, options: Mapping[str, Any]) -> None:
    """Raise UserError for a function that does not accept (row, chat, **options)."""
    if not inspect.iscoroutinefunction(play):
        raise UserError(f"{key} is no coroutine function: write `async def run(row, chat)`")
    try:
        inspect.signature(play).bind({}, None, **options)
    except TypeError as error:
        raise UserError(
            f"{key} cannot be called with (row, chat, **env.options): {error}"
        ) from None
