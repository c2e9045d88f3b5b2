"""Publishes weights as LoRA adapters: each version is a PEFT folder with a name of its own.

    trainer   writes RUN/adapters/NAME ──> every server loads it by /v1/load_lora_adapter
              (or uploads the files to servers that do not see the disk, `adapter_upload.py`)

A new version never reuses an old one's name or path: vLLM keys its prefix cache by both, and would
continue with keys and values of the old weights. Requests in flight finish with the adapter that
they began with; older versions are unloaded, then deleted.

Each folder contains a note that names its run. Only folders that an earlier process of the same
run left are removed: adapter_dir may be shared with other runs and with other files.
"""

import contextlib
import errno
import json
import os
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.vllm.control import Deadline, ServerGone, ServerRefused, call
from jaxtrain.generation.vllm.server import VllmServer
from jaxtrain.generation.vllm.servers import Servers
from jaxtrain.generation.weight_sync.adapter_upload import remove_adapter, send_adapter
from jaxtrain.generation.weight_sync.delivery import push_to_all, put_to_sleep, wake
from jaxtrain.safe_io import parse_json, read_text

DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
NOTE = "made_by_jaxtrain.json"
UNFINISHED = ".{}.unfinished"


class LoraPublisher:
    """`publisher.Publisher` by adapter folders.

    run: identifies this run, by its folder. write(params, folder): writes a PEFT folder.
    measure(params): bytes that this takes. policies: names of several adapters that are published
    together, as {policy: params}: a server has a version once it has that of each.
    """

    def __init__(
        self,
        servers: Servers,
        folder: Path,
        run: str,
        write: Callable[[Any, Path], None],
        measure: Callable[[Any], int],
        policies: Sequence[str] = (),
    ):
        self.policies = tuple(policies) or ("",)
        self.servers, self.folder = servers, Path(folder).absolute()
        self.run, self.write, self.measure = run, write, measure
        self.version = -1
        self.step_seconds = servers.step_seconds()
        """Limit for a step of a server; longer where adapters are large."""
        self._written: list[str] = []
        """Names of the existing folders, the oldest first."""
        self._loaded: defaultdict[VllmServer, set[str]] = defaultdict(set)
        self._sends: set[VllmServer] = set()
        """Servers that do not see the folder."""
        self._lock = threading.Lock()
        servers.push_weights = self.push_weights
        self._clear_leftovers()

    def publish(self, version: int, params: Any, rebuild: Any = None) -> dict[str, float]:
        """Write the version and have every server load it; see `publisher.Publisher`."""
        started = time.perf_counter()
        size = sum(self.measure(params[name] if name else params) for name in self.policies)
        self.step_seconds = self.servers.step_seconds(size)
        for policy in self.policies:
            self._write(version, params[policy] if policy else params, policy)
        self.version = version
        written = time.perf_counter()
        push_to_all(self.servers, self.push_weights, version)
        self.servers.asleep = False
        self._prune()
        return {
            "sync/seconds": time.perf_counter() - started,
            "sync/write_seconds": written - started,
            "sync/bytes": float(size),
        }

    def sleep(self) -> None:
        """Put the servers to sleep until the next publish, if rollout.vllm.sleep is set."""
        if self.servers.config.sleep:
            put_to_sleep(self.servers, self.step_seconds)

    def close(self) -> None:
        """Unload and delete all versions; stop watching the servers."""
        self.servers.close()
        self._prune(keep=0)

    def push_weights(self, server: VllmServer) -> None:
        """Have one server load the newest version."""
        deadline = Deadline(self.servers.config.sync_seconds)
        with server.alone(deadline):
            epoch, version = server.epoch, self.version
            if server.state == "up" and server.version == version and not self.servers.asleep:
                return  # a publish or a watcher has pushed it while this one waited for the lock
            if server.state in ("new", "down"):
                self._loaded[server].clear()  # it was restarted, or its state is unknown
            if self.servers.asleep:
                wake(server, deadline, self.step_seconds, "weights", "kv_cache")
            for policy in self.policies:
                name = self.servers.label(version, policy)
                self._load(server, name, deadline)
                self._loaded[server].add(name)
            self.servers.mark_up(server, version, epoch)

    def _load(self, server: VllmServer, name: str, deadline: Deadline) -> None:
        how, path = self.servers.config.adapter_transport, str(self.folder / name)
        if how == "http" or server in self._sends:
            self._sends.add(server)
            limit = Deadline(deadline.left(self.step_seconds))
            with server.steps.wait("a new adapter", limit.seconds):
                path = send_adapter(server.url, self.folder, name, limit)
        body = {"lora_name": name, "lora_path": path}
        try:
            limit = deadline.left(self.step_seconds)
            server.call("POST", "/v1/load_lora_adapter", body, timeout=limit)
        except ServerRefused as error:
            # A repeated call after a lost answer; names are unique, so that it is the same adapter.
            if error.status == 400 and "already" in error.message:
                return
            if error.status == 404 and error.message == "Not Found":
                raise UserError(
                    f"{server.url} has no /v1/load_lora_adapter; start it with --enable-lora and"
                    " VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
                ) from None
            if error.status == 404 and how == "auto" and server not in self._sends:
                self.servers.log(
                    f"vllm {server.url} does not see {self.folder}: adapters are sent to it over"
                    " HTTP"
                )
                self._sends.add(server)
                return self._load(server, name, deadline)
            if error.status == 404:
                raise UserError(
                    f"{server.url} cannot read {body['lora_path']}: {error.message}; set"
                    " rollout.vllm.adapter_dir to a folder that the server sees under the same path"
                ) from None
            if "rank" in error.message.lower():
                raise UserError(
                    f"{server.url} does not take the adapter: {error.message}; start it with"
                    " --max-lora-rank of at least adapter.rank"
                ) from None
            raise

    def _write(self, version: int, params: Any, policy: str) -> None:
        """Write the folder of a version atomically; a full disk costs older versions first."""
        target = self.folder / self.servers.label(version, policy)
        for is_retry in (False, True):
            unfinished = target.with_name(UNFINISHED.format(target.name))
            shutil.rmtree(unfinished, ignore_errors=True)
            try:
                unfinished.mkdir(parents=True)
                note = {"run": self.run, "name": target.name}
                (unfinished / NOTE).write_text(json.dumps(note) + "\n")
                reserve(unfinished, self.measure(params))
                self.write(params, unfinished)
                # Renamed when complete: servers read the folder, and never see half of it.
                shutil.rmtree(target, ignore_errors=True)
                os.replace(unfinished, target)
                self._written = [n for n in self._written if n != target.name] + [target.name]
                return
            except OSError as error:
                shutil.rmtree(unfinished, ignore_errors=True)
                if error.errno not in DISK_FULL_ERRORS or is_retry:
                    raise RunStopped(
                        f"rollout.vllm.adapter_dir {self.folder}: version {version} cannot be"
                        f" written: {error.strerror or error}; make room there or name another"
                        " folder. Training can be resumed"
                    ) from None
                self.servers.log(f"{self.folder} is full: deleting all versions but the newest")
                self._prune(keep=1)

    def _prune(self, keep: int | None = None) -> None:
        """Unload and delete all but the newest `keep` versions."""
        keep = self.servers.config.keep_adapters if keep is None else keep
        count = len(self.policies)
        # While a version is written, the one before it is still served.
        keep = keep * count + (len(self._written) % count if keep else 0)
        with self._lock:
            for name in self._written[: max(0, len(self._written) - keep)]:
                # A list, not a generator: every server must unload it, even if one refuses.
                if all([self._unload(server, name) for server in self.servers.all]):
                    shutil.rmtree(self.folder / name, ignore_errors=True)
                    self._written.remove(name)

    def _unload(self, server: VllmServer, name: str) -> bool:
        """Return True once the server has unloaded an adapter, so that its folder may be
        deleted."""
        if name not in self._loaded[server]:
            return True
        if server.lost:
            return True  # when it is readmitted, it counts as having no adapters
        if server.kept_version is not None and name == self.servers.label(server.kept_version):
            return False  # an evaluation samples from it
        try:
            body = {"lora_name": name}
            server.call("POST", "/v1/unload_lora_adapter", body, timeout=self.step_seconds)
        except ServerRefused as error:
            if error.status != 404:
                return False
        except ServerGone as error:
            self.servers.drop(server, f"/v1/unload_lora_adapter: {error}")
            return server.lost
        self._loaded[server].discard(name)
        if server in self._sends:
            with contextlib.suppress(ServerGone):  # the files go with the server's process
                remove_adapter(server.url, name, self.step_seconds)
        return True

    def _clear_leftovers(self) -> None:
        """Unload and delete adapters of an earlier process of this run."""
        folders = self._find_own()
        names = {path.name for path in folders}
        if not folders:
            return
        for server in self.servers.all:
            try:
                listed = call(server.url, "GET", "/v1/models", timeout=self.step_seconds)
                for model in listed["data"]:
                    is_leftover = Path(model.get("root", "")) in folders
                    if model.get("parent") and (is_leftover or model["id"] in names):
                        body = {"lora_name": model["id"]}
                        path = "/v1/unload_lora_adapter"
                        call(server.url, "POST", path, body, timeout=self.step_seconds)
                        if not is_leftover:  # it was uploaded
                            remove_adapter(server.url, model["id"], self.step_seconds)
            except (ServerGone, ServerRefused, TypeError, KeyError):
                return  # keep the folders if in doubt: a served adapter needs its own
        for path in folders:
            shutil.rmtree(path, ignore_errors=True)

    def _find_own(self) -> set[Path]:
        """Return the folders that an earlier process of this run wrote, by their notes. A folder
        that a user copied or renamed is the user's."""
        folders = set()
        for path in [*self.folder.glob("jaxtrain-*"), *self.folder.glob(".jaxtrain-*")]:
            try:
                note = parse_json(read_text(path / NOTE, 2**16))
                name = note["name"]
                if note["run"] == self.run and path.name in (name, UNFINISHED.format(name)):
                    folders.add(path)
            except (OSError, ValueError, TypeError, KeyError):
                continue  # no note, or another run's
        return folders


def reserve(folder: Path, size: int) -> None:
    """Raise OSError (ENOSPC) now if writing `size` bytes would fail midway. Tensors are written
    through memory maps, where a full disk kills the process by a signal."""
    path = folder / ".room"
    with path.open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, max(1, size))
    path.unlink()
