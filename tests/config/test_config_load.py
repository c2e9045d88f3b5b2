"""Configs: what is read, what overrides do, and that mistakes are named with their cure."""

import tomllib
from pathlib import Path

import pytest

from jaxtrain.config import load_config
from jaxtrain.config.docs import list_keys, list_sections, render_help, render_markdown
from jaxtrain.config.root import Config
from jaxtrain.errors import UserError

GOOD = """
model = "tiny"
[run]
max_steps = 3
[[data.datasets]]
path = "builtin:calculator"
"""


def write(tmp_path, text, name="config.toml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_values_overrides_and_presets(tmp_path):
    config = load_config(
        write(tmp_path, GOOD),
        [
            "optim.learning_rate=1e-3",
            "data.datasets.1.path=x.jsonl",
            "data.eval_datasets.0.path=y.jsonl",
            "data.packing=false",
        ],
    )
    assert config.optim.learning_rate == 1e-3
    assert [d.path for d in config.data.datasets] == ["builtin:calculator", "x.jsonl"]
    assert [d.path for d in config.data.eval_datasets] == ["y.jsonl"]
    assert config.data.packing is False
    assert config.model.architecture["model_type"] == "qwen3"


def test_preset_replaces_the_section(tmp_path):
    text = GOOD.replace('model = "tiny"', '[model]\npath = "some/model"') + "\n"
    config = load_config(write(tmp_path, text.replace("[run]", "[run]")), ["model=tiny"])
    assert config.model.path is None and config.model.tokenizer == "builtin"


def test_yaml_means_the_same_as_toml(tmp_path):
    text = (
        "model: tiny\nrun: {max_steps: 3}\noptim: {learning_rate: 1e-5}\n"
        "data: {datasets: [{path: a.jsonl}]}\n"
    )
    # YAML 1.1 reads 1e-5 as a string; the typed model makes it a number.
    assert load_config(write(tmp_path, text, "c.yaml")).optim.learning_rate == 1e-5


def test_saved_json_loads_back_equal(tmp_path):
    config = load_config(write(tmp_path, GOOD))
    path = write(tmp_path, config.model_dump_json(), "config.json")
    assert load_config(path) == config


def test_frozen(tmp_path):
    config = load_config(write(tmp_path, GOOD))
    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 1


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.max_step=3", "did you mean 'max_steps'"),
        ("optim.lerning_rate=1", "did you mean 'learning_rate'"),
        ("data.datasets.0.formt=chat", "did you mean 'format'"),
        ("optim.lr=1", "here it is optim.learning_rate"),
        ("run.sequence_len=8", "here it is data.sequence_len"),
        ("optim.qqq=1", "allowed here: name, options, learning_rate"),
        ("trainer.x=1", "unknown key 'trainer'"),
        (
            "optim.name=adam",
            "optim.name: there is no 'adam'; did you mean 'adamw'?; built in: adamw",
        ),
        ("optim.beta1=2", "optim.beta1: input should be less than 1, found 2"),
        ("run.max_steps=many", "run.max_steps: input should be a valid integer"),
        ("data.datasets=[]", "data.datasets is empty"),
        ("model.path=x", "both are set"),
        ("optim.min_lr=1", "above optim.learning_rate"),
        ("model.compute_dtype=float64", "wider than model.param_dtype"),
        ("eval.every=3", "nothing to evaluate"),
        ("eval.every=now", 'at least 1, or "never"'),
        ("eval.every=0", "at least 1"),
        ("model=huge", "known presets:"),
        ("optim.beta1", "not of the form section.key=value"),
        ("data.datasets.7.path=x", "position in a list of 1"),
    ],
)
def test_mistakes_are_named(tmp_path, override, expected):
    with pytest.raises(UserError) as error:
        load_config(write(tmp_path, GOOD), [override])
    assert expected in str(error.value)
    assert len(str(error.value).splitlines()) <= 9


def test_streaming_without_length_is_refused(tmp_path):
    text = GOOD.replace("max_steps = 3", "num_epochs = 1") + "streaming = true\n"
    with pytest.raises(UserError, match="has no length; set run.max_steps"):
        load_config(write(tmp_path, text))


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(UserError, match="not valid TOML"):
        load_config(write(tmp_path, "a = = 1"))
    with pytest.raises(UserError, match="must end in"):
        load_config(write(tmp_path, "", "c.ini"))


def test_every_key_is_documented():
    for title, section in list_sections():
        assert section.__doc__, title
        for key, _, _, meaning in list_keys(section):
            assert len(meaning) > 10, f"{title}.{key} has no documentation"
    assert "learning_rate" in render_help()


def test_docs_page_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "reference" / "config.md"
    assert page.read_text() == render_markdown(), "run `make docs`"


@pytest.mark.parametrize(
    "path", sorted(Path(__file__).parents[2].glob("configs/**/*.toml")), ids=str
)
def test_shipped_configs_are_valid(path):
    assert isinstance(load_config(path), Config)


def test_presets_parse():
    folder = Path(__file__).parents[2] / "jaxtrain" / "presets"
    actual = list(folder.glob("*/*.toml"))
    assert actual
    for path in actual:
        assert tomllib.loads(path.read_text())
