"""Ray as far as jaxtrain uses it: joining a cluster, actors as RemoteObject, errors as ours.

Ray is imported when a function of this module is called. Its ports carry pickled objects: they
belong inside a network that only the cluster's own machines reach (docs/cluster.md).
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from typing_extensions import override

import jaxtrain
from jaxtrain.config.ray import RayConfig
from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.ray.remote import RemoteLost, RemoteObject

LOOK_SECONDS = 5.0
LOOPBACK = "127.0.0.1"
_JOINED: list["RayCluster"] = []
GONE_SECONDS = 20.0
"""Without an answer of the head for so long, the cluster is lost."""
LOST_CLUSTER = (
    "Ray cluster lost: its head does not answer any more. Start it again (ray start --head) and"
    " then the same command: the run goes on from its last checkpoint"
)


def import_ray() -> Any:
    """Import the package; raises UserError if it is not installed."""
    # Before the import, which reads them: no usage statistics and no warning of future changes.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    try:
        import ray
    except ImportError:
        raise UserError(
            "rollout.service ray and rollout.vllm.launch ray need the package ray: pip install"
            ' "jaxtrain[cluster]", or pip install "ray>=2.50,<3"'
        ) from None
    return ray


class RayCluster:
    """The cluster that this process is a driver of; joined once per process."""

    def __init__(self, config: RayConfig, cpus: float = 0.0):
        """Join the cluster.

        cpus: least number that a Ray of its own announces, whatever the machine has, so that actors
        do not wait for each other.
        """
        self.config, self.ray = config, import_ray()
        self.own = config.address is None
        self.error: RunStopped | None = None
        self._closed = threading.Event()
        if not self.ray.is_initialized():
            self._join(cpus)
            head = self.ray.get_runtime_context().gcs_address
            watching = threading.Thread(target=self._watch, args=(head,), daemon=True)
            watching.start()

    def _join(self, cpus: float) -> None:
        options: dict[str, Any] = {"namespace": self.config.namespace, "log_to_driver": False}
        if self.own:
            count = max(os.cpu_count() or 1, int(cpus) + 1)
            options["address"] = "local"  # or Ray takes a cluster that runs on this machine
            options |= {"num_cpus": count, "include_dashboard": False, "_node_ip_address": LOOPBACK}
        else:
            options["address"] = self.config.address
        # Ray takes SIGTERM for itself; a run saves its state then.
        main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGTERM) if main else None
        try:
            self.ray.init(**options, logging_level="warning")
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = self.config.address or "this machine"
            raise UserError(
                f"rollout.ray.address {where}: no Ray cluster could be joined there"
                f" ({str(error).partition(chr(10))[0][:300]}); start one with ray start --head, or"
                " leave the key out for a Ray of this machine alone"
            ) from None
        finally:
            if main and before is not None:
                signal.signal(signal.SIGTERM, before)

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def describe(self) -> str:
        """Return its address and size, for people."""
        alive = [node for node in self.ray.nodes() if node["Alive"]]
        where = "of this machine alone" if self.own else f"at {self.config.address}"
        return f"{where} ({len(alive)} node{'s' if len(alive) > 1 else ''})"

    def has_gpus(self) -> bool:
        """Return whether any of its machines has GPUs."""
        return self.ray.cluster_resources().get("GPU", 0) > 0

    @property
    def address(self) -> str:
        """This machine's address within the cluster."""
        return LOOPBACK if self.own else self.ray.util.get_node_ip_address()

    def close(self) -> None:
        """Leave the cluster; this ends actors that are not detached, and a Ray of its own."""
        if not self.closed:
            self._closed.set()
            if self.error is None:  # without its head, Ray would end this process over it
                self.ray.shutdown()

    def environment(self, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the runtime_env of an actor: this package on its path, and variables to pass."""
        runtime_env = dict(overrides or {})
        passed = {name: os.environ[name] for name in self.config.pass_env if name in os.environ}
        paths = [str(Path(jaxtrain.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        paths += [path for path in sys.path if path and Path(path).is_dir() and ".zip" not in path]
        python_path = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths)))}
        runtime_env["env_vars"] = {**python_path, **passed, **runtime_env.get("env_vars", {})}
        return runtime_env

    def start(self, kind: type, arguments: Sequence[Any], **options: Any) -> "RayRemote":
        """Start an actor of this class, which is started again wherever there is room for it."""
        options = {"max_restarts": -1, "max_task_retries": 0, **options}
        return RayRemote(self, self.ray.remote(**options)(kind).remote(*arguments))

    def has(self, name: str) -> bool:
        """Return whether there is an actor of this name."""
        try:
            self.ray.get_actor(name, namespace=self.config.namespace)
        except ValueError:
            return False
        return True

    def find(self, name: str) -> "RayRemote":
        """Return a named actor; raises UserError if there is none."""
        try:
            return RayRemote(self, self.ray.get_actor(name, namespace=self.config.namespace))
        except ValueError:
            raise UserError(
                f"rollout.service ray://{name}: no such service in namespace"
                f" {self.config.namespace!r} of this cluster; start it with jaxtrain serve-rollouts"
                f" --config FILE rollout.service=ray://{name}"
            ) from None

    def _watch(self, head: str) -> None:
        """Detect the loss of the head, for which calls to actors would wait, in a thread."""
        host, _, port = head.rpartition(":")
        answered = time.monotonic()
        while not self._closed.wait(LOOK_SECONDS):
            try:
                socket.create_connection((host.strip("[]"), int(port)), LOOK_SECONDS).close()
                answered = time.monotonic()
            except OSError:
                if time.monotonic() - answered > GONE_SECONDS:
                    self.error = RunStopped(LOST_CLUSTER)


def join(config: RayConfig) -> RayCluster:
    """Return the cluster of this process, joining it at the first call."""
    # The service, and room for what its workers and servers say that they take.
    cpus = 2 + config.episode_workers * config.worker_cpus
    if not _JOINED or _JOINED[0].closed:
        _JOINED[:] = [RayCluster(config, cpus)]
    return _JOINED[0]


class RayRemote(RemoteObject):
    """An actor as `RemoteObject`."""

    def __init__(self, cluster: RayCluster, handle: Any):
        self.cluster, self.handle = cluster, handle

    @property
    @override
    def error(self) -> RunStopped | None:
        return self.cluster.error

    @override
    def call(self, name: str, *arguments: Any) -> Future:
        answer: Future = Future()
        if self.error is not None:
            answer.set_exception(self.error)
            return answer
        try:
            ray_future = getattr(self.handle, name).remote(*arguments).future()
        except Exception as error:  # the border: Ray says in many ways that it is not there
            answer.set_exception(translate(error, self.cluster.ray))
            return answer

        def give(ray_future: Future) -> None:
            error = ray_future.exception()
            try:
                if error is None:
                    answer.set_result(ray_future.result())
                else:
                    answer.set_exception(translate(error, self.cluster.ray))
            except Exception:  # cancelled by its caller
                pass

        ray_future.add_done_callback(give)
        return answer

    @override
    def end(self) -> None:
        self.cluster.ray.kill(self.handle, no_restart=False)

    def kill(self) -> None:
        """End it for good."""
        self.cluster.ray.kill(self.handle)


def translate(error: BaseException, ray: Any) -> BaseException:
    """Return a Ray error as one of ours."""
    kinds = ray.exceptions
    if isinstance(error, kinds.RayTaskError):
        return RuntimeError(str(error))
    lost = (kinds.RayActorError, kinds.WorkerCrashedError, kinds.NodeDiedError)
    if isinstance(error, (*lost, kinds.ObjectLostError, kinds.TaskCancelledError)):
        return RemoteLost(str(error).partition("\n")[0])
    if isinstance(error, (kinds.RaySystemError, kinds.RpcError, ConnectionError)):
        return RunStopped(f"{LOST_CLUSTER} ({str(error)[:200]})")
    return error
