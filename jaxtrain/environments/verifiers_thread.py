"""Environment of the verifiers package in a thread with a separate event loop.

An environment of verifiers keeps servers between episodes (interception, shared tools), which
belong to one event loop. The producer's loop does not run between rounds in mode sync, and
evaluations use others, so these servers need a loop that always runs.
"""

import asyncio
import os
import shutil
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from jaxtrain import plugins
from jaxtrain.config.verifiers import VerifiersConfig
from jaxtrain.environments.chat_request import MODEL
from jaxtrain.environments.policy_server import PolicyServer
from jaxtrain.errors import UserError

T = TypeVar("T")
MODULE = "verifiers.v1"
PIP = 'pip install "jaxtrain[verifiers]"'
OPEN_SECONDS = 600.0
"""Time limit of the start; servers of shared tools may install their dependencies."""
CLOSE_SECONDS = 10.0


class VerifiersEnvironment:
    """Environment of verifiers. Call `open` before `play`; both may be called from any thread."""

    def __init__(self, config: VerifiersConfig, policy: PolicyServer, max_turns: int, key: str):
        """policy: endpoint of its agents. max_turns: limit of each agent. key: the section's."""
        self.config, self.policy, self.max_turns, self.key = config, policy, max_turns, key
        self.lock = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.ended: Any = None
        self.tasks: list[Any] = []
        self.roles: list[str] = []
        """Names of its agents, set by `open`."""

    def open(self) -> None:
        """Start the environment once; UserError if the package, the taskset or uv is missing."""
        with self.lock:
            if self.loop is not None:
                return
            self.package = import_verifiers(self.key)
            self.variable = f"JAXTRAIN_POLICY_API_KEY_{self.policy.open().rpartition(':')[2][:-3]}"
            # The package reads keys only from environment variables; processes that it starts do
            # not inherit variables of this kind.
            os.environ[self.variable] = self.policy.token
            self.env = self._make()
            self.coming: Iterator[Any] = iter(self.env.taskset)
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
            self.leave, up = asyncio.Event(), threading.Event()
            self.ended = asyncio.run_coroutine_threadsafe(self._serve(up), loop)
            self.ended.add_done_callback(lambda _: up.set())
            up.wait(OPEN_SECONDS)
            if self.ended.done() or not up.is_set():
                problem = self.ended.exception() if self.ended.done() else "it takes too long"
                loop.call_soon_threadsafe(loop.stop)
                raise UserError(f"{self.key}: its servers do not start: {problem!r}")
            self.loop = loop

    async def play(
        self, number: int, minted: Callable[[Any], None], is_full: Callable[[], bool]
    ) -> Any:
        """Play a task and return the package's Episode. minted: called with each agent's Trace
        before its first request. is_full: returns True if a conversation has outgrown a row, so
        that its agent was refused."""
        return await asyncio.wrap_future(self._submit(self._play(number, minted, is_full)))

    def close(self) -> None:
        """Stop its servers and its thread."""
        with self.lock:
            loop, self.loop = self.loop, None
        if loop is not None:
            loop.call_soon_threadsafe(self.leave.set)
            try:
                self.ended.result(CLOSE_SECONDS)
            except Exception:  # errors of its servers do not matter after the run
                pass
            loop.call_soon_threadsafe(loop.stop)
            os.environ.pop(self.variable, None)

    def _submit(self, work: Coroutine[Any, Any, T]) -> Any:
        assert self.loop is not None, "open comes first"
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def _serve(self, up: threading.Event) -> None:
        async with self.env.serving():
            up.set()
            await self.leave.wait()

    async def _play(
        self, number: int, minted: Callable[[Any], None], is_full: Callable[[], bool]
    ) -> Any:
        task, package = self._task(number), self.package
        client = package.EvalClientConfig(base_url=self.policy.base_url, api_key_var=self.variable)
        context = package.ModelContext(model=MODEL, client=client)
        episode = await self.env.run_episode(task, context, on_trace=minted)
        if not episode.ok and is_full() and len(episode.traces) == 1:
            # An agent that fills its row is scored all the same, or long answers would escape the
            # reward.
            (trace,) = episode.traces
            await task.score(trace)
            episode.ok = bool(trace.rewards)
        return episode

    def _task(self, number: int) -> Any:
        """Return a task by its number; UserError if the taskset has fewer."""
        while len(self.tasks) <= number:
            task = next(self.coming, None)
            if task is None:
                raise UserError(
                    f"{self.key}: a row names task {number}, but {self.config.taskset} has only"
                    f" {len(self.tasks)}, numbered from 0"
                )
            self.tasks.append(task)
        return self.tasks[number]

    def _make(self) -> Any:
        """Build the environment of the section; UserError if that fails."""
        from verifiers.v1.utils import loaders

        config = self.config
        taskset = import_part(str(config.taskset), f"{self.key}.taskset")
        kind = import_part(config.environment or "", f"{self.key}.environment")
        try:
            config_type = loaders.env_config_type(taskset, kind)
            self.roles = roles = [
                name
                for name, field in config_type.model_fields.items()
                if isinstance(field.default, self.package.AgentConfig)
            ]
            default_harness = loaders.default_harness_id(taskset)  # "bash": it has none
            harness = config.harness or ("null" if default_harness == "bash" else default_harness)
            if harness in ("null", "bash") and shutil.which("uv") is None:
                raise ValueError(f"the harness {harness} is started through uv: pip install uv")
            agent = {
                "harness": {"id": harness},
                "runtime": {"type": config.runtime},
                "max_turns": self.max_turns,
            }
            if unknown := sorted(set(config.agents) - set(roles)):
                raise ValueError(f"agents: there is no agent {unknown[0]!r} (there are {roles})")
            if unknown := sorted(set(config.policies) - set(roles)):
                raise ValueError(f"policies: there is no agent {unknown[0]!r} (there are {roles})")
            values = {"id": kind, "taskset": {**config.args, "id": taskset}}
            values |= {role: {**agent, **config.agents.get(role, {})} for role in roles}
            return loaders.load_environment(config_type.model_validate(values))
        except plugins.FAILURES as error:  # imports and configs of user code may raise anything
            raise UserError(f"{self.key}: {plugins.describe(error)}") from error


def import_verifiers(key: str) -> Any:
    """Import the package; UserError if it is missing or of another version."""
    try:
        import verifiers.v1 as found
    except ImportError as error:
        raise UserError(f"{key} needs the verifiers package, 0.4 ({error}): {PIP}") from None
    return found


def import_part(name: str, key: str) -> str:
    """Return the id under which the package finds a module; a file is imported by its stem."""
    if not name.endswith(".py"):
        return name
    module, stem = plugins.load_module(name, key=key), Path(name).stem
    if sys.modules.setdefault(stem, module) is not module:
        raise UserError(f"{key}: there is another module called {stem}; rename the file {name}")
    return stem
