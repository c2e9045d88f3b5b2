"""Process of a NeMo Gym that a run starts: `gym env start` with the run's policy, with restarts.

RUN/gym/gym_PORT.yaml   its config
RUN/gym.log             its output, of all starts
"""

import os
import time
from collections import deque
from pathlib import Path

from jaxtrain.config.gym import GymConfig
from jaxtrain.distributed.child_processes import ServerProcess
from jaxtrain.environments.gym_config import (
    find_free_port,
    find_packages,
    link_environments,
    write_config,
)
from jaxtrain.environments.policy_server import PolicyServer
from jaxtrain.errors import RunStopped, UserError
from jaxtrain.text_safety import escape_control_chars

MAX_RESTARTS, RESTART_WINDOW_SECONDS = 3, 600.0
"""Restarts allowed within the time window; a Gym that ends more often stops the run."""
STOP_SECONDS = 20.0


class GymProcess:
    """Gym process with restarts. Used by one thread at a time."""

    def __init__(self, config: GymConfig, policy: PolicyServer, folder: Path, key: str):
        """policy: endpoint of its agents, which already listens. folder: folder of the run. key:
        the section's, for messages."""
        self.config, self.policy, self.folder, self.key = config, policy, folder, key
        self.log = folder / "gym.log"
        self._process: ServerProcess | None = None
        self._restarts: deque[float] = deque()

    def start(self) -> str:
        """Start Gym and return the URL of its head server, which answers later; UserError if Gym
        cannot be started."""
        config, folder = self.config, self.folder / "gym"
        python = Path(os.path.abspath(config.python or ""))
        program = python.parent / "gym"
        if not program.exists():
            raise UserError(
                f"{self.key}.python: {python} has no program gym beside it; install nemo-gym there:"
                f" {python} -m pip install nemo-gym==0.7.0"
            )
        packages = find_packages(python, self.key)
        if not config.own_environments:
            directory = Path(config.directory)
            link_environments(folder / "environments", python, (packages, directory))
        port = find_free_port()
        config_path = write_config(config, self.policy, port, folder, packages, self.key)
        env = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        }
        # Without this, Ray keeps trying to reach the last cluster of this machine, which may have
        # been killed.
        env["RAY_ADDRESS"] = "local"
        env["PATH"] = f"{python.parent}{os.pathsep}{env.get('PATH', '')}"
        env["VIRTUAL_ENV"] = str(python.parent.parent)
        command = [str(program), "env", "start", "--config", str(config_path)]
        directory = Path(config.directory)
        self._process = ServerProcess(command, env, self.log, port, cwd=directory)
        self._process.start()
        return f"http://127.0.0.1:{port}"

    def check(self) -> None:
        """Raise UserError with the end of the log if Gym has ended."""
        if (code := self.status()) is not None:
            raise UserError(f"{self.key}: Gym ended with status {code}; {self.tail()}")

    def status(self) -> int | None:
        """Return the exit status; None while Gym runs."""
        assert self._process is not None, "start() comes first"
        return self._process.poll()

    def restart(self) -> str:
        """Start Gym again, like `start`; RunStopped if it has ended too often."""
        while self._restarts and time.monotonic() - self._restarts[0] > RESTART_WINDOW_SECONDS:
            self._restarts.popleft()
        if len(self._restarts) >= MAX_RESTARTS:
            raise RunStopped(
                f"{self.key}: Gym ended {MAX_RESTARTS + 1} times within"
                f" {RESTART_WINDOW_SECONDS / 60:g} minutes and is not started again; {self.tail()}"
            )
        self._restarts.append(time.monotonic())
        self.stop()
        return self.start()

    def stop(self) -> None:
        """Stop Gym and all processes that it started."""
        if self._process is not None:
            self._process.stop(STOP_SECONDS)

    def tail(self) -> str:
        """Return the end of the log, for a message."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        lines = text.strip().splitlines()[-12:]
        text_of_tail = (
            f"the end of {self.log}:\n" + "\n".join(lines) if lines else f"{self.log} is empty"
        )
        return escape_control_chars(text_of_tail)
