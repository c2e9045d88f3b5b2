"""Observers are made by the config, told in turn, and never cost the run that they watch."""

import sys
import time

import pytest
from scripted import make_config

from jaxtrain.config import validate_config
from jaxtrain.errors import UserError
from jaxtrain.runs.observers.dispatch import Observers, list_observers

FILE = """
from jaxtrain.config.base import Section
from jaxtrain.errors import UserError

HEARD = []

class Notes:
    def __init__(self, verdict=None, at=1):
        self.verdict, self.at = verdict, at
    def start(self, run):
        HEARD.append(("start", run.total_steps, run.start_step, run.config["run"]["max_steps"]))
        self.run = run
    def step(self, step, values):
        HEARD.append(("step", step, values["loss"]))
        return self.verdict if step == self.at else None
    def checkpoint(self, step, path):
        HEARD.append(("checkpoint", step, path.name))
    def alert(self, text):
        HEARD.append(("alert", text))
    def end(self, state, message):
        HEARD.append(("end", state, message))

class Strict:
    class Section(Section):
        limit: int = 3
    def __init__(self, options):
        HEARD.append(options.limit)

class Broken:
    def step(self, step, values):
        1 / 0
    def end(self, state, message):
        HEARD.append("never")

class Refuses:
    def start(self, run):
        raise UserError("no door")

class Warns:
    def start(self, run):
        self.run = run
    def step(self, step, values):
        self.run.alert("it burns")
    def alert(self, text):
        self.run.alert("I heard " + text)

class Fails:
    def __init__(self):
        {}["key"]
"""


@pytest.fixture
def watch(tmp_path):
    """Observers of the classes of FILE, what they heard and what was said."""
    path = tmp_path / "watch.py"
    path.write_text(FILE)
    output: list[str] = []

    def open(*observers, **sections):
        tables = [
            {
                **observer,
                "kind": f"{path}:{observer['kind']}"
                if observer["kind"][0].isupper()
                else observer["kind"],
            }
            for observer in observers
        ]
        created = Observers(make_config(*tables, **sections), tmp_path, output.append)
        return created, output

    return open


def heard(observers):
    return sys.modules[type(next(iter(observers._all.values()))).__module__].HEARD


def test_they_hear_everything_in_its_order_and_of_the_end_once(watch, tmp_path):
    observers, output = watch({"kind": "Notes", "options": {"verdict": "save", "at": 2}})
    actual = heard(observers)
    with observers:
        observers.start(10, 4)
        observers.notify("step", 5, {"loss": 1.0})
        observers.saved(5, tmp_path / "checkpoints/5")  # from another thread: told by the loop's
        assert actual[-1] == ("step", 5, 1.0) and observers.take() == {}
        observers.notify("publish", 1, {})
        assert actual[-1] == ("checkpoint", 5, "5")
        observers.notify("step", 2, {"loss": 0.5})
        assert list(observers.take()) == ["save"] and observers.take() == {}
        observers.stopped("SIGTERM")
    assert actual == [
        ("start", 10, 4, 10),
        ("step", 5, 1.0),
        ("checkpoint", 5, "5"),
        ("step", 2, 0.5),
        ("end", "stopped", "SIGTERM"),
    ]
    assert not output


@pytest.mark.parametrize(
    ("error", "messages"),
    [
        (None, ("end", "finished", "")),
        (ValueError("no disk"), ("end", "failed", "ValueError: no disk")),
        (KeyboardInterrupt(), ("end", "stopped", "SIGINT")),
    ],
)
def test_how_it_ended_is_told(watch, error, messages):
    observers, _ = watch({"kind": "Notes"})
    actual = heard(observers)
    try:
        with observers:
            observers.start(10, 0)
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt):
        pass
    assert actual[-1] == messages


def test_a_run_that_never_began_ends_for_nobody(watch):
    observers, _ = watch({"kind": "Notes"})
    actual = heard(observers)
    with observers:
        pass
    assert actual == []


