"""Servers that belong to a run: started on this machine with it, restarted, and ended with it.

    Launcher ── ServerProcess ── run_supervised.py ── jaxtrain_vllm.serve ── vLLM and its workers
       |  a thread checks every second for ended processes: dropped at once, restarted in place
       '- poll: a ServerSource with the same URLs as long as the run lasts; the pool's watchers
          notice restarted servers and send them the newest weights

RUN/servers/N.log    output of server N, over all its starts
RUN/servers/N.json   identity of its process while it runs: a killed run leaves it to the next one
"""

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from typing_extensions import override

import jaxtrain_vllm
from jaxtrain.config import Config
from jaxtrain.config.policies import list_trained
from jaxtrain.distributed import gpus
from jaxtrain.distributed.child_processes import ServerProcess
from jaxtrain.distributed.orphans import end_orphans
from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.vllm.control import KEY_VARIABLE
from jaxtrain.generation.vllm.sources import DiscoveredServer, ServerSource
from jaxtrain.text_safety import escape_control_chars

FOLDER = "servers"
MAX_RESTARTS, RESTART_WINDOW_SECONDS = 3, 600.0
"""A server that ends more often than MAX_RESTARTS within the window is given up."""
POLL_SECONDS = 1.0
STOP_SECONDS = 20.0
TAIL_LINES, TAIL_BYTES = 12, 16_384
"""Part of a log that is quoted when a server does not start."""


@dataclass
class LaunchedServer:
    """Server of the run, across restarts."""

    url: str
    make: Callable[[], ServerProcess]
    """Creates its next process, not started yet."""
    log_file: Path
    process: ServerProcess | None = None
    restarts: deque[float] = field(default_factory=deque)
    """Times of restarts within the window."""
    given_up: bool = False


