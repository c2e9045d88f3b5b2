"""Checkpoints: state, data cursor and config, written by Orbax and sealed by a manifest.

    loop thread      save() copies the arrays off the devices, hands them to Orbax and returns
    Orbax threads    write <folder>/<step>.orbax-checkpoint-tmp, then rename it to <folder>/<step>
    seal thread      waits for that rename, writes manifest.json (size and sha256 of every file, the
                     names of the arrays, the metrics), and only then deletes old checkpoints

The next save() and close() wait for the seal thread and raise its error, if any. A checkpoint is
valid if its manifest exists and agrees with its files, so a process killed at any moment, a
truncated file or a flipped bit costs one checkpoint, never the run. <folder>/<step>.writing
distinguishes a checkpoint that was never finished (dropped) from one damaged later (set aside).
"""

import contextlib
import logging
import re
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from jaxtrain.distributed.broadcast import broadcast
from jaxtrain.errors import UserError
from jaxtrain.runs.checkpoint_folder import (
    ORBAX_TMP,
    WRITING,
    choose_retained,
    clear_folder,
    describe_all_damaged,
    find_good_step,
    find_steps,
    read_metrics,
    remove_folder,
)
from jaxtrain.runs.manifest import find_damage, is_sealed, read_manifest, write_manifest

UNSAFE_PATH_CHARS = re.compile(r"[\[\]*?\\]")
"""Characters of a path that Orbax reads as glob patterns or as a slash."""


class Restored(NamedTuple):
    """State from which a resumed run continues."""

    step: int
    arrays: Any
    """Saved pytree, with the shardings of the abstract arrays."""
    cursor: dict
    """State of the data source, from state()."""


