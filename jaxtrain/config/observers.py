"""Tables observers: who hears of all that a run does, and may ask it to save, evaluate or stop."""

from collections.abc import Mapping
from typing import Annotated, Any

from jaxtrain.config.base import Section, known_in

OBSERVERS: Mapping[str, str] = {
    "early_stop": "jaxtrain.runs.observers.early_stop:EarlyStop",
    "loss_spike": "jaxtrain.runs.observers.loss_spike:LossSpike",
    "hub": "jaxtrain.runs.observers.hub:MetricsHub",
    "webhook": "jaxtrain.runs.observers.webhook:Webhook",
}
"""Those that are built in."""


class ObserverConfig(Section):
    """Observer of the run; docs/observers.md lists the built-in ones."""

    kind: Annotated[str, known_in("observers", OBSERVERS)]
    """early_stop: end where an evaluation's number no longer becomes better. loss_spike: say, save
    or stop where a number leaps. hub: push the model, or checkpoints as well, to the Hugging Face
    Hub. webhook: POST to a URL at the start, at the end and on alerts. Or a custom one: an entry
    point's name, "package.module:Class" or "file.py:Class"."""
    options: dict[str, Any] = {}
    """Its own keys: those of its Section, else the keyword arguments of the class."""
