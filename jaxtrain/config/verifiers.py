"""Section env.verifiers: tasksets of the verifiers package as the world."""

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from jaxtrain.config.base import Place, Section
from jaxtrain.config.limits import ITEMS


class VerifiersConfig(Section):
    """Tasks, tools and rewards of a verifiers taskset (0.4, its v1 API); a row names a task by its
    number, {"task": 3}. Only env.kind verifiers reads it."""

    taskset: Place | None = None
    """Its id: an installed package, "owner/name" of the Hub once that is installed, or a Python
    file that exports one Taskset in `__all__`."""
    args: dict[str, Any] = {}
    """Keys of the taskset's own config; with `task`, a table, those of its tasks."""
    environment: Place | None = None
    """Id, or Python file, of an environment of several agents that plays the tasks; unset: the
    taskset's own, or one agent."""
    agents: dict[str, dict[str, Any]] = {}
    """Keys of single agents' configs, on top of the defaults made of the keys below:
    {agent = {harness = {id = "bash"}, runtime = {type = "docker"}}}. Whoever has trainable false
    draws from the policy, too, but is not trained."""
    policies: dict[str, str] = {}
    """Which policy of section policies, a trained one, speaks as an agent: {verifier = "verifier"};
    all others speak as the first."""
    harness: str | None = None
    """The program that talks to the model: null (a loop of chat and tools), bash, another; unset:
    the taskset's own, or null. The package's are a process an episode, started through uv."""
    runtime: str = "subprocess"
    """Where it runs: subprocess (this machine, unconfined: only for harnesses that execute
    nothing), docker, or another of the package."""
    concurrency: int = Field(64, ge=1, le=ITEMS)
    """Most episodes that play at once; the others wait."""


def find_verifiers_conflicts(config: VerifiersConfig, kind: str) -> Iterator[str]:
    """Yield one sentence for each impossible combination with env.kind."""
    if kind == "verifiers" and config.taskset is None:
        yield 'env.kind verifiers needs env.verifiers.taskset, such as "gsm8k" or "my_tasks.py"'