class Checkpoints:
    """Checkpoints of one run. All processes of a run call every method, at the same steps."""

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 2,
        keep_every: int | None = None,
        best_metric: str | None = None,
        best_mode: Literal["min", "max"] = "min",
        background: bool = True,
        log: Callable[[str], None] = print,
        saved: Callable[[int, Path], None] = lambda step, folder: None,
    ):
        """saved: called on process 0, in the seal thread, with each complete checkpoint."""
        self.folder = Path(folder).absolute()
        self.keep, self.keep_every = keep, keep_every
        self.best_metric = best_metric
        self.best_mode: Literal["min", "max"] = best_mode
        self.background, self.log, self.saved = background, log, saved
        self._orbax: Any = None  # an ocp.CheckpointManager, once something is saved or restored
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="seal-checkpoint")
        self._sealing: Future | None = None
        self._missed = False
        self._filter = _OrbaxChatter()
        logging.getLogger("absl").addFilter(self._filter)
        logging.getLogger("asyncio").addFilter(_is_news)

    def steps(self) -> list[int]:
        """Steps with a manifest, oldest first; their files are not checked."""
        return find_steps(self.folder)

    def save(
        self,
        step: int,
        arrays: Any,
        cursor: dict,
        metrics: dict[str, float] | None = None,
        config: dict | None = None,
    ) -> None:
        """Save a pytree of jax arrays; return once they may be overwritten or donated.

        Does nothing if the step is already saved. Raises UserError on disk errors, which leave
        older checkpoints intact.
        """
        import orbax.checkpoint as ocp  # slow to import, and not needed before the first step

        # One checkpoint is in flight at most: its copies on the host are released before the next.
        self.wait()
        if self._folder(step).is_dir():
            return
        # A flat dict by path: a later version may restore it although its state classes differ.
        named = name_leaves(arrays)
        assert all(isinstance(a, jax.Array) for a in named.values()), "only jax arrays are saved"
        with self._explain_disk_errors(step), quiet_warnings():
            self._open()
            self._check_space(named)
            if jax.process_index() == 0:
                # The marker must exist before Orbax renames its folder to <step>: a kill between
                # the rename and the manifest would otherwise look like a damaged checkpoint.
                self._marker(step).touch()
            content = ocp.args.Composite(
                state=ocp.args.PyTreeSave(named),
                cursor=ocp.args.JsonSave(cursor),
                config=ocp.args.JsonSave(config or {}),
            )
            # force: the caller chose the step; Orbax must not skip it by its own save policy.
            self._orbax.save(step, args=content, force=True)
        if self.best_metric and self.best_metric not in (metrics or {}) and not self._missed:
            self._missed = True
            self.log(
                f"warning: checkpoint.best_metric {self.best_metric!r} was not measured at step"
                f" {step}, so this checkpoint cannot be the best; let eval.every divide"
                f" checkpoint.every. Measured: {', '.join(sorted(metrics or {})) or 'nothing'}"
            )
        shapes = {name: [list(a.shape), str(a.dtype)] for name, a in named.items()}
        self._sealing = self._threads.submit(self._seal, step, shapes, metrics or {})
        if not self.background:
            self.wait()

    def wait(self) -> None:
        """Block until the last save() is on disk and sealed; raise UserError if it failed."""
        # Cleared first, so that an error is raised once and close() does not raise it again.
        sealing, self._sealing = self._sealing, None
        if sealing is not None:
            sealing.result()

    def close(self) -> None:
        """Wait for the last save() and stop the threads; call it also when training failed."""
        try:
            self.wait()
        finally:
            self._threads.shutdown()
            if self._orbax is not None:
                with contextlib.suppress(OSError, ValueError):  # wait() has raised them already
                    self._orbax.close()
                self._orbax = None
            logging.getLogger("absl").removeFilter(self._filter)
            logging.getLogger("asyncio").removeFilter(_is_news)

    def restore(self, abstract: Any) -> Restored | None:
        """Restore the newest good checkpoint as the given pytree of ShapeDtypeStructs with
        shardings.

        Logs one message about newer unfinished and damaged checkpoints and moves them away. Returns
        None if no checkpoint was ever finished. Raises UserError if all are damaged, or if the
        arrays are not those of this model.
        """
        self.wait()
        # Process 0 alone verifies the checksums, which may take minutes, so that all processes
        # agree on one step even if a file changes meanwhile.
        step = broadcast("the newest checkpoint", self._find_newest)
        if step == -2:
            raise UserError(describe_all_damaged(self.folder))
        return None if step < 0 else self.load(step, abstract)

    def _find_newest(self) -> int:
        """Return the newest good step, -1 if there is none, or -2 if all are damaged; clear bad
        checkpoints."""
        step, problems = find_good_step(self.folder)
        if step < 0 and any(p.damaged for p in problems):
            return -2
        try:
            if report := clear_folder(self.folder, problems, step):
                self.log(report)
        except OSError as error:
            raise UserError(
                f"{self.folder} cannot be tidied up: {error.strerror or error}"
                f" ({error.filename}); fix its permissions, or remove what a run did not put there"
            ) from error
        return step

    def load(self, step: int, abstract: Any) -> Restored:
        """Read a checkpoint without checking its files; `abstract` may be a subset of its
        arrays."""
        import orbax.checkpoint as ocp

        folder = self._folder(step)
        named = name_leaves(abstract)
        check_shapes(folder, named)
        with quiet_warnings():
            self._open()
            state = ocp.args.PyTreeRestore(
                item=named,
                restore_args=ocp.checkpoint_utils.construct_restore_args(named),
                partial_restore=True,
            )
            cursor = ocp.args.JsonRestore()
            content = self._orbax.restore(step, args=ocp.args.Composite(state=state, cursor=cursor))
        # Orbax returns the dict in its own order; the tree wants the order of `named`.
        leaves = [content["state"][name] for name in named]
        arrays = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
        return Restored(step, arrays, content["cursor"])

    def _open(self) -> None:
        """Start Orbax on first use, so that restore() can clear the folder before."""
        import orbax.checkpoint as ocp

        if self._orbax is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            options = ocp.CheckpointManagerOptions(
                enable_async_checkpointing=self.background, save_root_metadata=False
            )
            self._orbax = ocp.CheckpointManager(self._plain_folder(), options=options)

    def _plain_folder(self) -> Path:
        """Return the folder under a path that Orbax can use.

        Orbax searches for the files of a checkpoint with glob patterns made of the full path, which
        do not match below "run[1]", and reads a backslash as a slash (etils.epath). For such paths
        return a link to the folder whose own path has no such characters.
        """
        if not UNSAFE_PATH_CHARS.search(str(self.folder)):
            return self.folder
        tmp_is_unsafe = UNSAFE_PATH_CHARS.search(tempfile.gettempdir())
        link_parent = tempfile.mkdtemp(prefix="jaxtrain-", dir="/tmp" if tmp_is_unsafe else None)
        weakref.finalize(self, shutil.rmtree, link_parent, ignore_errors=True)
        link = Path(link_parent) / "checkpoints"
        link.symlink_to(self.folder)
        return link

    def _seal(self, step: int, shapes: dict, metrics: dict[str, float]) -> None:
        """Wait for Orbax, write the manifest, then delete old checkpoints (the seal thread)."""
        with self._explain_disk_errors(step):
            self._orbax.wait_until_finished()
            if jax.process_index() == 0:
                # The order matters: the marker may go only once the manifest exists, and older
                # checkpoints only once this one is complete.
                record = {"step": step, "metrics": metrics, "arrays": shapes}
                write_manifest(self._folder(step), record)
                self._marker(step).unlink(missing_ok=True)
                self._delete_old()
                self.saved(step, self._folder(step))

    def _delete_old(self) -> None:
        metrics = {step: read_metrics(self._folder(step)) for step in self.steps()}
        retained_steps = choose_retained(
            metrics, self.keep, self.keep_every, self.best_metric, self.best_mode
        )
        for step in set(metrics) - retained_steps:
            remove_folder(self._folder(step))

    def _check_space(self, named: dict[str, jax.Array]) -> None:
        """Refuse early when the arrays cannot fit; Orbax compresses, hence the factor."""
        needed = sum(a.nbytes for a in named.values()) // (2 * jax.process_count())
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise OSError(f"No space left on device: about {needed:,} bytes needed, {free:,} free")

    @contextlib.contextmanager
    def _explain_disk_errors(self, step: int) -> Iterator[None]:
        """Turn a full or forbidden disk into a UserError and drop the half-written folder."""
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            # Disk errors of TensorStore arrive as ValueError or RuntimeError.
            if isinstance(error, UserError) or not is_disk_error(error):
                raise
            # On a full disk the half-written folder takes the space that a retry needs.
            for leftover in self.folder.glob(f"{step}{ORBAX_TMP}*"):
                shutil.rmtree(leftover, ignore_errors=True)
            with contextlib.suppress(OSError):
                if self._folder(step).is_dir() and not is_sealed(self._folder(step)):
                    remove_folder(self._folder(step))
                self._marker(step).unlink(missing_ok=True)
            good = ", ".join(map(str, self.steps())) or "none"
            raise UserError(
                f"the checkpoint of step {step} could not be written to {self.folder}:"
                f" {shorten(error)}. Free some space or fix the folder's permissions and start"
                f" the same command again; it goes on from the last finished checkpoint (steps"
                f" on disk: {good}). A smaller checkpoint.keep needs less space."
            ) from error

    def _folder(self, step: int) -> Path:
        return self.folder / str(step)

    def _marker(self, step: int) -> Path:
        return self.folder / f"{step}{WRITING}"


