"""The folder of a run: its lock, its contents, and the point from which a resumed run continues.

.lock            locked while a process trains here; the system unlocks it when the process ends
run.json         names of the files that the run creates and may replace: run_files.py
config.json      resolved config of the newest attempt
attempts.jsonl   one line for each start: when, command, versions, devices, code from outside
heartbeat.json   current phase of the run, and how it ended: watchdog.py
hardware/        usage of each host's accelerators, memory and disk: hardware.py
checkpoints/ metrics.jsonl samples.jsonl log.txt ...   written by other modules
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax

from jaxtrain.config import Config
from jaxtrain.config.base import list_places
from jaxtrain.config.load import read_saved, validate_config
from jaxtrain.config.methods import DEFAULT_KIND
from jaxtrain.config.provenance import list_outside
from jaxtrain.config.root import is_resumable
from jaxtrain.config.secrets import redact, redact_command
from jaxtrain.errors import UserError
from jaxtrain.runs.checkpoint_folder import find_steps
from jaxtrain.runs.manifest import write_atomically
from jaxtrain.runs.records import MetricsRecord, ends_with_newline, flatten, read_records
from jaxtrain.runs.run_files import (
    StartUndo,
    claim_names,
    has_saved,
    note_saved,
    put_back,
    read_names,
    require_own,
)
from jaxtrain.runs.watchdog import describe_silent_end

ALWAYS = (
    "config.json attempts.jsonl checkpoints metrics.jsonl samples.jsonl log.txt stacks.txt"
    " heartbeat.json hardware nonfinite_batch_step_*.npz memory-*.prof"
).split()
"""Names that every run creates in its folder."""

PACKAGES = "jax jaxlib flax optax orbax-checkpoint grain numpy transformers tokenizers datasets"


class RunFolder:
    """Context that claims config.run.output_dir for this process. Only process 0 writes to it."""

    def __init__(
        self, config: Config, command: list[str], base: Path | None = None, needs_base: bool = False
    ):
        """base: folder of model.path, as it was opened. needs_base: whether a run that goes on
        reads weights of it."""
        self.path = Path(config.run.output_dir)
        self.config, self.command = config, command
        self.attempt = 0
        """Number of this start, from 1."""
        self.changes: list[str] = []
        """Keys that differ from the resumed run's config, as "key: old -> new"."""
        self.silent_end = ""
        """How the last attempt ended, if it has not said so itself."""
        self.base, self.needs_base = base, needs_base
        self._lock: int | None = None
        self._saved = self._recorded = False
        self._undo: StartUndo | None = None
        """What the start has changed so far in the folder of an earlier run; None once accepted."""

    def __enter__(self) -> "RunFolder":
        if jax.process_index() == 0:
            self._claim()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._lock is not None:
            try:
                if self._undo is not None:
                    with contextlib.suppress(OSError):  # what ended the start is what people see
                        self._undo.run()
            finally:
                os.close(self._lock)
                self._lock = self._undo = None

    def accept(self) -> None:
        """Record this start, which nothing can refuse any more: until then what an earlier run has
        left in the folder stays, or comes back."""
        if self._lock is not None and not self._recorded:
            self._record_start()
        if self._undo is not None:
            self._undo.forget()
            self._undo = None

    def note_saved(self) -> None:
        """Record that there is a checkpoint, so that lost ones are noticed."""
        if not self._saved:
            self._saved = True
            note_saved(self.path)

    def rewind(self, step: int) -> None:
        """Drop the lines that steps after `step` wrote before the run was stopped.

        Step 0 restarts from the beginning. UserError if run.resume = "required" forbids that.
        """
        if step == 0 and self.config.run.resume == "required":
            raise UserError(
                f'run.resume is "required" but {self.path} holds no usable checkpoint; set it to'
                ' "auto", or name the folder of a run in run.output_dir'
            )
        if jax.process_index() == 0:
            for name in ("metrics.jsonl", "samples.jsonl"):
                # An evaluation before the first step is logged as step 0 and repeated by a fresh
                # start, so that its lines must go as well.
                try:
                    cut_lines(self.path / name, step if step else -1)
                except OSError as error:
                    raise UserError(
                        f"{self.path / name} cannot be continued: {error.strerror or error}; move"
                        " it away, or free some space"
                    ) from error

    def describe(self) -> list[str]:
        """Return the first lines to print: folder, versions, and config changes since the last
        attempt."""
        versions = ", ".join(f"{name} {version}" for name, version in find_versions().items())
        lines = [f"run {self.path}, attempt {self.attempt}: {versions}"]
        if self.silent_end:
            lines.append(f"warning: {self.silent_end}")
        if self.changes:
            lines.append("the config changed since the last attempt: " + "; ".join(self.changes))
        return lines

    def _claim(self) -> None:
        """Run all checks in order; nothing is written before the last of them has passed."""
        run = self.config.run
        run_names = list_names(self.config)
        try:
            require_own(self.path, run_names)
            self._check_inputs(run_names)
            self.path.mkdir(parents=True, exist_ok=True)
            # Before anything is deleted or written: a second process must leave the folder intact.
            self._lock = take_lock(self.path / ".lock", self.path)
            put_back(self.path)
            if not run.overwrite:
                self._check_resume()
            started = (self.path / "config.json").exists()
            if started:
                self._undo = StartUndo(self.path, overwrite=run.overwrite)
            claim_names(self.path, run_names)
            for name in ALWAYS:
                path = self.path / name
                if "." in name and path.exists() and not path.is_file():
                    raise UserError(f"{path} is no regular file; move it away, it is the run's")
            attempts = self.path / "attempts.jsonl"
            records = [*read_records(attempts)] if attempts.exists() else []
            self.attempt = 1 + len(records)
            self.silent_end = describe_silent_end(self.path, list_ran(records[-1:]))
            if not started or run.overwrite:
                self._record_start()
        except OSError as error:
            self.__exit__()
            raise UserError(
                f"run.output_dir {str(self.path)!r} cannot be used: {error.strerror or error}."
                " Name a folder that this user may write to, on a disk with free space"
            ) from error
        except UserError:
            self.__exit__()
            raise

    def _record_start(self) -> None:
        """Write config.json and the line of this attempt."""
        self._recorded = True
        attempts = self.path / "attempts.jsonl"
        saved = redact(self.config.absolute())
        write_atomically(self.path / "config.json", json.dumps(saved, indent=2))
        # A kill may have cut the last line; appending to it would damage this record, too.
        start = "" if ends_with_newline(attempts) else "\n"
        with attempts.open("a") as file:
            record = describe_attempt(self.attempt, redact_command(self.command))
            record["plugins"] = list_outside(self.config)
            file.write(start + json.dumps(record) + "\n")

    def _check_inputs(self, names: Collection[str]) -> None:
        """Reject inputs that lie in files which this run replaces, or deletes with
        run.overwrite."""
        # Compare real paths: an input may reach the folder through a link.
        home, run_names = os.path.realpath(self.path), {*names, *(read_names(self.path) or ())}
        for key, value in list_places(self.config):
            if not os.path.exists(value):
                value = value.partition(":")[0]  # "file.py:name", "builtin:data"
            first = os.path.relpath(os.path.realpath(value), home).split(os.sep)[0]
            made_here = key in ("run.output_dir", "rollout.vllm.adapter_dir", "data.cache_dir")
            if not made_here and any(fnmatchcase(first, name) for name in run_names):
                raise UserError(
                    f"{key} {value!r} lies in {first!r} of run.output_dir {str(self.path)!r},"
                    " which this run replaces; name another run.output_dir, or copy it elsewhere"
                )

    def _check_resume(self) -> None:
        run = self.config.run
        has_steps = bool(find_steps(self.path / "checkpoints"))
        metrics = self.path / "metrics.jsonl"
        has_metrics = metrics.exists() and metrics.stat().st_size > 0
        if run.resume == "never" and (has_steps or has_metrics):
            raise UserError(
                f'run.output_dir {str(self.path)!r} holds a run and run.resume is "never"; name'
                " another folder, or set run.overwrite=true to delete that run"
            )
        exported = (self.path / "model").is_dir() and has_metrics  # by a version without the record
        if not has_steps and (has_saved(self.path) or exported):
            raise UserError(
                f"run.output_dir {str(self.path)!r} holds a run that has saved checkpoints, but"
                f" {self.path / 'checkpoints'} has none any more, so it cannot go on: put one back,"
                " name another folder, or set run.overwrite=true to delete what there is of that"
                " run and start again"
            )
        if run.resume == "required" and not has_steps:
            self.rewind(0)
        if not (has_steps or has_metrics):
            return
        self.changes, forbidden = find_changes(
            redact(read_config(self.path / "config.json"), references=True),
            redact(self.config.absolute(), references=True),
            last_device_count(self.path / "attempts.jsonl"),
            jax.device_count(),
            self.config.task.reads,
        )
        if has_steps:
            self._check_base(forbidden)
        if forbidden and not run.allow_config_change:
            omitted = f"\n  ... and {len(forbidden) - 8} more" if len(forbidden) > 8 else ""
            listed = "\n  ".join(forbidden[:8])
            raise UserError(
                f"run.output_dir {str(self.path)!r} holds a run with another config"
                f" (saved -> now):\n  {listed}{omitted}\nName another folder, restore the old"
                " values, set run.allow_config_change=true to go on with the new ones, or"
                " run.overwrite=true to start again"
            )

    def _check_base(self, forbidden: list[str]) -> None:
        """Take a base that was only moved off the forbidden changes, and put one with other weights
        on them."""
        from jaxtrain.runs.base_record import is_same_base

        same = is_same_base(self.path, self.base)
        if same:
            forbidden[:] = [line for line in forbidden if not line.startswith("model.path: ")]
        elif same is False and self.needs_base:
            forbidden.append(
                f"model.path: {self.config.model.path!r} has other weights now than when this run"
                " was trained on it"
            )


