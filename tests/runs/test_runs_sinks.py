"""Sinks: what is written, and that none of them can stop training once it started."""

import io
import json
import math
import re
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from jaxtrain.config import Config
from jaxtrain.errors import UserError
from jaxtrain.runs import console
from jaxtrain.runs.console import Clock, Console, SafeConsole
from jaxtrain.runs.sinks import JsonLines, Sinks
from jaxtrain.text_safety import UNSEEN


def make_config(**log) -> Config:
    return Config.model_validate(
        {
            "run": {"max_steps": 10},
            "model": {"architecture": {"model_type": "x"}, "tokenizer": "builtin"},
            "data": {"datasets": [{"path": "x"}]},
            "log": {"console": "plain", **log},
        }
    )


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@settings(max_examples=40, deadline=None)
@given(st.text(st.characters(max_codepoint=0x2070), max_size=30))
def test_what_verbs_print_of_strangers_holds_nothing_that_a_terminal_obeys(text):
    stream = io.StringIO()
    safe = SafeConsole(file=stream, width=200)
    table = Table("reason")
    table.add_row(text)
    safe.print(text)
    safe.print(Text(text), table)
    assert not UNSEEN.search(stream.getvalue())


def test_brackets_and_colons_of_strangers_are_no_markup():
    stream = io.StringIO()
    safe, text = SafeConsole(file=stream, width=200), "[/b] [link=x]y[/link] :smile:"
    table = Table(title=text)
    table.add_row(text)
    safe.print(text)
    safe.print(table)
    assert stream.getvalue().count(text) == 3


def test_jsonl_is_complete_after_each_write(tmp_path):
    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.start(10, 0)
    third = 1 / 3
    sink.write(1, {"loss": third, "grad_norm": math.inf, "x": math.nan})
    [line] = read_lines(tmp_path / "metrics.jsonl")
    assert line.pop("time") > 1.6e9
    assert line == {"step": 1, "loss": third, "grad_norm": None, "x": None}
    sink.close(None)
    again = JsonLines(tmp_path / "metrics.jsonl")
    again.start(10, 1)
    again.write(2, {})
    again.close(None)
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]


class Broken:
    name = "broken"

    def __init__(self, when):
        self.when, self.calls = when, []

    def start(self, *args):
        self.note("start")

    def write(self, *args):
        self.note("write")

    def close(self, *args):
        self.note("close")

    def note(self, call):
        self.calls.append(call)
        if call == self.when:
            raise RuntimeError("no network")


@pytest.mark.parametrize(("when", "calls"), [("write", 2), ("close", 5)])
def test_a_failing_sink_is_dropped_with_one_warning(tmp_path, capsys, when, calls):
    broken = Broken(when)
    with Sinks(make_config(), tmp_path, extra=[broken]) as sinks:
        sinks.start(10)
        for step in (1, 2, 3):
            sinks.write(step, {"loss": 1.0})
    assert len(broken.calls) == calls
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 3
    warning = "broken failed and is switched off: RuntimeError: no network ("
    assert capsys.readouterr().out.count(warning) == 1


def test_a_sink_that_cannot_start_stops_the_run(tmp_path):
    with pytest.raises(UserError, match="broken cannot start: RuntimeError: no network"):
        Sinks(make_config(), tmp_path, extra=[Broken("start")]).start(10)
    (tmp_path / "b/metrics.jsonl").mkdir(parents=True)
    with pytest.raises(UserError, match="metrics.jsonl cannot be written: Is a directory"):
        Sinks(make_config(), tmp_path / "b").start(10)


def test_a_closed_pipe_drops_the_console_only(tmp_path, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError("gone")

    monkeypatch.setattr(sys, "stdout", Closed())
    with Sinks(make_config(), tmp_path) as sinks:
        sinks.start(10)
        sinks.write(1, {"loss": 1.0})
        sinks.log("nobody hears this")
        sinks.write(2, {"loss": 1.0})
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 2


def test_the_summary_is_shown_last_and_never_after_an_error(tmp_path, capsys):
    for error in (None, ValueError("disk")):
        try:
            with Sinks(make_config(), tmp_path) as sinks:
                sinks.start(10)
                sinks.summarize("all is saved")
                if error:
                    raise error
        except ValueError:
            pass
        assert ("all is saved" in capsys.readouterr().out) == (error is None)
    logged = (tmp_path / "log.txt").read_text().splitlines()[-2:]
    assert [line[9:] for line in logged] == ["all is saved", "ValueError: disk"]
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in logged)