def test_one_that_fails_is_switched_off_and_the_others_go_on(watch):
    observers, output = watch({"kind": "Broken"}, {"kind": "Notes"})
    actual = heard(observers)
    with observers:
        observers.start(10, 0)
        for step in (1, 2):
            observers.notify("step", step, {"loss": 1.0})
    assert [entry for entry in actual if entry[0] == "step"] == [("step", 1, 1.0), ("step", 2, 1.0)]
    assert "never" not in actual
    assert len(output) == 1 and "Broken failed and is switched off: step(): ZeroDiv" in output[0]


def test_a_verdict_that_is_none_switches_off_as_well(watch):
    observers, output = watch({"kind": "Notes", "options": {"verdict": "halt"}})
    with observers:
        observers.start(10, 0)
        observers.notify("step", 1, {"loss": 1.0})
    assert "it returned 'halt'; a verdict is None, 'save', 'evaluate' or 'stop'" in output[0]


def test_a_slow_call_is_told_once(watch, monkeypatch):
    observers, output = watch({"kind": "Notes"})
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    observers.start(10, 0)
    for step in (1, 2):
        observers.notify("step", step, {"loss": 1.0})
    assert len(output) == 1 and "took 2.0 s in step()" in output[0]


def test_an_alert_reaches_the_others_and_no_alert_answers_it(watch):
    observers, output = watch({"kind": "Warns"}, {"kind": "Notes"})
    actual = heard(observers)
    observers.start(10, 0)
    observers.notify("step", 1, {"loss": 1.0})
    [alert] = [text for kind, text in (entry for entry in actual if entry[0] == "alert")]
    assert alert.endswith("Warns: it burns")
    assert [line.rpartition(":")[2] for line in output] == [" it burns", " it burns"]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"kind": "Notes", "options": {"att": 1}}, r"observers.0.options\): .*options are verdict"),
        ({"kind": "Strict", "options": {"limit": "x"}}, "observers.0.options.limit: .*found 'x'"),
        ({"kind": "Strict", "options": {"limits": 1}}, "did you mean 'limit'"),
        ({"kind": "Fails"}, r"cannot be made: KeyError: 'key' \(.*watch.py"),
        ({"kind": "early_stop", "options": {"metric": "loss"}}, "must be a number of evaluations"),
        ({"kind": "hub"}, "observers.0.options.repo: is required"),
        ({"kind": "webhook", "options": {"secret_url": "$NO_SUCH"}}, "NO_SUCH is not set"),
        ({"kind": "webhook", "options": {"secret_url": "ftp://x"}}, "begins with http"),
    ],
)
def test_options_are_checked_before_anything_is_trained(watch, table, message):
    with pytest.raises(UserError, match=message):
        watch(table)


def test_one_that_cannot_start_ends_the_run(watch):
    with pytest.raises(UserError, match="no door"):
        watch({"kind": "Refuses"})[0].start(10, 0)


def test_a_typo_is_refused_with_the_config():
    with pytest.raises(UserError, match="observers.0.kind: .*did you mean 'early_stop'"):
        validate_config({"observers": [{"kind": "early_stopp"}]}, "test")


def test_patience_of_section_eval_is_the_same_observer():
    sections = {
        "eval": {"patience": 2, "every": 1, "min_delta": 0.1},
        "checkpoint": {"best_metric": "eval/loss"},
        "data": {"datasets": [{"path": "x"}], "eval_datasets": [{"path": "y"}]},
    }
    [(key, entry)] = list_observers(make_config(**sections))
    assert key == "eval.patience" and entry.kind == "early_stop"
    assert entry.options["patience"] == 2 and entry.options["min_delta"] == 0.1


def test_a_secret_url_is_not_saved():
    config = make_config({"kind": "webhook", "options": {"secret_url": "https://chat/x"}})
    assert "https://chat/x" not in str(config.saved())
