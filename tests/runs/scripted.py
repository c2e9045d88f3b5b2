"""Fixtures for tests of observers: a config, and a run that exists on paper."""

from jaxtrain.config import Config, validate_config
from jaxtrain.runs.observers.protocol import ObservedRun


def make_config(*observers: dict, **sections) -> Config:
    table = {
        "run": {"max_steps": 10},
        "model": {"path": "x"},
        "data": {"datasets": [{"path": "x"}]},
        "observers": list(observers),
    }
    return validate_config({**table, **sections}, "test")


def make_run(folder, output: list, *, export: bool = True, start: int = 0) -> ObservedRun:
    return ObservedRun(
        folder=folder,
        home=folder / "observers/one",
        config={"run": {"export": export}},
        total_steps=10,
        start_step=start,
        attempt=1,
        log=output.append,
        alert=lambda text: output.append(f"alert: {text}"),
    )
