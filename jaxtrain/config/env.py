"""Section env: the world that the policy acts in."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from jaxtrain.config.base import RESUMABLE, Place, Problems, Section, broken, known_in, unread
from jaxtrain.config.gym import GymConfig, find_gym_conflicts
from jaxtrain.config.limits import ROWS, SECONDS
from jaxtrain.config.openenv import OpenEnvConfig, find_openenv_conflicts
from jaxtrain.config.verifiers import VerifiersConfig, find_verifiers_conflicts

BUILTIN = ("single_turn", "calculator", "tools", "dialogue", "nemo_gym", "openenv", "verifiers")


class EnvConfig(Section):
    """Environment that turns a row of data into an episode: one answer, or a loop of model and
    tools."""

    kind: Annotated[str, known_in("envs", (*BUILTIN, "python"))] = "single_turn"
    """single_turn: one answer to the row's prompt. calculator: the built-in agent, which calls its
    tool and is asked on, over rows of builtin:calculator. tools: a model that answers the row's
    prompt with the functions of `tools`. dialogue: one answer, then the conversation's remaining
    turns, the assistant's drawn and the others as the data have them; the first answer alone is
    trained (task.kind ebft). nemo_gym: an agent of NeMo Gym (section gym). openenv: a game on an
    OpenEnv server (section openenv). verifiers: a task of a verifiers taskset (section verifiers).
    Or a custom one: a function `async run(row, chat, **options)`, or a class, made with (tokenizer,
    **options), whose `async run(row, engine, sampling, index)` plays an episode: an entry point's
    name, "package.module:name" or "file.py:name"; or python, and that in path."""
    path: Place | None = None
    """Of kind python: "package.module:name" or "file.py:name"."""
    prompt_column: str = "prompt"
    """Of kinds single_turn, tools, dialogue and openenv (which can do without): the column with the
    prompt, a text or messages; messages is read where a row has no such column. single_turn
    continues an assistant's turn at the end of the column."""
    raw: bool = False
    """Of kind single_turn: continue texts as they are, without the chat template."""
    special_tokens: Literal["text", "control"] = "text"
    """Of kind single_turn: what a control token is that a prompt spells, such as "<|im_end|>":
    text, or (prompts that are rendered already, with raw) the control token itself."""
    system: str | None = None
    """Of kinds single_turn, tools, dialogue and openenv: a system message before prompts that have
    none."""
    tools: list[Place] = []
    """For kind tools and custom functions: Python functions that the model may call, each
    "file.py:function", "package.module:function" or an entry point's name. Their signatures and
    docstrings (`Args:`) are what the model is told of them."""
    tool_seconds: float = Field(30.0, gt=0, le=SECONDS)
    """Longest call of a tool; then the model is told that it took too long."""
    max_turns: int = Field(8, ge=1, le=ROWS)
    """Assistant turns of one episode, tool calls included. A custom function is held to it in
    `chat.answer()`."""
    history: Literal["template", "tokens"] = "template"
    """For all kinds with turns except custom classes: what precedes a turn. template: the
    conversation as the chat template writes it, as when the model is used; where that rewrites
    earlier turns (Qwen3's drops thoughts) the episode has several token sequences. tokens: always
    the very tokens that were there before, thoughts included."""
    timeout: Annotated[float | None, RESUMABLE] = Field(None, gt=0, le=SECONDS)
    """Seconds of a whole episode, answers included, after which it counts as failed; null: any."""
    step_timeout: Annotated[float | None, RESUMABLE] = Field(600.0, gt=0, le=SECONDS)
    """Seconds that the environment itself may take at a stretch (a reset, a judge of its own),
    between two answers of the policy; then the episode counts as failed. null: any."""
    options: dict[str, Any] = {}
    """Further keyword arguments of a custom function or class."""
    gym: GymConfig = GymConfig()
    """Of kind nemo_gym."""
    openenv: OpenEnvConfig = OpenEnvConfig()
    """Of kind openenv."""
    verifiers: VerifiersConfig = VerifiersConfig()
    """Of kind verifiers."""

    @model_validator(mode="after")
    def check_keys_together(self) -> "EnvConfig":
        """Refuse keys that have no effect on this kind."""
        if problems := list(find_env_conflicts(self)):
            raise Problems(problems)
        return self


PROMPTED = ("single_turn", "tools", "dialogue", "openenv")
WITHOUT_TOOLS = ("single_turn", "calculator", "dialogue", "nemo_gym", "openenv", "verifiers")
AGENTS = ("verifiers", "nemo_gym")
DECIDED = ", whose agents decide it"
RULES = (
    unread("env.options", "env.kind", lambda kind: kind not in BUILTIN),
    unread("env.raw env.special_tokens", "env.kind", lambda kind: kind == "single_turn"),
    unread("env.system env.prompt_column", "env.kind", lambda kind: kind in PROMPTED),
    unread("env.tools env.tool_seconds", "env.kind", lambda kind: kind not in WITHOUT_TOOLS),
    unread("env.history", "env.kind", lambda kind: kind != "single_turn"),
    unread("env.history", "env.kind", lambda kind: kind not in AGENTS, DECIDED),
    unread("env.max_turns", "env.kind", lambda kind: kind != "nemo_gym", DECIDED),
    unread("env.gym", "env.kind", lambda kind: kind == "nemo_gym"),
    unread("env.openenv", "env.kind", lambda kind: kind == "openenv"),
    unread("env.openenv.text_field", "env.openenv.action", lambda action: action == "text"),
    unread("env.verifiers", "env.kind", lambda kind: kind == "verifiers"),
)
"""Keys that a kind of environment does not read."""


def find_env_conflicts(env: EnvConfig) -> Iterator[str]:
    """Yield one sentence for each impossible combination within the section."""
    if (env.kind == "python") != (env.path is not None):
        yield (
            f"env.kind is {env.kind} and env.path is {env.path!r}; env.path goes with env.kind"
            ' "python"; set both, or env.kind "package.module:Class" alone'
        )
    yield from broken(RULES, SimpleNamespace(env=env))
    yield from find_gym_conflicts(env.gym, env.kind)
    yield from find_openenv_conflicts(env.openenv, env.kind)
    yield from find_verifiers_conflicts(env.verifiers, env.kind)
    if env.kind == "tools" and not env.tools:
        yield 'env.kind tools needs functions: set env.tools, such as ["my_tools.py:search"]'
    if env.raw and env.system is not None:
        yield "env.system needs the chat template, which env.raw leaves out; remove one of them"
