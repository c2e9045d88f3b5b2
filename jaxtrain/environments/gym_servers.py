"""Servers of a NeMo Gym, found or started, and the policy endpoint of their agents.

    head server, given URLs ──> Roster: URL of each agent and each resources server
    agents ── policy_base_url ──> PolicyServer, which listens before Gym starts

Environments of a run with the same servers (training and evaluation sets) share them. A running Gym
is inspected before the run. A Gym of the run is started by the first episode, and all episodes wait
for it. Lost servers are awaited (their head lists them again, at other ports) or, if the run
started them and they have ended, restarted.
"""

import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtrain.config.gym import GymConfig
from jaxtrain.config.secrets import reveal
from jaxtrain.environments.gym_process import GymProcess
from jaxtrain.environments.gym_roster import Mode, Roster
from jaxtrain.environments.policy_server import PolicyServer
from jaxtrain.errors import RunStopped, UserError

POLL_SECONDS = 1.0


class GymServers:
    """A Gym and its policy endpoint. All methods except `close` may be called from any thread."""

    def __init__(
        self,
        tokenizer: Any,
        config: GymConfig,
        max_model_len: int,
        key: str = "env.gym",
        folder: str | None = None,
    ):
        """key: the section's, for messages. folder: folder of the run, for Gym's config and log;
        None: a temporary folder."""
        self.config, self.key, self.folder = config, key, folder
        secrets = {"api_key": config.api_key, "token": config.token}
        revealed = reveal({name: secret for name, secret in secrets.items() if secret}, key)
        self.policy = PolicyServer(
            tokenizer,
            max_model_len=max_model_len,
            host=config.host,
            port=config.port,
            token=revealed.get("api_key"),
        )
        token = revealed.get("token")
        self.headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        """Headers of requests to Gym."""
        self.roster = Roster(key, (config.head or "").rstrip("/"), config.servers, self.headers)
        self.users = 0
        """Number of environments that share it."""
        self.logged: set[str] = set()
        """Messages logged about it."""
        self.found = 0
        """Number of times its servers were found: once, and again after each loss."""
        self._used: set[str] = set()
        """Names of processes in use."""
        self._process: GymProcess | None = None
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._problem = ""

    @property
    def is_ready(self) -> bool:
        """True once its servers are found."""
        return self.found > 0

    def ready(
        self, open_endpoint: bool = True, log: Callable[[str], None] = lambda text: None
    ) -> None:
        """Wait until all servers are up; takes minutes if Gym is started.

        open_endpoint: True if agents will query the policy endpoint. Raises UserError for problems
        that the user must fix, the same one for all waiting threads.
        """
        if open_endpoint or self.config.start:
            self.policy.open()
        with self._lock:
            if self.is_ready:
                return
            if self._problem:
                raise UserError(self._problem)
            try:
                if self.config.start:
                    folder = self.folder or tempfile.mkdtemp(prefix="jaxtrain_gym_")
                    path = Path(folder).absolute()
                    self._process = GymProcess(self.config, self.policy, path, self.key)
                    self.roster.head = self._process.start()
                self._wait(log)
            except UserError as error:
                self._problem = str(error)
                self._end()
                raise
            self.found = 1

    def revive(self, seen: int) -> bool:
        """Wait until all servers answer again after one was lost, and find them again.

        seen: value of `found` when the server was found. Returns True if servers had gone, to one
        of the callers only. Raises RunStopped if they do not come back.
        """
        with self._lock:
            if self.found != seen or self._closing.is_set():
                return False
            if self._problem:
                raise RunStopped(self._problem)
            listed = self.roster.listed
            try:
                gone = self._wait_again()
            except (UserError, RunStopped) as error:
                self._problem = str(error)
                raise RunStopped(self._problem) from None
            self.found += gone or self.roster.listed != listed
            return self.found != seen

    def find(self, name: str, mode: Mode) -> str:
        """Return the URL of the process that plays or judges for an agent; UserError."""
        process, url = self.roster.find(name, mode)
        if not url:
            self.roster.check([name], mode, f"{self.key}.agent")
        self._used.add(process)
        return url

    def close(self) -> None:
        """Release the servers; the last user stops what was started."""
        self.users -= 1
        if self.users <= 0:
            for key in [key for key, servers in _SHARED.items() if servers is self]:
                del _SHARED[key]
            self._closing.set()
            with self._lock:
                self._end()

    def _wait(self, log: Callable[[str], None]) -> None:
        """Wait until the head lists all servers; UserError if that takes too long."""
        end, logged = time.monotonic() + self.config.start_seconds, False
        while not self._closing.is_set():
            if self._process is not None:
                self._process.check()
            try:
                return self.roster.read()
            except (OSError, ValueError) as error:
                problem = error
            if not logged:
                log(f"waiting for {self.roster.name} ({problem})")
                logged = True
            if time.monotonic() > end:
                raise UserError(self._explain(problem))
            self._closing.wait(POLL_SECONDS)

    def _wait_again(self) -> bool:
        """Wait until all processes in use answer; return True if one did not."""
        end, gone = time.monotonic() + self.config.start_seconds, False
        while not self._closing.is_set():
            if self._process is not None and self._process.status() is not None:
                self.roster.head, gone = self._process.restart(), True
            try:
                self.roster.read()
                for process in self._used:
                    self.roster.greet(process)
                break
            except (OSError, ValueError) as error:
                gone = True
                if time.monotonic() > end:
                    raise RunStopped(self._explain(error)) from None
            self._closing.wait(POLL_SECONDS)
        return gone

    def _explain(self, problem: Exception) -> str:
        seconds = f"{self.key}.start_seconds {self.config.start_seconds:g}"
        if self._process is not None:
            return f"{self.key}: Gym's servers were not up after {seconds}; {self._process.tail()}"
        token = "" if self.headers else f"; a proxy's token goes into {self.key}.token"
        return (
            f"{self.key}.{'head' if self.roster.head else 'servers'}: {self.roster.name} does not"
            f" answer ({problem}) after {seconds}: start it (gym env start), or mend the URL{token}"
        )

    def _end(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None
        self.policy.close()


_SHARED: dict[str, GymServers] = {}
"""Servers in use, keyed by all settings that affect them."""


def share_servers(
    tokenizer: Any, config: GymConfig, max_model_len: int, key: str, folder: str | None
) -> GymServers:
    """Return the servers of a section, shared by all environments with equal settings. Each caller
    must close them."""
    per_environment = {"agent", "mode", "rewards", "drop_nulls", "concurrency"}
    identity = json.dumps(
        [
            config.model_dump(mode="json", exclude=per_environment),
            max_model_len,
            str(folder),
            id(tokenizer),
        ],
        sort_keys=True,
    )
    if identity not in _SHARED:
        _SHARED[identity] = GymServers(tokenizer, config, max_model_len, key, folder)
    _SHARED[identity].users += 1
    return _SHARED[identity]