def name_leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves by path ("optimizer/0/mu/layers/kernel"), in the order of the tree."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in paths}
    assert len(named) == len(paths), "two leaves have the same path"
    return named


def check_shapes(folder: Path, named: dict[str, jax.ShapeDtypeStruct]) -> None:
    """Compare abstract arrays with the manifest's; raise UserError with the first differences."""
    saved = read_manifest(folder)["arrays"]
    expected = {name: [list(a.shape), str(a.dtype)] for name, a in named.items()}
    differing = [
        f"{name}: saved {_show(saved.get(name))}, this run {_show(spec)}"
        for name, spec in expected.items()
        if saved.get(name) != spec
    ]
    if differing:
        omitted = f" (and {len(differing) - 4} more)" if len(differing) > 4 else ""
        raise UserError(
            f"{folder} holds other arrays than this run has: {'; '.join(differing[:4])}{omitted}."
            " Use the config that the run was started with, or another run.output_dir"
        )


def load_checkpoint(folder: str | Path, abstract: Any, step: int | None = None) -> Restored:
    """Read the newest good checkpoint, or that of `step`, of a run that may still be training.

    Changes no files, unlike Checkpoints.restore. `abstract` may be a subset of the saved arrays.
    Raises UserError when there is no such checkpoint or its files are damaged.
    """
    folder = Path(folder)
    if step is None:
        step, _ = find_good_step(folder)
        if step < 0:
            raise UserError(
                f"{folder} holds no usable checkpoint; train first, or name another run"
            )
    elif step not in find_steps(folder):
        raise UserError(
            f"{folder} has no checkpoint of step {step}; there are {find_steps(folder)}"
        )
    elif damage := find_damage(folder / str(step)):
        raise UserError(f"{folder / str(step)} is damaged: {damage}")
    checkpoints = Checkpoints(folder)
    try:
        return checkpoints.load(step, abstract)
    finally:
        checkpoints.close()


REFUSALS = (
    "No space left on device",
    "Disk quota exceeded",
    "Permission denied",
    "Read-only file system",
    "File too large",
    "Input/output error",
    "Too many open files",
)
"""Messages of the operating system for storage errors; TensorStore quotes them in a ValueError."""


def is_disk_error(error: BaseException) -> bool:
    """Return True if the storage refused, as opposed to a bug in the program."""
    return isinstance(error, OSError) or any(text in str(error) for text in REFUSALS)


def shorten(error: BaseException) -> str:
    """Return the operating system's message if the error quotes one, else the error's own text."""
    if isinstance(error, OSError):
        return str(error)
    return next(text for text in REFUSALS if text in str(error))


@contextlib.contextmanager
def quiet_warnings() -> Iterator[None]:
    """Hide Orbax's advice on its own arguments."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"orbax\..*")
        yield


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for asyncio log records that repeat a disk error. When the disk is full, one of
    Orbax's many writes is raised and explained; the others are logged as tracebacks of tasks that
    nothing awaits."""
    error = record.exc_info[1] if record.exc_info else None
    return not ("never retrieved" in record.getMessage() and error and is_disk_error(error))


class _OrbaxChatter(logging.Filter):
    """Drops Orbax's log records from absl's logger: its errors reach the user as exceptions."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname


def _show(spec: list | None) -> str:
    return "nothing" if spec is None else f"{spec[1]}{spec[0]}"