class Launcher(ServerSource):
    """`ServerSource` of servers that run as child processes."""

    name = 'rollout.vllm.launch "local"'
    fixed = True

    def __init__(
        self,
        servers: Sequence[LaunchedServer],
        log: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.servers, self.log, self.clock = list(servers), log, clock
        self.restarts = 0
        """Restarts of all servers so far."""
        self._lock = threading.Lock()
        self._watching = False
        self._closed = threading.Event()

    def start(self) -> None:
        """Start all servers, without waiting for them."""
        for server in self.servers:
            self._start(server)

    @override
    def poll(self) -> list[DiscoveredServer]:
        # Before the first answer an exit is a mistake in the setup, and a restart would not help.
        if not self._watching:
            for server in self.servers:
                status = server.process and server.process.poll()
                if status is not None:
                    raise UserError(
                        f"rollout.vllm.launch: the server on {server.url} ended with status"
                        f" {status} before it answered; the end of {server.log_file}:\n"
                        + read_tail(server.log_file)
                    )
        return [DiscoveredServer(server.url) for server in self.servers]

    def watch(
        self, lost: Callable[[str, str], None], failed: Callable[[BaseException], None]
    ) -> None:
        """Restart processes that end from now on.

        lost: called with the URL and the reason as soon as an end is noticed. failed: called with
        the error that ends the run, once all are given up.
        """
        self._watching = True

        def work() -> None:
            while not self._closed.wait(POLL_SECONDS):
                self.inspect(lost, failed)

        threading.Thread(target=work, name="servers", daemon=True).start()

    def inspect(
        self, lost: Callable[[str, str], None], failed: Callable[[BaseException], None]
    ) -> None:
        """Check once for ended processes; see `watch`."""
        for server in self.servers:
            if server.given_up or server.process is None:
                continue
            status = server.process.poll()
            if status is None or self._closed.is_set():
                continue
            why = f"its process ended with status {status}; {server.log_file}"
            # First, so that its requests are repeated elsewhere before the slow restart.
            lost(server.url, why)
            while server.restarts and self.clock() - server.restarts[0] > RESTART_WINDOW_SECONDS:
                server.restarts.popleft()
            attempt = len(server.restarts) + 1
            if attempt > MAX_RESTARTS:
                server.given_up = True
                self.log(
                    f"vllm {server.url} is not started again: it ended {attempt} times within"
                    f" {RESTART_WINDOW_SECONDS / 60:g} minutes; {server.log_file}"
                )
                continue
            server.restarts.append(self.clock())
            self.restarts += 1
            self.log(f"vllm {server.url} is started again ({attempt} of {MAX_RESTARTS}): {why}")
            try:
                self._start(server)
            except (OSError, UserError) as error:
                self.log(f"vllm {server.url}: {error}")
        if self.servers and all(server.given_up for server in self.servers):
            logs = ", ".join(str(server.log_file) for server in self.servers)
            failed(RunStopped(f"all vLLM servers of rollout.vllm.launch ended; see {logs}"))

    def close(self) -> None:
        """Stop all servers in parallel, permanently; a second call does nothing."""
        self._closed.set()
        with self._lock:
            running = [server.process for server in self.servers if server.process is not None]
        if running:
            with ThreadPoolExecutor(len(running)) as pool:
                list(pool.map(lambda process: process.stop(STOP_SECONDS), running))

    def _start(self, server: LaunchedServer) -> None:
        # Under the lock, so that close() cannot miss a process that is just being started.
        with self._lock:
            if self._closed.is_set():
                return
            process = server.make()
            server.log_file.parent.mkdir(parents=True, exist_ok=True)
            with server.log_file.open("a") as log_file:
                log_file.write(f"--- {time.strftime('%Y-%m-%dT%H:%M:%S%z')} {process.command}\n")
            process.start()
            server.process = process


def open_launcher(
    config: Config, folder: Path, log: Callable[[str], None], longest: int | None = None
) -> Launcher:
    """Return the launcher of section rollout.vllm, not started yet; end the servers that a killed
    run left behind.

    folder: RUN/servers. longest: maximum sequence length of the model. Raises UserError if vLLM or
    GPUs are missing.
    """
    vllm = config.rollout.vllm
    check_python(vllm.python)
    assigned = gpus.assign(vllm)
    folder.mkdir(parents=True, exist_ok=True)
    ended = sum(map(end_orphans, folder.glob("*.json")))
    if ended:
        log(f"ended {ended} processes of vLLM servers that a run before this one left")
    # Other users of this machine must not pause the servers or change their weights.
    key = os.environ.setdefault(KEY_VARIABLE, secrets.token_urlsafe(32))
    with_trainer = vllm.transport == "device" and not vllm.sleep
    servers = []
    for number, (port, server_gpus) in enumerate(
        zip(find_ports(vllm.replicas), assigned, strict=True)
    ):
        ranks = max(1, len(server_gpus))
        command = build_command(config, port, ranks=ranks, longest=longest)
        # vLLM uses the first `ranks` GPUs; from the trainer's it only reads weights.
        visible = [
            *server_gpus,
            *(gpus.list_gpus(os.environ) if with_trainer and server_gpus else []),
        ]
        env = build_environment(folder / "path", key, visible, vllm.python)
        log_file, note = folder / f"{number}.log", folder / f"{number}.json"

        # Defaults bind this iteration's values; the closure would see those of the last server.
        def make(
            command=command, env=env, log_file=log_file, port=port, note=note
        ) -> ServerProcess:
            return ServerProcess(command, env, log_file, port, note=note)

        servers.append(LaunchedServer(f"http://127.0.0.1:{port}", make, log_file))
    where = " | ".join(",".join(server_gpus) or "CPU" for server_gpus in assigned)
    count = f"{len(servers)} vLLM server{'s' if len(servers) > 1 else ''}"
    log(f"starting {count} (GPUs: {where}); logs in {folder}")
    return Launcher(servers, log)


def find_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return different free ports of an address of this machine."""
    # All sockets stay open until the last is bound, or the same port could be returned twice.
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((host, 0))) for _ in range(count)]
        return [socket_.getsockname()[1] for socket_ in sockets]


def read_tail(log_file: Path) -> str:
    """Return the last lines of a log, with control characters escaped."""
    try:
        with log_file.open("rb") as file:
            file.seek(max(0, log_file.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"  ({error.strerror or error})"
    return "\n".join(f"  {escape_control_chars(line)}" for line in text.splitlines()[-TAIL_LINES:])


PYTHON_VARIABLE = "VLLM_PYTHON"
SHARED_FRACTION = "0.4"
"""Fraction of a GPU's memory for a server that shares it with the trainer."""
LORA_RANKS = (64, 128, 256, 320, 512)
"""Maximum ranks that vLLM accepts, from serve's default on."""
PYTHON_TIMEOUT_SECONDS = 60.0


def find_python(python: str | None) -> str:
    """Return the Python for servers: rollout.vllm.python, VLLM_PYTHON or this one."""
    return os.path.expanduser(python or os.environ.get(PYTHON_VARIABLE) or sys.executable)


def check_python(python: str | None) -> None:
    """Raise UserError if that Python cannot be run, or has no vLLM. Takes as long as Python's
    start."""
    executable = find_python(python)
    key = "rollout.vllm.python" if python or not os.environ.get(PYTHON_VARIABLE) else "VLLM_PYTHON"
    fix = f"; name the Python of an environment with vLLM in {key}"
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        done = subprocess.run(
            [executable, "-c", code], capture_output=True, text=True, timeout=PYTHON_TIMEOUT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = getattr(error, "strerror", None) or "it does not answer"
        raise UserError(f"rollout.vllm.launch: {executable} cannot be run: {why}{fix}") from None
    if done.returncode:
        raise UserError(f"rollout.vllm.launch: {executable} has no vLLM{fix}")


def build_command(
    config: Config,
    port: int | str,
    *,
    host: str = "127.0.0.1",
    ranks: int = 1,
    longest: int | None = None,
) -> list[str]:
    """Build the command line of one server of this run.

    port: text if it is not known yet. ranks: number of its GPUs. longest:
    maximum sequence length of the model, which may be less than data.sequence_len. The words of
    rollout.vllm.args come last, so that they override the others.
    """
    model, vllm = config.model, config.rollout.vllm
    assert model.path is not None, "validated with the config"
    command = [find_python(vllm.python), "-m", "jaxtrain_vllm.serve", "--model", str(model.path)]
    command += ["--host", host, "--port", str(port), "--sync", vllm.sync]
    command += ["--drain-seconds", "0"]  # it ends with the run, which needs no more answers then
    if vllm.sync == "lora":
        rank = next((r for r in LORA_RANKS if r >= config.adapter.rank), config.adapter.rank)
        command += ["--max-lora-rank", str(rank)]
        if len(policies := list_trained(config)) > 1:
            # Two per policy: requests in flight finish with the adapter before the newest.
            command += ["--max-loras", str(2 * len(policies))]
    if vllm.sleep:
        command.append("--sleep")
    length = min(config.data.sequence_len, longest or config.data.sequence_len)
    options = {"--max-model-len": str(length)}
    if vllm.sync != "lora":
        options["--dtype"] = vllm.weight_dtype
        if model.init == "random":
            options["--load-format"] = "dummy"  # the weights come with the first sync
    if model.tokenizer not in (None, "builtin"):
        options["--tokenizer"] = str(model.tokenizer)
    if ranks > 1:
        options["--tensor-parallel-size"] = str(ranks)
    if vllm.sleep:
        options["--gpu-memory-utilization"] = SHARED_FRACTION
    command.append("--")
    for name, value in options.items():
        command += [name, value]
    if config.rollout.router_replay:
        command.append("--enable-return-routed-experts")
    return command + vllm.args


def build_environment(
    folder: Path, key: str | None, gpus: Sequence[str] | None, python: str | None
) -> dict[str, str]:
    """Build the environment of a server.

    folder: receives a link to jaxtrain_vllm, the only package of this environment that vLLM's
    Python should find. key: required of every client. gpus: visible GPUs; None: as for this
    process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    link, package = folder / "jaxtrain_vllm", Path(jaxtrain_vllm.__file__).parent
    if not link.is_symlink() or link.readlink() != package:
        # Of two servers that start at once both may make it.
        new = folder / f".jaxtrain_vllm-{os.getpid()}-{threading.get_ident()}"
        new.symlink_to(package)
        new.replace(link)
    # Another Python must not import this environment's packages, built for another version.
    paths = [str(folder.absolute())]
    if find_python(python) == sys.executable:
        paths += filter(None, [os.environ.get("PYTHONPATH")])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if key is not None:
        env[KEY_VARIABLE] = key
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return env
