"""The servers of a NeMo Gym, found or started, and the endpoint that their agents ask.

    head server ── GET /server_instances ──> URL of each agent and each resources server
    agents ── policy_base_url ──> PolicyServer, which listens before Gym starts

Environments of one run with the same servers (training and evaluation sets) share them. Nothing
happens before the first episode: then `ready` starts or asks, and everybody waits for it.
"""

import json
import os
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from jaxtrain.config.gym import GymConfig
from jaxtrain.config.secrets import reveal
from jaxtrain.envs.gym_config import (
    find_free_port,
    find_packages,
    link_environments,
    make_config,
)
from jaxtrain.envs.policy_server import PolicyServer
from jaxtrain.errors import UserError
from jaxtrain.sandbox.processes import ServerProcess
from jaxtrain.shown import printable

POLL_SECONDS = 1.0
ASK_SECONDS = 10.0
MOST_BYTES = 1 << 25


class GymServers:
    """One Gym and the endpoint for it. All methods but `close` may be called from any thread."""

    def __init__(
        self,
        tokenizer: Any,
        config: GymConfig,
        max_model_len: int,
        key: str = "env.gym",
        folder: str | None = None,
    ):
        """key: the section's, for messages. folder: the run's, for Gym's config and log;
        None: a temporary one."""
        self.config, self.key = config, key
        self.folder = Path(folder or tempfile.mkdtemp(prefix="jaxtrain_gym_")).absolute()
        given = reveal({"api_key": config.api_key}, key) if config.api_key else {}
        self.policy = PolicyServer(
            tokenizer,
            max_model_len=max_model_len,
            host=config.host,
            port=config.port,
            token=given.get("api_key"),
        )
        self.users = 0
        """Environments that share it."""
        self._urls: dict[str, str] = {}
        self._config: dict[str, Any] = {}
        self._process: ServerProcess | None = None
        self._lock = threading.Lock()
        self.is_ready, self._problem = False, ""

    def ready(self, asked: bool = True) -> None:
        """Have all servers up; blocks, for minutes where Gym is started. asked: whether its agents
        will ask the endpoint. UserError for what a person must mend, the same for all who wait."""
        if asked or self.config.start:
            self.policy.open()
        if self.is_ready:
            return
        with self._lock:
            if self.is_ready:
                return
            if self._problem:
                raise UserError(self._problem)
            try:
                self._begin()
            except UserError as error:
                self._problem = str(error)
                self._end()
                raise
            self.is_ready = True

    def agent_url(self, name: str) -> str:
        """Where POST /run of an agent is answered: at its environment server where it has one."""
        for path, block in self._config.items():
            inner = _find_block(block, "environment_servers")
            if _name_of(inner.get("agent_server")) == name and path in self._urls:
                return self._urls[path]
        return self._url(name, "responses_api_agents", "an agent")

    def resources_url(self, name: str) -> str:
        """Base URL of the resources server of an agent, or of that name."""
        agent = _find_block(self._config.get(name), "responses_api_agents")
        found = _name_of(agent.get("resources_server")) or name
        return self._url(found, "resources_servers", "an agent or a resources server")

    def close(self) -> None:
        """One of those who share it needs it no more; the last one ends what was started."""
        self.users -= 1
        if self.users <= 0:
            for key in [key for key, one in _SHARED.items() if one is self]:
                del _SHARED[key]
            self._end()

    def _url(self, name: str, kind: str, what: str) -> str:
        block = self._config.get(name)
        if name in self._urls and isinstance(block, dict) and kind in block:
            return self._urls[name]
        known = [one for one, block in self._config.items() if one in self._urls and kind in block]
        raise UserError(
            f"{self.key}.agent: this Gym has no {kind[:-1].replace('_', ' ')} {name!r}; it must be"
            f" {what} of {', '.join(sorted(known)) or '(none)'}"
        )

    def _begin(self) -> None:
        head = self.config.head
        if self.config.start:
            head = self._start()
        assert head is not None, "find_gym_conflicts asks for one of both"
        self._find(head.rstrip("/"))

    def _end(self) -> None:
        if self._process is not None:
            self._process.stop(20.0)
            self._process = None
        self.policy.close()

    def _start(self) -> str:
        """Start Gym and wait until all its servers are up; URL of its head server."""
        config, folder = self.config, self.folder / "gym"
        python = Path(os.path.abspath(config.python or ""))
        program = python.parent / "gym"
        if not program.exists():
            raise UserError(
                f"{self.key}.python: {python} has no program gym beside it; install nemo-gym there:"
                f" {python} -m pip install nemo-gym==0.7.0"
            )
        packages = find_packages(python, self.key)
        folder.mkdir(parents=True, exist_ok=True)
        port = find_free_port()
        made = make_config(config, self.policy, port, folder, packages)
        if not config.own_environments:
            directory = Path(config.directory)
            link_environments(folder / "environments", python, (packages, directory))
        place, log = folder / f"gym_{port}.yaml", self.folder / "gym.log"
        place.touch(mode=0o600)  # it holds the key of the policy endpoint
        place.write_text(json.dumps(made, indent=1), encoding="utf-8")
        env = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        }
        # A cluster of its own: else Ray tries for good to reach the last one of this machine, which
        # may have been killed.
        env["RAY_ADDRESS"] = "local"
        env["PATH"] = f"{python.parent}{os.pathsep}{env.get('PATH', '')}"
        env["VIRTUAL_ENV"] = str(python.parent.parent)
        command = [str(program), "env", "start", "--config", str(place)]
        self._process = ServerProcess(command, env, log, port, cwd=Path(config.directory))
        self._process.start()
        self._wait(f"http://127.0.0.1:{port}", log)
        return f"http://127.0.0.1:{port}"

    def _wait(self, head: str, log: Path) -> None:
        assert self._process is not None
        end = time.monotonic() + self.config.start_seconds
        while True:
            code = self._process.poll()
            if code is not None:
                raise UserError(f"{self.key}: Gym ended with status {code}; {_tail(log)}")
            try:
                ask(f"{head}/health")
                return
            except (OSError, ValueError):
                pass  # 503 while it starts
            if time.monotonic() > end:
                raise UserError(
                    f"{self.key}: Gym's servers were not up after {self.key}.start_seconds"
                    f" {self.config.start_seconds:g}; {_tail(log)}"
                )
            time.sleep(POLL_SECONDS)

    def _find(self, head: str) -> None:
        """Which servers there are, and what their config says of them."""
        try:
            instances = ask(f"{head}/server_instances")
            found = yaml.safe_load(ask(f"{head}/global_config_dict_yaml"))
            self._urls = {one["config_path"]: one["url"].rstrip("/") for one in instances}
            self._config = {name: one for name, one in found.items() if isinstance(one, dict)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
            raise UserError(
                f"{self.key}.head: {head} does not answer as the head server of a NeMo Gym 0.7 does"
                f" (GET /server_instances, /global_config_dict_yaml): {error!r:.300}"
            ) from None


_SHARED: dict[str, GymServers] = {}
"""Those in use, by everything that makes a difference to them."""


def share_servers(
    tokenizer: Any, config: GymConfig, max_model_len: int, key: str, folder: str | None
) -> GymServers:
    """The servers that a section names, one for all environments of a run that name the same.
    Each who asks for them closes them."""
    own = {"agent", "mode", "rewards", "drop_nulls", "concurrency"}
    place = json.dumps(
        [config.model_dump(mode="json", exclude=own), max_model_len, str(folder), id(tokenizer)],
        sort_keys=True,
    )
    if place not in _SHARED:
        _SHARED[place] = GymServers(tokenizer, config, max_model_len, key, folder)
    _SHARED[place].users += 1
    return _SHARED[place]


def ask(url: str) -> Any:
    """Body of a GET; OSError or ValueError where there is none."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=ASK_SECONDS) as answer:
        return json.loads(answer.read(MOST_BYTES))


def _find_block(block: Any, kind: str) -> dict[str, Any]:
    """What a process of the config says of its one server of a kind; {} where it is of another."""
    inner = block.get(kind) if isinstance(block, dict) else None
    found = next(iter(inner.values()), None) if isinstance(inner, dict) else None
    return found if isinstance(found, dict) else {}


def _name_of(reference: Any) -> str | None:
    return reference.get("name") if isinstance(reference, dict) else None


def _tail(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-12:]
    except OSError:
        lines = []
    return printable(f"the end of {log}:\n" + "\n".join(lines)) if lines else f"{log} is empty"
