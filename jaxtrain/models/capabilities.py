"""Properties of a model that follow from its layers: trees, both directions, trials, routers."""

import functools
from typing import Any

from jaxtrain.batch import RouteShape
from jaxtrain.errors import UserError
from jaxtrain.layers.routes import find_routers
from jaxtrain.models.build import abstract
from jaxtrain.models.decoder import Decoder
from jaxtrain.models.decoder_config import DecoderConfig


def follows_trees(config: DecoderConfig) -> bool:
    """Return whether all layers of the model follow trees (see layers.mixer.Mixer)."""
    return abstract(config).follows_trees


def require_trees(config: DecoderConfig, reason: str, fix: str, key: str = "model.path") -> None:
    """Raise UserError unless all layers of the model follow trees (see layers.mixer.Mixer).

    For callers that pack branches with a shared prefix, or several documents, into a row: a layer
    that runs along the row would carry state from one into the next. reason: what needs it
    ('task.mode "tree" packs branches that share a prefix'); fix: what to do instead; key: the
    config key that names the model.
    """
    if not follows_trees(config):
        raise UserError(
            f"{reason}, but {key} is {config.architecture}, which has layers that pass something"
            f" from one branch or document of a row to the next; {fix}, or choose another {key}"
        )


def require_both_sides(config: DecoderConfig, reason: str, key: str = "model.path") -> None:
    """Raise UserError unless all layers of the model can see later tokens as well as earlier ones.

    reason: what needs it ('task.kind "diffusion" fills in what is masked from both sides').
    """
    model = abstract(config)
    if model.both_sides:
        return
    windows = {spec.window for spec, _ in model.stack.mixers() if spec.window is not None}
    layers = "layers that run along the text and see no later token"
    if windows:
        layers = f"layers that look only {min(windows)} tokens back"
    raise UserError(
        f"{reason}, but {key} is {config.architecture}, which has {layers}; choose a model whose"
        " layers are all full attention"
    )


def require_trials(model: Decoder, key: str) -> None:
    """Raise UserError unless all layers can take back rejected tokens, as speculative decoding
    does; key: the config key that asks for it."""
    for spec, mixer in model.stack.mixers():
        if mixer.trials == "none":
            raise UserError(
                f"{key}: speculative decoding takes rejected tokens back, which the model's layers"
                f" of kind {spec.kind!r} ({type(mixer).__name__}) cannot; decode without a draft"
            )


@functools.lru_cache(maxsize=8)
def route_shape(config: DecoderConfig) -> RouteShape:
    """Return the shape of the routes of models with this config, which must have experts."""
    assert config.experts_per_token is not None, "a dense model routes nothing"
    model = abstract(config)
    kinds = find_routers(model.stack)
    layers = [n for n, spec in enumerate(model.stack.specs) if spec.kind in kinds]
    return RouteShape(tuple(layers), *config.experts_per_token)


def find_biases(model: Any) -> dict[str, list[int]]:
    """Return {path of routers' correction biases [n, E]: their indices among routing layers}."""
    routers = find_routers(model.stack)
    routing = [spec.kind for spec in model.stack.specs if spec.kind in routers]
    return {
        f"stack.{kind}.{path}.choice_bias": [n for n, k in enumerate(routing) if k == kind]
        for kind, (path, router) in routers.items()
        if router.choice_bias is not None
    }