def list_names(config: Config) -> list[str]:
    """Return the names of everything a run with this config creates in its folder."""
    log, vllm = config.log, config.rollout.vllm
    on_vllm, on_sglang = (config.rollout.engine == name for name in ("vllm", "sglang"))
    places = [config, *config.data.datasets, *config.eval.sets]
    gym = any(section.env is not None and section.env.gym.start for section in places)
    optional_names = {
        "curves.png": log.plot,
        "report.html": log.report,
        "tensorboard": log.tensorboard,
        "wandb": log.wandb_project,
        "wandb_id": log.wandb_project,
        "profile": log.profile_start,
        "model": config.run.export,
        "base": config.model.path,
        "draft": config.rollout.draft_refresh,
        "adapters": on_vllm and vllm.sync == "lora",
        "servers.json": on_vllm or on_sglang,
        "weights": on_sglang,
        "evaluating.json": on_vllm and vllm.eval_servers,
        "servers": on_vllm and vllm.launch == "local",
        "gym": gym,
        "gym.log": gym,
        "observers": config.observers,
    }
    return [*ALWAYS, *(name for name, enabled in optional_names.items() if enabled)]


def find_changes(
    saved: dict,
    current: dict,
    devices_saved: int | None,
    devices_now: int,
    reads: Collection[str] = (),
) -> tuple[list[str], list[str]]:
    """Return all differing keys as "key: old -> new", and those of them that affect the training
    result.

    reads: sections that the task trains on. Otherwise env and rewards only affect eval.sets.
    """
    before, after = flatten(saved), flatten(current)
    keys = [*before, *(key for key in after if key not in before)]
    differing = [key for key in keys if before.get(key) != after.get(key)]
    kind = after.get("task.kind", DEFAULT_KIND)
    same_batch = before.get("data.global_batch_size") is not None
    forbidden = []
    for key in differing:
        old, new = before.get(key), after.get(key)
        # Raising the number of steps, or splitting the same global batch differently, computes the
        # same steps.
        longer = key in ("run.max_steps", "run.num_epochs") and old and new and new > old
        split = key in ("data.micro_batch_size", "optim.gradient_accumulation_steps") and same_batch
        section = key.split(".")[0]
        judged = section in ("env", "rewards") and section not in reads
        if not (longer or split or judged or is_resumable(key, kind)):
            forbidden.append(key)
    shown = [f"{key}: {before.get(key)!r} -> {after.get(key)!r}" for key in differing]
    refused = [f"{key}: {before.get(key)!r} -> {after.get(key)!r}" for key in forbidden]
    if devices_saved not in (None, devices_now) and not same_batch:
        line = f"devices: {devices_saved} -> {devices_now}"
        shown.append(line)
        refused.append(line + " (without data.global_batch_size a step's batch follows them)")
    return shown, refused


