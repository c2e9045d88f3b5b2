"""Weights on disk, by tinker:// path.

FOLDER/base.json                            which weights the models train on
FOLDER/models/MODEL/weights/NAME            a training state, with its optimizer
FOLDER/models/MODEL/sampler_weights/NAME    what a sampler needs
FOLDER/models/MODEL/snapshot                the newest state that a restart begins from

Each is a checkpoint with a manifest, written beside its place and renamed. A model's folder has its
id with "_" for ":".
"""

import heapq
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.core.step import State, abstract_state
from jaxtrain.errors import UserError
from jaxtrain.runs.checkpoint import Checkpoints
from jaxtrain.runs.manifest import write_atomically
from jaxtrain.text_safety import show
from jaxtrain.training_api.journal import sync_folder
from jaxtrain.training_api.trainer import Base, LoRASpec, ModelKind

MODEL_ID = re.compile(r"[0-9a-f-]{36}:train:\d{1,9}", re.ASCII)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
PATH = re.compile(
    rf"tinker://({MODEL_ID.pattern})/(weights|sampler_weights)/({NAME.pattern})", re.ASCII
)
MAX_TTL = 1e10
"""Seconds: three hundred years."""
ABOUT = "about.json"
BASE = "base.json"


class Saved(NamedTuple):
    """Weights on disk."""

    folder: Path
    about: dict[str, Any]
    """"request": the id of the request that wrote them; rank, attention, mlp: what is trained;
    "expires": Unix time at which they are deleted, if any."""

    @property
    def lora(self) -> LoRASpec:
        """Parameters that the model trains."""
        return LoRASpec(*(self.about[name] for name in LoRASpec._fields))

    @property
    def expired(self) -> bool:
        """True if their time is over."""
        return self.about.get("expires") is not None and self.about["expires"] <= time.time()


