"""Layers that differ in their sliding window, as config.json spells them."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import describe
from jaxtrain.layers.mixer import LayerSpec

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def windowed_layers(
    num_layers: int,
    layer_types: Sequence[str] | None,
    sliding_window: int | None,
    encodings: Collection[str] = (),
    sliding: str = SLIDING,
) -> tuple[LayerSpec, ...]:
    """The layers that Hugging Face's `layer_types` and `sliding_window` describe; encodings: types
    whose layers have a position encoding of that name; sliding: the type of layers with a window.

    Raises UserError for another kind of layer, a wrong number of entries or a missing window.
    """
    if layer_types is None:
        return (LayerSpec(),) * num_layers
    if len(layer_types) != num_layers:
        raise UserError(
            f"config.json: layer_types has {len(layer_types)} entries, num_hidden_layers is "
            f"{num_layers}"
        )
    windowed = LayerSpec(window=sliding_window, chunked=sliding == CHUNKED)
    kinds = {FULL: LayerSpec(), sliding: windowed}
    unknown = sorted(set(layer_types) - set(kinds))
    if unknown:
        raise UserError(
            f"config.json: layer_types holds {unknown[0]!r}; supported: {', '.join(kinds)}"
        )
    if sliding in layer_types and not sliding_window:
        key = "attention_chunk_size" if sliding == CHUNKED else "sliding_window"
        raise UserError(f"config.json: layer_types has {sliding} but no {key}")
    kinds |= {name: dataclasses.replace(kinds[name], rope=name) for name in encodings}
    return tuple(kinds[name] for name in layer_types)


def unrotated(specs: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return the layers without rotation in those that have no window."""
    return tuple(
        dataclasses.replace(spec, rope="none") if spec.window is None else spec for spec in specs
    )


def name_layers(
    raw: dict[str, Any], keys: Sequence[str], every: int, names: tuple[str, str]
) -> None:
    """Put layer_types into a config.json without it: the second of `names` for each so many-th
    layer, as the first of `keys` that is there says, else `every`; the first for all others."""
    if raw.get("layer_types") is not None:
        return
    for key in keys:
        value = raw.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise UserError(f"config.json: {key} is {describe(value)}; it must be a number above 0")
    every = next((raw[key] for key in keys if raw.get(key)), every)
    count = raw.get("num_hidden_layers")
    if type(count) is int:
        raw["layer_types"] = [names[(n + 1) % every == 0] for n in range(min(count, 2**12))]
