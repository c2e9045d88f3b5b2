"""Parameters by the names of their Hugging Face tensors: rates of their own, and what is trained.

Layers are stored stacked and tensors joined, split and transposed. A pattern is therefore read as
what it means for each tensor, and the op that builds the parameter puts these values where the
tensor's numbers go. An array that is constant along an axis has size 1 there, so a rate by layer
is [L, 1, 1].
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import OptimConfig
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import ParameterEntry, full_index
from jaxtrain.models.families import family
from jaxtrain.models.parameters import Params, Shapes

ROWS = re.compile(r"(.*)\[(\d*):(\d*)\]")
"""A pattern with a range of the first axis of its tensors."""
Codes = Callable[[str, tuple[int, ...]], Any]
"""(tensor, its shape) -> uint8 that broadcasts to that shape."""


@dataclass(frozen=True)
class ParameterGroups:
    """Factors by path, numbers or arrays that broadcast to the parameter; absent: 1."""

    rates: Mapping[str, Any]
    """Learning rate over optim.learning_rate; NaN: that of the other keys of section optim."""
    trained: Mapping[str, Any]
    """1 where the parameter is trained, 0 where it stays as it is."""

    def factor(self, path: str, default: float) -> Any:
        """Return what multiplies an update, by `default` where no group has a rate."""
        rate = self.rates.get(path, default)
        return np.where(np.isnan(rate), default, rate) * self.trained.get(path, 1.0)

    def is_frozen(self, path: str) -> bool:
        """Return whether nothing of a parameter is trained."""
        return not np.any(self.trained.get(path, 1.0))

    def stop(self, build: Callable[[Params], Any]) -> Callable[[Params], Any]:
        """Return `build` without gradients of what is not trained, so that neither the norm nor the
        optimizer sees any."""
        if not self.trained:
            return build

        def built(weights: Params) -> Any:
            stopped = {
                path: jnp.where(jnp.asarray(mask) > 0, weights[path], bare)
                if np.any(mask)
                else bare
                for path, mask in self.trained.items()
                for bare in [jax.lax.stop_gradient(weights[path])]
            }
            return build({**weights, **stopped})

        return built


def read_groups(optim: OptimConfig, bundle: ModelBundle, shapes: Shapes) -> ParameterGroups:
    """Return the groups of optim.lr_groups and optim.unfrozen_parameters.

    shapes: the trained parameters. Raises UserError for a pattern that names no trained tensor.
    """
    if bundle.adapter is None:
        entries = family(bundle.architecture).names(bundle.architecture)
    else:
        from jaxtrain.adapters.peft import adapter_entries

        entries = adapter_entries(bundle.architecture, bundle.adapter)
    entries = [entry for entry in entries if entry.param in shapes]
    names = {name for e in entries for name in e.op.shapes(shapes[e.param].shape)}
    patterns = [("lr_groups", group.pattern) for group in optim.lr_groups]
    patterns += [
        ("unfrozen_parameters", _split_rows(text)[0]) for text in optim.unfrozen_parameters
    ]
    for key, pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            listed = ", ".join(sorted(names, key=lambda name: (len(name), name))[:12])
            raise UserError(
                f"optim.{key}: {pattern!r} names no trained tensor; the {len(names)} trained ones"
                f" are {listed} ..."
            )
    rates: dict[str, Any] = {}
    if optim.lr_groups:
        peaks = [group.learning_rate / optim.learning_rate for group in optim.lr_groups]
        factors = np.array([np.nan, *peaks], np.float32)

        def group_of(name: str, _: tuple[int, ...]) -> Any:
            hits = [bool(re.search(group.pattern, name)) for group in optim.lr_groups]
            return np.uint8(len(hits) - hits[::-1].index(True) if any(hits) else 0)

        codes = read_codes(entries, shapes, group_of)
        rates = {path: factors[code] for path, code in codes.items() if np.any(code)}
    trained: dict[str, Any] = {}
    if optim.unfrozen_parameters:

        def rows_of(name: str, shape: tuple[int, ...]) -> Any:
            mask = np.zeros((shape or (1,))[0], np.uint8)
            for text in optim.unfrozen_parameters:
                pattern, rows = _split_rows(text)
                if re.search(pattern, name):
                    mask[rows] = 1
            constant = mask.all() or not mask.any() or not shape
            return mask.max() if constant else mask.reshape(-1, *[1] * (len(shape) - 1))

        codes = read_codes(entries, shapes, rows_of)
        trained = {path: np.float32(codes.get(path, 0)) for path in shapes}
        trained = {path: mask for path, mask in trained.items() if not np.all(mask)}
    return ParameterGroups(rates, trained)


def read_codes(
    entries: list[ParameterEntry], shapes: Shapes, code_of: Codes
) -> dict[str, np.ndarray]:
    """Return {path: uint8 that broadcasts to the parameter}: the code of the tensor that each
    number comes from."""
    codes = {}
    for entry in entries:
        shape = shapes[entry.param].shape
        sizes = entry.op.shapes(shape)
        values = {name: np.asarray(code_of(name, size)) for name, size in sizes.items()}
        alike = {int(value) if not value.ndim else -1 for value in values.values()}
        if len(alike) == 1 and -1 not in alike:
            codes[entry.param] = np.uint8(alike.pop())
            continue
        array = entry.op.read(
            lambda name, index, values=values, sizes=sizes: np.broadcast_to(
                values[name], sizes[name]
            )[index],
            full_index(shape),
        )
        for axis in range(array.ndim):
            first = array.take([0], axis)
            array = first if (array == first).all() else array
        codes[entry.param] = array
    return codes


def _split_rows(text: str) -> tuple[str, slice]:
    """Return (pattern, rows) of "^model.embed_tokens.weight$[:32000]"."""
    match = ROWS.fullmatch(text)
    if match is None:
        return text, slice(None)
    start, stop = (int(number) if number else None for number in match.groups()[1:])
    return match[1], slice(start, stop)