def take_lock(path: Path, folder: Path) -> int:
    """Lock the folder for this process; raise UserError if a running process holds the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        raise UserError(
            f"run.output_dir {str(folder)!r} is in use by {holder}; wait for it, stop it, or name"
            " another folder"
        ) from None
    except OSError:
        # Some network file systems have no locks. Training there is allowed, and avoiding two runs
        # in one folder is then up to the user.
        return descriptor
    # Only after the lock is taken: until then the content names the process that holds it.
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode())
    return descriptor


def cut_lines(path: Path, step: int) -> None:
    """Keep the lines of a jsonl file whose "step" is at most `step`; drop blank and damaged ones.

    Raises OSError. The file is streamed, since it may hold the answers of weeks.
    """
    if not path.exists():
        return
    retained_bytes = sum(
        len(line.raw) + 1 for line in read_records(path) if _is_retained(line, step)
    )
    if retained_bytes == path.stat().st_size:
        return
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        for record in read_records(path):
            if _is_retained(record, step):
                file.write(record.raw + b"\n")
    temporary.replace(path)  # atomic, so that a kill loses no lines


def _is_retained(record: MetricsRecord, step: int) -> bool:
    return record.step is not None and record.step <= step and record.terminated


def read_config(path: Path) -> dict[str, Any]:
    """Read a saved config, adding defaults of keys that are newer than it; raise UserError if it is
    missing or broken."""
    try:
        saved = read_saved(path)
    except UserError as error:
        why = str(error) if os.path.lexists(path) else f"{path} is missing"
        raise UserError(
            f"{why}, so nobody can tell which config its checkpoints belong to; put it back, or"
            " set run.overwrite=true to start again"
        ) from None
    with contextlib.suppress(UserError):  # find_changes reports keys that are no longer allowed
        return validate_config(saved, str(path)).absolute()
    return saved


def last_device_count(attempts: Path) -> int | None:
    """Return the number of devices of the newest attempt; None if it was not recorded."""
    try:
        newest = [record for record in read_records(attempts) if record.value][-1:]
    except OSError:
        return None
    devices = newest[0].value.get("devices") if newest and newest[0].value else None
    return len(devices) if isinstance(devices, list) else None


def list_ran(records: Sequence[MetricsRecord]) -> list[str]:
    """Return the names of the code from outside that recorded attempts ran."""
    ran = [record.value.get("plugins") for record in records if record.value]
    entries = [entry for part in ran if isinstance(part, list) for entry in part]
    return [str(entry["name"]) for entry in entries if isinstance(entry, dict) and "name" in entry]


def describe_attempt(number: int, command: list[str]) -> dict[str, Any]:
    """Return the facts that distinguish this start from other starts of the run."""
    return {
        "attempt": number,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command,
        "process": os.getpid(),
        "host": platform.node(),
        "platform": platform.platform(),
        "versions": find_versions(),
        "devices": [device.device_kind for device in jax.devices()],
        "processes": jax.process_count(),
    }


def find_versions() -> dict[str, str]:
    """Return the versions of Python, jaxtrain and the libraries that affect a run."""
    import jaxtrain

    versions = {"python": platform.python_version(), "jaxtrain": jaxtrain.__version__}
    for package in PACKAGES.split():
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