def test_a_full_disk_costs_the_log_and_not_the_console(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    stream = io.StringIO()
    screen = Console("plain", Path("/dev/full"), stream)
    screen.log("one")
    screen.log("two")
    screen.close(None)
    warning = "warning: /dev/full is no longer written: No space left on device"
    assert stream.getvalue().splitlines() == [warning, "one", "two"]


def test_other_processes_write_nothing(tmp_path):
    with Sinks(make_config(), tmp_path, primary=False) as sinks:
        sinks.start(10)
        sinks.write(1, {"loss": 1.0})
        sinks.log("hello")
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_events_are_read_back(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    with Sinks(make_config(tensorboard=True), tmp_path) as sinks:
        sinks.start(10)
        sinks.write(7, {"loss": 0.5})
    [path] = (tmp_path / "tensorboard").iterdir()
    data, actual, index = path.read_bytes(), [], 0
    while index < len(data):  # TFRecord: length u64, its crc u32, the event, its crc u32
        length = int.from_bytes(data[index : index + 8], "little")
        event = Event.FromString(data[index + 12 : index + 12 + length])
        actual += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
        index += length + 16
    assert actual == [(7, "loss", 0.5)]


@pytest.mark.parametrize(
    ("log", "module", "words"),
    [
        ({"tensorboard": True}, "tensorboardX", r"log.tensorboard .* 'jaxtrain\[tensorboard\]'"),
        ({"wandb_project": "p"}, "wandb", r"log.wandb_project .* 'jaxtrain\[wandb\]'"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, log, module, words):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=words):
        Sinks(make_config(**log), tmp_path)


def fake_wandb(monkeypatch, key=None, fails=False):
    """A module that records calls like the real one's three functions that are used."""
    module = types.ModuleType("wandb")
    module.calls = []
    module.api = types.SimpleNamespace(api_key=key)

    def init(**settings):
        module.calls.append(("init", settings))
        if fails:
            raise RuntimeError("project is full")
        return types.SimpleNamespace(
            id="abc",
            log=lambda values, step: module.calls.append(("log", values, step)),
            finish=lambda: module.calls.append(("finish",)),
        )

    module.init = init
    module.Table = lambda columns, rows: [dict(zip(columns, row, strict=True)) for row in rows]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    return module


def test_wandb_logs_and_a_resumed_run_keeps_its_id(tmp_path, monkeypatch):
    module = fake_wandb(monkeypatch)
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = make_config(wandb_project="p", wandb_name="n")
    with Sinks(config, tmp_path) as sinks:
        sinks.start(10, 0)
        sinks.write(1, {"loss": 1.0})
    assert module.calls[0][1]["id"] is None
    assert module.calls[0][1]["config"]["run"]["max_steps"] == 10
    assert module.calls[1:] == [("log", {"loss": 1.0}, 1), ("finish",)]
    with Sinks(config, tmp_path) as sinks:
        sinks.start(10, 1)
    assert module.calls[3][1]["id"] == "abc" and module.calls[3][1]["resume"] == "allow"


def test_wandb_gets_tables_of_answers_of_bounded_size(tmp_path, monkeypatch):
    module = fake_wandb(monkeypatch)
    monkeypatch.setenv("WANDB_MODE", "offline")
    output = [{"role": "assistant", "content": "x" * 10_000}, {"role": "tool", "content": "y"}]
    line = {"reward": 1.0, "rewards": {"a": 1.0}, "prompt": "p", "completion": output, "tokens": 3}
    with Sinks(make_config(wandb_project="p"), tmp_path) as sinks:
        sinks.start(10, 0)
        sinks.sampled(2, [line] * 500)
        sinks.write(1, {"loss": 1.0})  # numbers come a step late
        sinks.write(2, {"loss": 0.5})
        for step in (3, 4):  # within the minute
            sinks.sampled(step, [{**line, "completion": f"{step}"}])
            sinks.sampled(step, [{**line, "set": "sums"}])
            sinks.write(step, {"loss": 0.1})
    logs = [(step, values) for kind, *rest in module.calls[1:-1] for values, step in [rest]]
    tables = [
        (step, {k: v for k, v in values.items() if k.startswith("samples")})
        for step, values in logs
    ]
    assert [(step, list(actual)) for step, actual in tables] == [
        (1, []),
        (2, ["samples"]),
        (3, []),
        (4, []),
        (4, ["samples", "samples/sums"]),
    ]
    rows = tables[1][1]["samples"]
    assert len(rows) == 64 and len(rows[0]["completion"]) < 4100
    assert rows[0]["completion"].startswith("assistant: xxx")
    assert rows[0]["completion"].endswith("tool: y") and rows[0]["rewards"] == '{"a": 1.0}'
    assert [row["completion"] for row in tables[-1][1]["samples"]] == ["4"]
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 504


def test_wandb_without_a_key_or_with_a_refusal_stops_at_start(tmp_path, monkeypatch):
    fake_wandb(monkeypatch)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(UserError, match="wandb login"):
        Sinks(make_config(wandb_project="p"), tmp_path)
    fake_wandb(monkeypatch, key="k", fails=True)
    with pytest.raises(UserError, match="project is full"):
        Sinks(make_config(wandb_project="p"), tmp_path).start(10)


VALUES = {
    "loss": 2.34567,
    "grad_norm": 1.2,
    "learning_rate": 1e-4,
    "tokens": 4096.0,
    "data_seconds": 0.0123,
    "tokens_per_second_per_device": 12345.0,
    "mfu": 0.3121,
    "peak_memory_gib": 3.25,
    "reward": 0.5,
}


def test_a_line_has_what_people_expect():
    line = console.format_step(7, 200, VALUES, elapsed=3661, remaining=59.6)
    assert line == (
        "step   7/200  1:01:01  loss 2.3457  grad 1.2  lr 1.00e-04  12.3k tok/s/dev  MFU 31.2%"
        "  mem 3.2 GiB  reward 0.5000  ETA 0:01:00"
    )
    assert console.format_eval(7, {"eval/loss": 2.0, "eval/problems": 1234.0}) == (
        "eval at step 7  loss 2  problems 1,234"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.123456, "0.1235"), (1e-7, "1e-07"), (12345.678, "1.235e+04"), (3.0, "3")]
    + [(math.nan, "nan"), (math.inf, "inf"), (-0.5, "-0.5000")],
)
def test_numbers_are_for_people(value, text):
    assert console.format_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "0.5"), (950, "950"), (12_345, "12.3k"), (4.56e6, "4.56M")]
)
def test_counts_are_short(value, text):
    assert console.format_count(value) == text