class WeightsStore:
    """Folder of weights that clients have trained."""

    def __init__(self, folder: Path, base: Base):
        """Raises UserError for a folder whose models train on other weights."""
        self.folder, self.base = folder, base
        self._renaming = threading.Lock()
        self._expiring: list[tuple[float, Path]] = []
        """Heap of weights that are deleted at a time."""
        self._check_base()
        for file in folder.glob(f"models/*/*weights/*/{ABOUT}"):
            self._note_expiry(file.parent)

    def _note_expiry(self, folder: Path) -> None:
        saved = self._read(folder)
        if saved is not None and saved.about.get("expires") is not None:
            heapq.heappush(self._expiring, (saved.about["expires"], folder))

    def delete_expired(self) -> None:
        """Delete the weights whose time is over; called by the device's thread, which reads
        them."""
        while self._expiring and self._expiring[0][0] <= time.time():
            _, folder = heapq.heappop(self._expiring)
            # Newer ones may have taken their place.
            if (saved := self._read(folder)) is not None and saved.expired:
                # First: where the newer ones are gone, `read_about` takes these for the weights.
                shutil.rmtree(replaced_folder(folder), ignore_errors=True)
                shutil.rmtree(folder, ignore_errors=True)

    def _check_base(self) -> None:
        record, location = self.folder / BASE, str(self.base.bundle.folder)
        identity = {"path": location, "fingerprint": self.base.fingerprint()}
        try:
            earlier = {name: json.loads(record.read_text())[name] for name in identity}
        except FileNotFoundError:
            write_json(record, identity)
            return
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise UserError(f"{record} cannot be read: {error}") from None
        if earlier["fingerprint"] != identity["fingerprint"]:
            raise UserError(
                f"--train {self.folder}: its models train on the weights that were in"
                f" {earlier['path']}, and those of {location}, as adapter.quantize stores them, are"
                " others; serve the first, or name another folder"
            )

    def model_folder(self, model_id: str) -> Path:
        """Return a model's folder."""
        return self.folder / "models" / model_id.replace(":", "_")

    def find(self, path: Any, kind: str, field: str) -> Saved:
        """Return the weights of a tinker:// path; UserError. field: of the request."""
        match = PATH.fullmatch(path) if isinstance(path, str) else None
        if match is None or match[2] != kind:
            raise UserError(f"{field} {show(path)} must be tinker://MODEL_ID/{kind}/NAME")
        saved = self.read_about(self.model_folder(match[1]) / kind / match[3])
        if saved is None:
            raise UserError(f"{field} {show(path)}: there are no such weights here")
        return saved

    def read_about(self, folder: Path) -> Saved | None:
        """Return the weights in a folder; None: there are none."""
        old = replaced_folder(folder)
        with self._renaming:
            if not folder.exists() and old.exists():  # killed between two renames
                os.replace(old, folder)
            # Within the lock: between the two renames of `save` there is nothing to read.
            saved = self._read(folder)
        return None if saved is None or saved.expired else saved

    def _read(self, folder: Path) -> Saved | None:
        try:
            return Saved(folder, json.loads((folder / ABOUT).read_text()))
        except (OSError, ValueError):
            return None

    def save(
        self,
        folder: Path,
        lora: LoRASpec,
        arrays: Any,
        cursor: dict[str, Any],
        request: str,
        seconds: float | None = None,
    ) -> None:
        """Write a pytree of arrays, in the place of older ones. seconds: until they are deleted;
        None: they stay."""
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        checkpoints = Checkpoints(unfinished, background=False, log=lambda text: None)
        try:
            checkpoints.save(0, arrays, cursor)
        finally:
            checkpoints.close()
        about = {**lora._asdict(), "request": request}
        if seconds is not None:
            about["expires"] = time.time() + seconds
        write_json(unfinished / ABOUT, about)
        old = replaced_folder(folder)
        shutil.rmtree(old, ignore_errors=True)
        with self._renaming:
            if folder.exists():
                os.replace(folder, old)
            os.replace(unfinished, folder)
        sync_folder(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
        self._note_expiry(folder)

    def read_state(self, folder: Path, kind: ModelKind) -> tuple[State, dict[str, Any]]:
        """Return a training state and its cursor; UserError where there is none."""
        roles = kind.roles
        shapes = abstract_state(roles.trained_shapes, kind.optimizer, roles.copy_shapes)
        arrays, cursor = read_arrays(folder, shapes.tree())
        return State.of_tree(arrays), cursor

    def read_params(self, folder: Path, kind: ModelKind) -> dict[str, Any]:
        """Return a sampler's parameters."""
        shapes = {**kind.roles.copy_shapes, **kind.roles.trained_shapes}
        return read_arrays(folder, shapes)[0]


def replaced_folder(folder: Path) -> Path:
    """Return where weights are while newer ones take their place."""
    return folder.with_name(f".{folder.name}.old")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write JSON that is on the disk, with its name, when this returns; never half of it."""
    write_atomically(path, json.dumps(value) + "\n")
    sync_folder(path.parent)


def read_arrays(folder: Path, shapes: Any) -> tuple[Any, dict[str, Any]]:
    """Return the arrays of a checkpoint and its cursor; UserError where there is none."""
    checkpoints = Checkpoints(folder, background=False, log=lambda text: None)
    try:
        restored = checkpoints.restore(shapes)
    finally:
        checkpoints.close()
    if restored is None:
        raise UserError(f"{folder} holds no weights")
    return restored.arrays, restored.cursor


def read_ttl(body: Mapping[str, Any]) -> float | None:
    """Return after how many seconds weights are deleted; None: never. UserError."""
    seconds = body.get("ttl_seconds")
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is not None and not (number and 0 < seconds <= MAX_TTL):
        raise UserError(
            f"ttl_seconds must be above 0, at most {MAX_TTL:.0e}, not {show(seconds, 60)}"
        )
    return seconds


def read_name(name: Any, field: str) -> str:
    """Return a name of weights; UserError."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UserError(f"{field} {show(name, 60)} must be letters, digits and . _ -, at most 128")
    return name
