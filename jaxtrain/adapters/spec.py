"""Specification of an adapter: the slots of Linears, chosen by path patterns, and what else is
trained."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from flax import nnx

from jaxtrain.adapters.nf4 import TensorPart
from jaxtrain.errors import UserError
from jaxtrain.layers.linear import Linear
from jaxtrain.layers.router import Router
from jaxtrain.models import build, families
from jaxtrain.models.decoder_config import DecoderConfig

ALL, ROUTER = "all-linear", "router"
APART = {
    ROUTER: (ROUTER,),
    "tower": ("tower", "vision", "visual"),
    "projector": ("projector", "connector", "merger", "vision"),
}
"""Presets that only patterns with one of these words reach; those of routers by what the folder
calls them, too."""
EXPRESSION = re.compile(r"[()|+^$\\{}]|^\.\*")
"""What only regular expressions contain."""


class AdaptableLinear(NamedTuple):
    """A Linear or a router, which may get an adapter."""

    preset: str | None
    """Name of its group in the layer: attention, mlp, ...; of a router ROUTER."""
    modules: tuple[str, ...]
    """Hugging Face modules that hold its weights."""
    shape: tuple[int, ...]
    """Shape of its kernel."""

    def by_layer(self) -> list[tuple[str, ...]]:
        """Return the modules of each layer; several for experts with tensors of their own."""
        layers = self.shape[0] if len(self.shape) > 2 else 1
        count = len(self.modules) // layers
        assert count * layers == len(self.modules), (
            f"{len(self.modules)} modules of {layers} layers"
        )
        return [self.modules[i * count : (i + 1) * count] for i in range(layers)]


Linears = Mapping[str, AdaptableLinear]
"""By path ("stack.block.attention.q")."""


@dataclasses.dataclass(frozen=True)
class LoRASpec:
    """The adapter of one Linear."""

    rank: int
    alpha: float
    rslora: bool = False
    dora: bool = False
    layers: tuple[int, ...] | None = None
    """Places in the stack of the layers that have it; None: all."""

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
    adaptable = find_adaptable(config)
    return {path: linear for path, linear in adaptable.items() if linear.preset != ROUTER}


def find_adaptable(config: DecoderConfig) -> Linears:
    """Return the Linears and routers of an architecture by path: what may get an adapter."""
    entries = {entry.param: entry for entry in families.family(config).names(config)}
    nodes = dict(nnx.iter_graph(build.abstract(config)))
    linears = {}
    for path, node in nodes.items():
        if isinstance(node, Linear | Router):
            name = ".".join(map(str, path))
            shape = node.kernel.get_value().shape
            tensors = entries[f"{name}.kernel"].op.shapes(shape)
            around = (nodes[path[:end]] for end in reversed(range(len(path))))
            presets = (layer.preset for layer in around if hasattr(layer, "preset"))
            modules = tuple(tensor.removesuffix(".weight") for tensor in tensors)
            preset = ROUTER if isinstance(node, Router) else next(presets, None)
            preset = str(path[1]) if path[0] == "vision" else preset
            linears[name] = AdaptableLinear(preset, modules, shape)
    return dict(sorted(linears.items()))


def choose_slots(
    linears: Linears,
    target: Sequence[str],
    default: LoRASpec,
    rank_pattern: Mapping[str, int],
    alpha_pattern: Mapping[str, float],
) -> dict[str, LoRASpec]:
    """Return a slot for each Linear that a pattern of `target` names in any layer; the last of
    several matching rank or alpha patterns wins. Raises UserError for a pattern that names
    nothing."""
    chosen = {
        path: dataclasses.replace(default, layers=choose_layers(hits))
        for path, hits in match_any(linears, "target", target).items()
        if any(hits)
    }
    for key, pattern in [("rank", rank_pattern), ("alpha", alpha_pattern)]:
        for name, value in pattern.items():
            hits = {}
            for path, layers in match_any(linears, f"{key}_pattern", [name]).items():
                adapted = chosen[path].layers if path in chosen else None
                of_adapted = layers if adapted is None else [layers[layer] for layer in adapted]
                if path in chosen and any(of_adapted) and not all(of_adapted):
                    raise UserError(
                        f"adapter.{key}_pattern {name!r} names some of the layers in which {path}"
                        f" has an adapter; a matrix has one {key}: leave the layers out of it"
                    )
                hits[path] = all(of_adapted)
            if not any(hits[path] for path in chosen):
                raise UserError(
                    f"adapter.{key}_pattern {name!r} names no Linear that adapter.target chose;"
                    f" chosen: {', '.join(chosen)}"
                )
            for path in [path for path in chosen if hits[path]]:
                chosen[path] = dataclasses.replace(chosen[path], **{key: value})
    return chosen


def choose_layers(hits: Sequence[object]) -> tuple[int, ...] | None:
    """Return `LoRASpec.layers` of a flag for each layer."""
    return None if all(hits) else tuple(layer for layer, hit in enumerate(hits) if hit)


def match_any(linears: Linears, key: str, patterns: Sequence[str]) -> dict[str, list[bool]]:
    """{path: whether one of the patterns names that Linear, for each layer}."""
    hits = {path: [False] * len(linear.by_layer()) for path, linear in linears.items()}
    for pattern in patterns:
        matched = {path: _match(path, linears[path], key, pattern) for path in linears}
        if not any(map(any, matched.values())):
            listed = ", ".join(f"{path} ({_leaf(of.modules[0])})" for path, of in linears.items())
            presets = sorted({of.preset for of in linears.values() if of.preset})
            raise UserError(
                f"adapter.{key} {pattern!r} names no Linear; presets:"
                f" {', '.join([*presets, ALL])}; Linears of this model: {listed}"
            )
        hits = {path: list(map(max, hits[path], new)) for path, new in matched.items()}
    return hits


def _match(path: str, linear: AdaptableLinear, key: str, pattern: str) -> list[bool]:
    """Return whether a pattern names that Linear, for each layer."""
    layers = linear.by_layer()
    words = APART.get(linear.preset or "", ())
    if linear.preset == ROUTER:
        words = (*words, _leaf(linear.modules[0]))
    if words and not any(word in pattern for word in words):
        # Only what names them reaches routers, as in PEFT, and the parts for images: neither
        # all-linear nor "mlp.*" does.
        return [False] * len(layers)
    if pattern == linear.preset or (pattern == ALL and linear.preset not in APART):
        return [True] * len(layers)
    if _fits(path, pattern):
        return [True] * len(layers)
    hits = [[_fits(module, pattern) for module in modules] for modules in layers]
    if partial := next((hit for hit in hits if any(hit) and not all(hit)), None):
        raise UserError(
            f"adapter.{key} {pattern!r} names {sum(partial)} of the {len(partial)} experts of"
            f" {path}; the experts of a layer are stored stacked, so all get the adapter or none"
        )
    return [all(hit) for hit in hits]


def _fits(name: str, pattern: str) -> bool:
    """Return whether a pattern names a module: with * for any part; or, with characters of regular
    expressions, one of the module, of its end after a dot, or of one that it belongs to."""
    if EXPRESSION.search(pattern):
        return re.fullmatch(rf"(.*\.)?({pattern})(\..*)?", name) is not None
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _leaf(module: str) -> str:
    return module.rsplit(".", 1)[-1]
