"""Specification of an adapter: the slots of Linears, chosen by path patterns, and what else is
trained."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from flax import nnx

from jaxtrain.adapters.nf4 import TensorPart
from jaxtrain.errors import UserError
from jaxtrain.layers.linear import Linear
from jaxtrain.models import build, families
from jaxtrain.models.decoder_config import DecoderConfig

ALL = "all-linear"


class AdaptableLinear(NamedTuple):
    """A Linear that may get an adapter."""

    preset: str | None
    """Name of its group in the layer: attention, mlp, ..."""
    modules: tuple[str, ...]
    """Hugging Face modules that hold its weights."""
    shape: tuple[int, ...]
    """Shape of its kernel."""


Linears = Mapping[str, AdaptableLinear]
"""By path ("stack.block.attention.q")."""


@dataclasses.dataclass(frozen=True)
class LoRASpec:
    """The adapter of one Linear."""

    rank: int
    alpha: float
    rslora: bool = False
    dora: bool = False

    @property
    def scale(self) -> float:
        """Factor on A B: alpha / R, or alpha / sqrt(R) (rsLoRA: Kalajdzievski 2023,
        arXiv:2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclasses.dataclass(frozen=True)
class Adapter:
    """The trained parameters of a model; everything else is frozen."""

    slots: Mapping[str, LoRASpec]
    """By the path of the Linear."""
    full: tuple[str, ...] = ()
    """Paths of parameters that are trained in full."""
    dtype: str = "float32"
    """Dtype of trained parameters."""
    source: Path | None = None
    """PEFT folder with the starting values; None starts as the identity."""
    dropout: float = 0.0
    """Dropout rate of the input of each A."""
    quantize: str = "none"
    """How the kernels of all Linears are stored: "none" (as they are), or one of STORAGES."""
    tensors: Mapping[str, TensorPart] = dataclasses.field(default_factory=dict)
    """With "nf4_fused": by path, of Linears that are quantized with the others of a tensor."""
    rows: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """Token ids whose rows alone are trained, by the path of the table ("embed", "lm_head")."""

    def trains(self, path: str) -> bool:
        """Return whether the parameter of that path is trained."""
        return ".adapter." in path or path in self.full


def find_linears(config: DecoderConfig) -> Linears:
    """Return the Linears of an architecture by path."""
    entries = {entry.param: entry for entry in families.family(config).names(config)}
    nodes = dict(nnx.iter_graph(build.abstract(config)))
    linears = {}
    for path, node in nodes.items():
        if isinstance(node, Linear):
            name = ".".join(map(str, path))
            shape = node.kernel.get_value().shape
            tensors = entries[f"{name}.kernel"].op.shapes(shape)
            around = (nodes[path[:end]] for end in reversed(range(len(path))))
            presets = (layer.preset for layer in around if hasattr(layer, "preset"))
            modules = tuple(tensor.removesuffix(".weight") for tensor in tensors)
            linears[name] = AdaptableLinear(next(presets, None), modules, shape)
    return dict(sorted(linears.items()))


def choose_slots(
    linears: Linears,
    target: Sequence[str],
    default: LoRASpec,
    rank_pattern: Mapping[str, int],
    alpha_pattern: Mapping[str, float],
) -> dict[str, LoRASpec]:
    """Return a slot for each Linear that a pattern of `target` names; the last of several matching
    rank or alpha patterns wins. Raises UserError for a pattern that names nothing."""
    chosen = {path: default for path in linears if match_any(linears, "target", target)[path]}
    for key, pattern in [("rank", rank_pattern), ("alpha", alpha_pattern)]:
        for name, value in pattern.items():
            hits = match_any(linears, f"{key}_pattern", [name])
            if not any(hits[path] for path in chosen):
                raise UserError(
                    f"adapter.{key}_pattern {name!r} names no Linear that adapter.target chose;"
                    f" chosen: {', '.join(chosen)}"
                )
            for path in [path for path in chosen if hits[path]]:
                chosen[path] = dataclasses.replace(chosen[path], **{key: value})
    return chosen


def match_any(linears: Linears, key: str, patterns: Sequence[str]) -> dict[str, bool]:
    """{path: whether one of the patterns names that Linear}."""
    hits = dict.fromkeys(linears, False)
    for pattern in patterns:
        matched = [path for path in linears if _matches(path, linears[path], key, pattern)]
        if not matched:
            listed = ", ".join(f"{path} ({_leaf(of.modules[0])})" for path, of in linears.items())
            presets = sorted({of.preset for of in linears.values() if of.preset})
            raise UserError(
                f"adapter.{key} {pattern!r} names no Linear; presets:"
                f" {', '.join([*presets, ALL])}; Linears of this model: {listed}"
            )
        hits.update(dict.fromkeys(matched, True))
    return hits


def _matches(path: str, linear: AdaptableLinear, key: str, pattern: str) -> bool:
    if pattern in (ALL, linear.preset) or _fits(path, pattern):
        return True
    hits = [_fits(module, pattern) for module in linear.modules]
    if any(hits) and not all(hits):
        raise UserError(
            f"adapter.{key} {pattern!r} names {sum(hits)} of the {len(hits)} layers of {path};"
            " layers are stored stacked, so all of them get the adapter or none"
        )
    return all(hits)


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _leaf(module: str) -> str:
    return module.rsplit(".", 1)[-1]