def test_eta_follows_the_pace_and_not_the_compilation():
    clock = Clock()
    clock.start(100, 0)
    clock.read(1, timestamp=500.0)  # the first reading comes after the compilation
    assert clock.remaining() is None
    clock.read(11, timestamp=520.0)
    assert clock.remaining() == pytest.approx(89 * 2.0)


@pytest.mark.parametrize(
    ("environment", "bar"),
    [
        ({"TERM": "xterm-256color", "PAGER": "less"}, True),
        ({"TERM": "xterm-color", "PAGER": "cat", "GIT_PAGER": "cat"}, False),
        ({"TERM": "xterm-256color", "JPY_PARENT_PID": "7"}, False),
    ],
)
def test_a_cell_of_a_notebook_gets_lines_although_it_looks_like_a_terminal(
    monkeypatch, environment, bar
):
    monkeypatch.setattr(console.os, "environ", environment)
    stream = io.StringIO()
    stream.isatty = lambda: True
    screen = Console("auto", None, stream)
    screen.start(2, 0)
    screen.write(1, VALUES)
    screen.close(None)
    assert ("\x1b[" in stream.getvalue()) == bar


@pytest.mark.parametrize("mode", ["auto", "plain", "off", "rich"])
def test_console_modes_and_the_log(tmp_path, mode):
    stream = io.StringIO()
    screen = Console(mode, tmp_path / "log.txt", stream)
    screen.log("hello [bold]brackets[/bold]")
    screen.start(2, 0)
    screen.write(1, VALUES)
    screen.write(1, {"eval/loss": 1.5})
    screen.close("the end")
    logged = [line[9:] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert logged[0] == "hello [bold]brackets[/bold]" and logged[-1] == "the end"
    assert len(logged) == 4 and logged[2] == "eval at step 1  loss 1.5000"
    shown = stream.getvalue()
    if mode == "off":
        assert shown == ""
    elif mode == "rich":
        assert "hello [bold]brackets[/bold]" in shown and "\x1b[" in shown and "50%" in shown
    else:
        assert shown.splitlines() == logged
