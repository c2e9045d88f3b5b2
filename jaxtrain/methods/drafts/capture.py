"""Run a target for its states alone, on a mesh of its own or on that of the training."""

import functools
import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.core.weights import abstract_params, open_params
from jaxtrain.distributed.feed import feed, row_shards
from jaxtrain.huggingface.packed import fingerprint
from jaxtrain.methods.drafts.target_states import LAST, STATES, run_target
from jaxtrain.models.parameters import Params, Rebuild

States = dict[str, jax.Array]
"""{STATES: [A, B, T, C * D], LAST: [A, B, T, D] where it is wanted}, in the compute dtype."""


class FrozenTarget:
    """A frozen target on the mesh of its bundle; its weights are read on the first call."""

    def __init__(self, bundle: ModelBundle, layers: Sequence[int], *, last: bool, seed: int):
        """layers: layers to capture, in this order. last: whether to return the final-normed
        states, too. seed: for weights that are drawn."""
        self.bundle, self.layers, self.last = bundle, tuple(layers), last
        self._seed = seed
        self._params: Params | None = None
        self._rebuild: Rebuild | None = None
        self._launch = threading.Lock()

    @property
    def streams(self) -> dict[str, Any]:
        """Dtypes of the states, each a vector a token."""
        features = self.bundle.architecture.hidden_size
        dtype = jnp.dtype(self.bundle.options["dtype"])
        captured = {STATES: np.dtype((dtype, (len(self.layers) * features,)))}
        return {**captured, LAST: np.dtype((dtype, (features,)))} if self.last else captured

    def open(self) -> None:
        """Read or draw the weights, once."""
        if self._params is None:
            self._params = open_params(self.bundle, self._seed)
            self._rebuild = abstract_params(self.bundle)[1]

    def __call__(self, batch: Batch) -> States:
        """Return the states of a host batch's tokens, as `capture` does."""
        return self.capture(batch, self.layers, last=self.last)

    def capture(self, batch: Batch, layers: tuple[int, ...], *, last: bool) -> States:
        """Return the states of any layers for a host batch's tokens, on the target's mesh, possibly
        still being computed. Rows are padded to a multiple of the devices; the added ones are
        meaningless. Thread-safe."""
        mesh = self.bundle.mesh
        bare = batch._replace(weights={}, streams={}, denoms={})
        # Programs of several devices must reach all of them in one order.
        with self._launch, jax.set_mesh(mesh):
            self.open()
            assert self._params is not None and self._rebuild is not None
            run = make_capture(self._rebuild, layers, last)
            return run(self._params, feed(pad_rows(bare, row_shards(mesh)), mesh))

    def identify(self) -> dict[str, Any]:
        """Return everything that states depend on besides tokens and layers, as JSON."""
        bundle = self.bundle
        weights = ["random", self._seed]
        description: dict[str, Any] = {
            "weights": digest(weights) if bundle.folder is None else fingerprint(bundle.folder),
            "architecture": digest(bundle.architecture.to_hf()),
            "dtype": bundle.options["dtype"],
            "stored_dtype": bundle.options["param_dtype"],
        }
        adapter = bundle.adapter
        if adapter is not None:
            description["quantize"] = adapter.quantize
            if adapter.source is not None:
                files = sorted(Path(adapter.source).glob("adapter_*"))
                description["adapter"] = digest(
                    [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
                )
        return {"quantize": "none", "adapter": "none", **description}


def digest(value: Any) -> str:
    """Return the sha256 of a value of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@functools.lru_cache(maxsize=8)
def make_capture(
    rebuild: Rebuild, layers: tuple[int, ...], last: bool
) -> Callable[[Params, Batch], States]:
    """Compile `(params, batch [A, B, T]) -> States`, once."""

    def capture(params: Params, batch: Batch) -> States:
        model = rebuild(params)
        outputs = jax.lax.map(lambda micro: run_target(model, micro, layers, last=last), batch)
        states = {STATES: outputs.captured}
        return states if outputs.last is None else {**states, LAST: outputs.last}

    return jax.jit(capture)


def pad_rows(batch: Batch, multiple: int) -> Batch:
    """Pad a host batch [A, B, T] with empty rows up to a multiple."""
    missing = -batch.tokens.shape[1] % multiple
    if not missing:
        return batch

    def pad(name: str, values: np.ndarray) -> np.ndarray:
        added = np.zeros((len(values), missing, *values.shape[2:]), values.dtype)
        index = np.arange(values.shape[2], dtype=values.dtype)
        empty = {"prev": -1, "owner": -1, "until": index + 1, "since": index}
        added += np.asarray(empty.get(name, 0), values.dtype)
        return np.concatenate([values, added], axis=1)

    fields = {n: pad(n, v) for n, v in batch._asdict().items() if isinstance(v, np.ndarray)}
    return batch._replace(**fields)
