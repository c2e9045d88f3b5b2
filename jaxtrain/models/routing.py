"""Which layers of a model have routers, and where their correction biases are."""

import functools
from typing import Any

from jaxtrain.batch import RouteShape
from jaxtrain.layers.routes import find_routers
from jaxtrain.models.build import abstract
from jaxtrain.models.decoder_config import DecoderConfig


@functools.lru_cache(maxsize=8)
def route_shape(config: DecoderConfig) -> RouteShape:
    """Of the models of this config, which must have experts."""
    assert config.experts_per_token is not None, "a dense model routes nothing"
    model = abstract(config)
    kinds = find_routers(model.stack)
    layers = [n for n, spec in enumerate(model.stack.specs) if spec.kind in kinds]
    return RouteShape(tuple(layers), *config.experts_per_token)


def find_biases(model: Any) -> dict[str, list[int]]:
    """{path of routers' correction biases [n, E]: which of the layers with routers they are}."""
    routers = find_routers(model.stack)
    routing = [spec.kind for spec in model.stack.specs if spec.kind in routers]
    return {
        f"stack.{kind}.{path}.choice_bias": [n for n, other in enumerate(routing) if other == kind]
        for kind, (path, router) in routers.items()
        if router.choice_bias is not None
    }
