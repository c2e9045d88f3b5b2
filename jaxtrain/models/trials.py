"""Which models can take tokens back that were only tried, as speculative decoding does."""

from jaxtrain.errors import UserError
from jaxtrain.models.decoder import Decoder


def require_trials(model: Decoder, key: str) -> None:
    """UserError where a layer of the model cannot; key: what asked for it."""
    for spec, mixer in model.stack.mixers():
        if mixer.trials == "none":
            raise UserError(
                f"{key}: speculative decoding takes rejected tokens back, which the model's layers"
                f" of kind {spec.kind!r} ({type(mixer).__name__}) cannot; decode without a draft"
            )
