"""vLLM servers on the machines of a Ray cluster: an actor for each, which Ray keeps somewhere.

    ServerHost (actor, GPUs) ── child ends ──> ends itself ──> Ray starts it where there is room
         ^                                                     (the same machine, or another)
         └── where() ── RaySource.poll(), each health_seconds ──> joins and leaves of the pool

A server that comes back, there or elsewhere, is a new one to the pool: inspected and given the
weights before it is asked.
"""

import contextlib
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from typing import Any

import jaxtrain_vllm
from jaxtrain.config import Config
from jaxtrain.config.ray import service_name
from jaxtrain.distributed.child_processes import ServerProcess
from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.ray.ray_cluster import LOOPBACK, RayCluster, RayRemote, join
from jaxtrain.generation.ray.remote import RemoteLost, RemoteObject
from jaxtrain.generation.vllm.control import KEY_VARIABLE
from jaxtrain.generation.vllm.launch import build_command, build_environment, find_ports
from jaxtrain.generation.vllm.sources import DiscoveredServer
from jaxtrain_vllm.folders import find_stable_folder

POLL_SECONDS = 2.0
YOUNG_SECONDS = 60.0
"""A server that ends before this age is restarted after a pause."""
PAUSE_SECONDS = 30.0
STOP_SECONDS = 20.0
"""Longer than a server has to end by itself."""
HOST, PORT = "{host}", "{port}"
"""Placeholders for the address in a command whose machine is not known yet."""


class ServerHost:
    """A server process of this machine, in a process group of its own that ends with the actor.

    Ray's CUDA_VISIBLE_DEVICES decides which GPUs it sees.
    """

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        folder: str,
        home: str,
        address: str | None,
        key: str,
    ):
        """command: where HOST and PORT stand for the address; its Python is the first word.
        folder: of the run, for the log, and home, to start in: where this machine has them.
        address: None asks Ray for this machine's. key: required of every client."""
        self.host = address or find_address()
        self.port = find_ports(1, self.host)[0]
        log_folder = Path(folder) if Path(folder).is_dir() else Path(tempfile.gettempdir())
        self.log = log_folder / "servers" / f"{number}.log"
        self.key = key
        path = find_stable_folder("vllm-path", jaxtrain_vllm.__file__)
        env = build_environment(path, key, None, command[0])
        words = [word.replace(HOST, self.host).replace(PORT, str(self.port)) for word in command]
        self.process = ServerProcess(
            words, env, self.log, self.port, Path(home) if Path(home).is_dir() else None
        )
        self.failed, self.began = "", time.monotonic()
        self.process.start()
        threading.Thread(target=self._watch, daemon=True).start()

    def where(self) -> dict[str, Any]:
        """Return {"url"}, or {"failed"} for a server that ended."""
        if self.failed:
            return {"failed": self.failed}
        url, node = f"http://{self.host}:{self.port}", os.uname().nodename
        return {"url": url, "key": self.key, "node": node, "log": str(self.log)}

    def stop(self, seconds: float = 10.0) -> dict[str, Any]:
        """Stop the server, for good."""
        self.failed = "it was stopped"
        self.process.stop(seconds)
        return {}

    def _watch(self) -> None:
        while (code := self.process.poll()) is None:
            time.sleep(POLL_SECONDS)
        if self.failed:
            return
        self.failed = f"status {code}, log {self.log} on {os.uname().nodename}: {self._last_line()}"
        if time.monotonic() - self.began < YOUNG_SECONDS:
            time.sleep(PAUSE_SECONDS)
        os._exit(1)  # Ray starts this actor again

    def _last_line(self) -> str:
        lines = self.log.read_text(errors="replace")[-4000:].strip().splitlines()
        return lines[-1][:300] if lines else "it wrote nothing"


class RaySource:
    """`discover.Source` of the hosts of a run or a service."""

    fixed = False

    def __init__(
        self,
        cluster: RayCluster,
        find_hosts: Callable[[], Sequence[RayRemote]],
        name: str,
        log: Callable[[str], None],
        seconds: float = 2.0,
        *,
        owned: bool = False,
    ):
        """seconds: how long a poll waits for hosts, all together. owned: `close` ends the hosts."""
        self.owned = owned
        self.cluster, self.find_hosts, self.name = cluster, find_hosts, name
        self.log, self.seconds = log, seconds
        self._asked: dict[int, Future] = {}
        self._told: set[str] = set()

    def poll(self) -> list[DiscoveredServer] | None:
        """Return the servers that answer; hosts that are being started are not listed."""
        if self.cluster.error is not None:
            return None
        servers, deadline = [], time.monotonic() + self.seconds
        for index, host in enumerate(self.find_hosts()):
            # A host that is being started answers once it is; it is asked once until then.
            answer = self._asked.pop(index, None) or host.call("where")
            try:
                status = answer.result(max(0.0, deadline - time.monotonic()))
            except NotYet:
                self._asked[index] = answer
                continue
            except (RemoteLost, RunStopped, RuntimeError) as error:
                self._tell(f"server {index}: {error}")
                continue
            if "failed" in status:
                self._tell(f"server {index} ended: {status['failed']}")
            else:
                os.environ.setdefault(KEY_VARIABLE, status["key"])
                servers.append(DiscoveredServer(status["url"]))
        return servers

    def close(self) -> None:
        """Stop the servers and end their hosts, if they are this run's own."""
        if self.owned and self.cluster.error is None and not self.cluster.closed:
            stop_hosts(self.find_hosts())

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self.log(text)


