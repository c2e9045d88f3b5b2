"""Section env: the world that the policy acts in."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from jaxtrain.config.base import Place, Section, known_in

BUILTIN = ("single_turn", "calculator")


class EnvConfig(Section):
    """How a row of data becomes an episode: one answer, or a loop of model and tools."""

    kind: Annotated[str, AfterValidator(known_in("envs", (*BUILTIN, "python")))] = "single_turn"
    """single_turn: one answer to the row's prompt. calculator: the built-in agent, which calls its
    tool and is asked on, over rows of builtin:calculator. Or an own class, made with (tokenizer,
    **options), whose `async run(row, engine, sampling, index)` plays an episode: an entry point's
    name, "package.module:Class" or "file.py:Class"; or python, and the class in path."""
    path: Place | None = None
    """Of kind python: "package.module:Class" or "file.py:Class"."""
    prompt_column: str = "prompt"
    """Of kind single_turn: the column with the prompt, a text or messages; messages is read where
    a row has no such column."""
    raw: bool = False
    """Of kind single_turn: continue texts as they are, without the chat template."""
    system: str | None = None
    """Of kind single_turn: a system message before prompts that have none."""
    max_turns: int = Field(8, ge=1)
    """Assistant turns of one episode, tool calls included."""
    options: dict[str, Any] = {}
    """Of an own class: its further keyword arguments."""

    @model_validator(mode="after")
    def check_keys_together(self) -> "EnvConfig":
        """Refuse keys that have no effect on this kind."""
        for problem in find_env_conflicts(self):
            raise ValueError(problem)
        return self


def find_env_conflicts(env: EnvConfig) -> Iterator[str]:
    """One sentence for each impossible combination within the section."""
    if (env.kind == "python") != (env.path is not None):
        yield (
            f"env.kind is {env.kind} and env.path is {env.path!r}; env.path goes with env.kind"
            ' "python"; set both, or env.kind "package.module:Class" alone'
        )
    if env.options and env.kind in BUILTIN:
        yield f"env.options has no effect while env.kind is {env.kind}; remove it"
    given = env.model_dump(exclude_defaults=True)
    for key in ("system", "prompt_column", "raw"):
        if key in given and env.kind != "single_turn":
            yield f"env.{key} has no effect while env.kind is {env.kind}; remove it"
    if env.raw and env.system is not None:
        yield "env.system needs the chat template, which env.raw leaves out; remove one of them"
