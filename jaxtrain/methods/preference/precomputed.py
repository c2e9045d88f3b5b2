"""Precomputed reference: log-probs of all data under the starting weights, stored on disk.

    first step   the trained weights are still the starting weights, and score every row
    later        a table in data.cache_dir, keyed by the weights and all that shapes their values;
                 no second copy of the weights, no second forward pass

Answers are keyed by the tokens of prompt and answer, so that other data, tokenizers or templates
never use wrong values. A run resumed from a checkpoint no longer has its starting weights: without
its table, or for answers missing in it, it stops with a message that names the difference.
"""

import hashlib
import json
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.config import Config
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.core.scorer import Scorer
from jaxtrain.core.task import POLICY
from jaxtrain.data.comparisons.pairs import SCORE
from jaxtrain.data.sources.cache import clear_folder, default_folder, find_key
from jaxtrain.data.sources.readers import is_stream
from jaxtrain.distributed.broadcast import broadcast_or_raise
from jaxtrain.errors import UserError
from jaxtrain.methods.offline import OfflineData
from jaxtrain.methods.preference.logp_table import (
    Arrays,
    LogpTable,
    UnknownAnswer,
    list_tables,
    read_about,
    read_table,
    write_table,
)
from jaxtrain.runs.manifest import hash_file

COVERED = "datasets"
"""Key of a table's description: digests of the datasets that it covers."""


class Precomputed:
    """Reference log-probs from the table, which is computed or read for the first batch."""

    def __init__(self, config: Config, bundle: ModelBundle, data: OfflineData):
        self.config, self.bundle, self.data = config, bundle, data
        cache = config.data.cache_dir
        self.folder = (Path(cache) if cache else default_folder()) / "reference"
        self.table: LogpTable | None = None

    def __call__(self, batch: Batch, scorer: Scorer) -> np.ndarray:
        """Return the log-probs [A, B, T] of a batch's answers; called on all processes."""
        if self.table is None:
            self.table = self.open(scorer)
        try:
            return self.table.fill(batch)
        except UnknownAnswer:
            raise UserError(
                "an answer of the data is not among the reference log-probs in"
                f" {self.folder} (task.reference precomputed); its rows changed since they were"
                " computed. Restore the data, or delete that folder and start a new run"
            ) from None

    def open(self, scorer: Scorer) -> LogpTable:
        """Open the table: process 0 reads and broadcasts it, or all compute and process 0
        writes."""
        about = broadcast_or_raise("the reference's key", self.describe)
        folder = self.folder / hashlib.sha256(json.dumps(about).encode()).hexdigest()
        arrays: Arrays | None = broadcast_or_raise(
            "reference log-probs", lambda: read_table(folder, about)
        )
        table = LogpTable(arrays)
        if arrays is not None:
            self.data.log(f"reference log-probs of {len(table):,} answers, read from {folder}")
        if scorer.snapshot().step > 0:
            if arrays is None:
                raise UserError(
                    f"the reference log-probs that this run began with are not in {self.folder}"
                    f" (task.reference precomputed): {self.differences(about)}. Restore it, or"
                    ' start anew with run.resume = "never"'
                )
            return table
        covered, needed = broadcast_or_raise(
            "what the reference knows", lambda: (read_covered(folder), self.keys())
        )
        if missing := [number for number, key in needed.items() if key not in covered]:
            self.compute(table, scorer, missing)
            self.data.log(f"reference log-probs of {len(table):,} answers are kept in {folder}")
            covered = sorted({*covered, *needed.values()})
            about = {**about, COVERED: covered}
            broadcast_or_raise("keeping log-probs", lambda: self.keep(table, folder, about))
        return table

    def compute(self, table: LogpTable, scorer: Scorer, datasets: list[int]) -> None:
        """Add the answers of datasets under the current weights, which are the starting weights."""
        for number in datasets:
            dataset = self._datasets()[number]
            self.data.log(f"{dataset.path}: the reference's log-probs are computed, once")
            for batch in self.data.eval_batches(dataset, self.bundle):
                try:
                    table.fill(batch)
                except UnknownAnswer:
                    logp = scorer.logp(batch, POLICY)
                    if not np.isfinite(logp[batch.weights[SCORE] != 0]).all():
                        raise UserError(
                            f"{dataset.path}: the reference's log-probs are NaN or infinite: the"
                            " weights of model.path are damaged, or model.compute_dtype is too"
                            " narrow for them"
                        ) from None
                    table.add(batch, logp)

    def keep(self, table: LogpTable, folder: Path, about: dict[str, Any]) -> None:
        """Write the table; a disk error costs the next run a pass, but does not stop this one."""
        try:
            clear_folder(folder.parent)
            write_table(table, folder, about)
        except OSError as error:
            self.data.log(f"reference log-probs are not kept: {error.strerror or error}")

    def describe(self) -> dict[str, Any]:
        """Return digests by name of all that the values depend on besides the tokens."""
        config = self.config
        digests: dict[str, Any] = {"weights": self._weights()}
        digests["model"] = _digest(
            [self.bundle.architecture.to_hf(), config.model.param_dtype, config.model.compute_dtype]
        )
        adapter = config.adapter
        if adapter.kind != "none":
            digests["adapter"] = _digest(
                [adapter.model_dump(mode="json"), _hash_folder(adapter.path)]
            )
        return digests

    def keys(self) -> dict[int, str]:
        """Return a digest of the rows of each dataset and of all that shapes their samples."""
        keys = {}
        for number, dataset in enumerate(self._datasets()):
            part = self.data.recipe.open(dataset)
            settings = self.data.recipe.settings(dataset) or dataset.model_dump_json()
            if is_stream(part.rows):
                continue  # eval_datasets; config refuses streams that train
            try:
                keys[number] = find_key(part, settings, self.bundle.tokenizer, self.data.log)
            except (TypeError, ValueError):  # rows that are not JSON are scored in every new run
                keys[number] = _digest([settings, secrets.token_hex()])
        return keys

    def differences(self, about: dict[str, Any]) -> str:
        """Describe how the newest table differs."""
        for table in list_tables(self.folder):
            names = [name for name in about if table.get(name) != about[name]]
            if names:
                return f"the newest one there differs in {', '.join(names)}"
        return "there is none of this model"

    def _weights(self) -> str:
        if self.bundle.folder is None:
            return _digest(["random", self.config.run.seed])
        return _hash_folder(self.bundle.folder)

    def _datasets(self) -> list[Any]:
        return [*self.config.data.datasets, *self.config.data.eval_datasets]


def read_covered(folder: Path) -> list[str]:
    """Read the digests of the datasets that a table covers."""
    return read_about(folder).get(COVERED, [])


def _hash_folder(folder: str | Path | None) -> str:
    if folder is None:
        return ""
    files = sorted(Path(folder).glob("*.safetensors"))
    with ThreadPoolExecutor(4) as pool:
        return _digest(list(pool.map(hash_file, files)))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