def start_hosts(
    cluster: RayCluster,
    command: Sequence[str],
    folder: str,
    replicas: int,
    gpus: float,
    name: str | None = None,
) -> list[RayRemote]:
    """Start servers, each on `gpus` GPUs of one machine.

    folder: of the run. name: of a service that they belong to, with which they outlive this
    process.
    """
    key, hosts = make_key(), []
    for number in range(replicas):
        detached = {"name": host_name(name, number), "lifetime": "detached"} if name else {}
        hosts.append(
            cluster.start(
                ServerHost,
                (
                    number,
                    list(command),
                    folder,
                    os.getcwd(),
                    LOOPBACK if cluster.own else None,
                    key,
                ),
                num_gpus=gpus,
                num_cpus=1,
                max_concurrency=4,
                scheduling_strategy="SPREAD",
                runtime_env=cluster.environment(),
                **detached,
            )
        )
    return hosts


def stop_hosts(hosts: Sequence[RayRemote], seconds: float = STOP_SECONDS) -> None:
    """Stop servers, all at once, and end their hosts for good."""
    answers = [host.call("stop") for host in hosts]
    deadline = time.monotonic() + seconds
    for host, answer in zip(hosts, answers, strict=True):
        # One that is being started ends with its actor.
        with contextlib.suppress(NotYet, RemoteLost, RunStopped, RuntimeError):
            answer.result(max(0.0, deadline - time.monotonic()))
        host.kill()


def find_hosts(cluster: RayCluster, name: str) -> list[RayRemote]:
    """Return the servers of a service."""
    hosts: list[RayRemote] = []
    while True:
        try:
            hosts.append(cluster.find(host_name(name, len(hosts))))
        except UserError:
            return hosts


def describe_hosts(hosts: Sequence[RemoteObject], seconds: float = 2.0) -> Iterator[str]:
    """Yield a line for each host: its log file, which only its machine knows.

    seconds: for all of them; those that still wait for room are named.
    """
    deadline = time.monotonic() + seconds
    answers = [host.call("where") for host in hosts]
    for number, answer in enumerate(answers):
        try:
            status = answer.result(max(0.0, deadline - time.monotonic()))
        except (NotYet, RemoteLost, RuntimeError) as error:
            why = "it waits for room" if isinstance(error, NotYet) else error
            yield f"server {number} is not there yet: {why}; see ray status"
        else:
            text = (
                f"log {status['log']} on {status['node']}" if "url" in status else status["failed"]
            )
            yield f"server {number}: {text}"


def host_name(name: str, number: int) -> str:
    """Return the Ray name of a service's server."""
    return f"{name}-server-{number}"


def launch(
    cluster: RayCluster, config: Config, longest: int | None, name: str | None
) -> list[RayRemote]:
    """Start the servers of the config. longest: see command.build_command. name: as for
    start_hosts."""
    vllm = config.rollout.vllm
    gpus = vllm.gpus / vllm.replicas if vllm.gpus is not None else float(cluster.has_gpus())
    ranks = max(1, int(gpus))
    command = build_command(config, PORT, host=HOST, ranks=ranks, longest=longest)
    folder = os.path.abspath(config.run.output_dir)
    return start_hosts(cluster, command, folder, vllm.replicas, gpus, name)


def open_source(config: Config, longest: int | None, log: Callable[[str], None]) -> RaySource:
    """Open the servers of rollout.vllm.launch ray, the run's own or those of the service that it
    uses; raises UserError."""
    cluster, name = join(config.rollout.ray), service_name(config.rollout.service)
    if name is None:
        hosts = launch(cluster, config, longest, None)
        return RaySource(cluster, lambda: hosts, "rollout.vllm.launch ray", log, owned=True)
    if not find_hosts(cluster, name):
        raise UserError(
            f"rollout.vllm.launch ray: the service {name} has no servers; start it with"
            " rollout.vllm.launch=ray, too (jaxtrain stop-rollouts ends the one that is there)"
        )
    return RaySource(cluster, lambda: find_hosts(cluster, name), f"service {name}", log)


def make_key() -> str:
    """Return the key that servers require of their clients: this process's, or a new one, which
    this process and the workers that it starts use from then on."""
    return os.environ.setdefault(KEY_VARIABLE, secrets.token_hex(16))


def find_address() -> str:
    """Return this machine's address within the cluster."""
    from ray.util import get_node_ip_address

    return get_node_ip_address()
