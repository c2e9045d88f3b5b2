"""Names that lead nowhere, or to two things, are refused in a line that helps."""

import sys

import pytest
from conftest import install

from jaxtrain import plugins
from jaxtrain.config import validate_config
from jaxtrain.errors import UserError
from jaxtrain.main import main

BUILTIN = {"chat": "json:loads", "number": 3}


def find(name, group="formats"):
    return plugins.find(group, name, BUILTIN, key="data.format")


def test_built_ins_are_imported_when_asked_for():
    import json

    assert find("chat") is json.loads and find("number") == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chta", "data.format: there is no 'chta'; did you mean 'chat'.*dialogue .of my-package"),
        ("dialog", "did you mean 'dialogue'"),
        ("formats.py", "there is no 'formats.py'.*file.py:name"),
        ("nothing_here.py:x", "the file nothing_here.py does not exist"),
        ("no_such.module:x", "cannot be imported: there is no module no_such;.*PYTHONPATH"),
        ("my_package.no:x", "there is no module my_package.no"),
        ("my_package.formats:dialog", "has no 'dialog'; did you mean 'dialogue'"),
        ("my_package.formats", "is a module; it must be a class or function"),
    ],
)
def test_what_is_not_there_is_named(my_package, name, message):
    __import__("my_package.formats")  # an attribute of the package from now on
    with pytest.raises(UserError, match=message):
        find(name)


def test_where_modules_will_do_a_path_may_be_one(my_package):
    for name in ("my_package.formats", f"{my_package}/my_package/formats.py"):
        actual = plugins.find("tasks", name, {}, key="task.kind", modules=True)
        assert actual.dialogue({"script": "A: 1\nB: 2"}, None, None)["messages"]
    with pytest.raises(UserError, match="task.kind: there is no 'toy'"):
        plugins.find("tasks", "toy", {}, key="task.kind", modules=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\nx = unknown\n", r"NameError: .*broken.py:2\)"),
        (
            "x = 1\n\nimport no_such_module\n",
            r"ModuleNotFoundError: .*no_such_module.*broken.py:3\)",
        ),
        ("def f(:\n", r"SyntaxError: .*broken.py:1\)"),
        (
            "import sys\nsys.exit(0)\n",
            r"SystemExit: it ends the program, by sys.exit\(0\) \(.*broken.py:2\)",
        ),
        ("raise BaseException('gone')\n", r"BaseException: gone \(.*broken.py:1\)"),
        ("raise SystemExit\n", r"SystemExit: .* by sys.exit\(None\) \(.*broken.py:1\)"),
    ],
)
def test_a_failing_import_is_named_with_file_and_line(tmp_path, monkeypatch, text, message):
    (tmp_path / "broken.py").write_text(text)
    install(tmp_path, "broken", {"jaxtrain.formats": {"bad": "broken:f"}})
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("bad", "broken:f", f"{tmp_path}/broken.py:f"):
        with pytest.raises(UserError, match=f"data.format '.*' cannot be imported: {message}"):
            find(name)
    assert not [name for name in sys.modules if name.startswith(("broken", "jaxtrain_plugin_b"))]


def test_an_import_that_stands_still_is_named_again_and_may_take_its_time(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("jaxtrain.plugins.SLOW_SECONDS", 0.05)
    (tmp_path / "slow.py").write_text(
        "import threading\n\nthreading.Event().wait(1)\nSink = dict\n"
    )
    name = f"{tmp_path}/slow.py:Sink"
    assert plugins.find("sinks", name, {}, key="log.sinks") is dict
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert all(f"log.sinks {name!r}: still being imported" in line for line in (first, second))


def test_code_that_ends_the_program_is_named_by_every_verb(monkeypatch, capsys):
    monkeypatch.setattr("jaxtrain.cli.train.run_train", lambda argv: sys.exit(0))
    assert main(["--config", "c.toml"]) == 1
    assert "stopped: SystemExit: it ends the program, by sys.exit(0) (" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main(["score", "-h"])
    assert end.value.code == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('log.sinks=["nothing_here.py:x"]', "log.sinks 'nothing_here.py:x': the file"),
        ('observers=[{kind="no_such.module:x"}]', "observers.0.kind 'no_such.module:x' cannot"),
    ],
)
def test_a_dry_run_looks_up_sinks_and_observers(tmp_path, capsys, override, message):
    text = (
        '[run]\nmax_steps = 3\n[model]\npath = "some/model"\n[[data.datasets]]\npath = "a.jsonl"\n'
    )
    (tmp_path / "c.toml").write_text(text)
    assert main(["--config", str(tmp_path / "c.toml"), "--dry-run", override]) == 2
    assert message in capsys.readouterr().err


def test_a_package_can_neither_shadow_a_built_in_nor_another_package(tmp_path, monkeypatch):
    for name in ("one", "two"):
        install(tmp_path, name, {"jaxtrain.formats": {"chat": "json:loads", "same": "json:dumps"}})
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="'chat' is built in, but one and two brings another"):
        find("chat")
    with pytest.raises(UserError, match="'same' is brought by one and two.*uninstall all but one"):
        find("same")
    assert find("json:dumps") is not None


def test_a_file_is_imported_once_and_the_working_directory_is_searched(tmp_path, monkeypatch):
    (tmp_path / "own_format.py").write_text("class Own:\n    pass\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert find("own_format.py:Own") is find(f"{tmp_path}/own_format.py:Own")
    assert find("own_format:Own").__module__ == "own_format"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"data": {"datasets": [{"path": "x", "format": "chta"}]}},
            "data.datasets.0.format: .*'chat'",
        ),
        ({"env": {"kind": "calculater"}}, "env.kind: .*did you mean 'calculator'"),
        ({"log": {"sinks": ["loss_tabel"]}}, "log.sinks.0: .*did you mean 'loss_table'"),
    ],
)
def test_a_typo_is_refused_with_the_config(my_package, table, message):
    with pytest.raises(UserError, match=message):
        validate_config(table, "test")
