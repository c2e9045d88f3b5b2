"""Sliding windows by layer, as config.json spells them."""

from collections.abc import Sequence

from jaxtrain.errors import UserError


def layer_windows(
    num_layers: int, layer_types: Sequence[str] | None, sliding_window: int | None
) -> tuple[int | None, ...]:
    """Window of each layer from Hugging Face's `layer_types` and `sliding_window`.

    Raises UserError for another kind of layer, a wrong number of entries or a missing window.
    """
    if layer_types is None:
        return (None,) * num_layers
    if len(layer_types) != num_layers:
        raise UserError(
            f"config.json: layer_types has {len(layer_types)} entries, num_hidden_layers is "
            f"{num_layers}"
        )
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UserError(
            f"config.json: layer_types holds {unknown[0]!r}; supported: full_attention, "
            "sliding_attention"
        )
    if "sliding_attention" in layer_types and not sliding_window:
        raise UserError("config.json: layer_types has sliding_attention but no sliding_window")
    return tuple(sliding_window if kind == "sliding_attention" else None for kind in layer_types)
