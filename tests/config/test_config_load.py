"""Configs: what is read, what overrides do, and that mistakes are named with their cure."""

import json
import tomllib
from pathlib import Path

import pytest

from jaxtrain.config import load_config
from jaxtrain.config.docs import list_keys, list_sections, render_help, render_pages
from jaxtrain.config.load import read_saved, validate_config
from jaxtrain.config.root import Config
from jaxtrain.core.session import cut_warmup
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


def test_null_sets_a_key_back_to_its_default(tmp_path):
    file = write(tmp_path, GOOD + "[optim]\nlearning_rate = 0.5\n[eval]\nmax_batches = 3\n")
    words = ["optim.learning_rate=null", "checkpoint.every_minutes=null", "run.seed=null"]
    words += ["data.datasets.0.options=null", "task.normalize=null", "eval=null"]
    config = load_config(file, words)
    assert config.optim.learning_rate == 1e-5 and config.run.seed == 0
    assert config.checkpoint.every_minutes is None, "of which null is a value"
    assert config.data.datasets[0].options == {} and config.eval.max_batches is None
    with pytest.raises(UserError, match="run.sed: unknown key"):
        load_config(file, ["run.sed=null"])


def test_a_section_that_is_a_list_is_set_whole(tmp_path):
    words = ["data.eval_datasets=[]", 'observers=[{kind="early_stopping"}]', "rewards=[]"]
    assert load_config(write(tmp_path, GOOD), words[2:]).rewards == []
    with pytest.raises(UserError, match="observers.0"):
        load_config(write(tmp_path, GOOD), words)


def test_max_steps_wins_over_num_epochs(tmp_path):
    config = load_config(write(tmp_path, GOOD), ["run.num_epochs=2", "optim.warmup_steps=9"])
    assert config.run.max_steps == 3 and config.run.epochs is None
    epochs = ["run.num_epochs=2", "run.max_steps=null"]
    assert load_config(write(tmp_path, GOOD), epochs).run.epochs == 2
    lines = []
    assert cut_warmup(config, 3, lines.append).warmup_steps == 3
    assert lines == ["note: optim.warmup_steps 9 is cut to the run's 3 steps"]
    assert cut_warmup(config, 20, lines.append) is config.optim


def test_a_run_with_a_benchmark_is_opened_again(tmp_path):
    sets = 'eval.sets=[{path="rows.jsonl", benchmark="gsm8k"}]'
    words = [sets, 'rewards=[{function="exact_match"}]']
    config = load_config(write(tmp_path, GOOD), words)
    saved = config.saved()
    file = write(tmp_path, json.dumps(saved), "config.json")
    assert validate_config(read_saved(file), "saved").eval == config.eval
    saved["eval"]["sets"][0]["split"] = "test"  # as older versions wrote it
    write(tmp_path, json.dumps(saved), "config.json")
    assert validate_config(read_saved(file), "saved").eval == config.eval
    with pytest.raises(UserError, match="eval.sets.0.split has no effect while"):
        load_config(write(tmp_path, GOOD), [*words, "eval.sets.0.split=train"])


def test_keys_of_replay_without_replay_in_a_saved_config_change_nothing(tmp_path):
    saved = load_config(write(tmp_path, GOOD)).saved()
    saved["rollout"] |= {"replay_logp": "recomputed", "replay_max_lag": 3, "replay_size": 0}
    file = write(tmp_path, json.dumps(saved), "config.json")
    rollout = validate_config(read_saved(file), "saved").rollout
    assert (rollout.replay_logp, rollout.replay_max_lag) == ("sampler", 8)
    saved["rollout"] |= {"replay_size": 4}
    write(tmp_path, json.dumps(saved), "config.json")
    assert read_saved(file)["rollout"]["replay_logp"] == "recomputed"


def test_a_saved_config_names_the_folder_where_it_is(tmp_path):
    saved = load_config(write(tmp_path, GOOD), ["run.overwrite=true"]).saved()
    file = write(tmp_path, json.dumps(saved), "config.json")
    assert load_config(file).run.output_dir == saved["run"]["output_dir"], "no run is here"
    write(tmp_path, '{"attempt": 1}', "attempts.jsonl")
    run = load_config(file, ["run.max_steps=5"]).run
    assert (run.output_dir, run.overwrite, run.max_steps) == (str(tmp_path), False, 5)


def test_paths_are_absolute_and_names_are_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "calc.py"):
        (tmp_path / name).touch()
    for name in ("exact_match", "chatml", "builtin"):
        (tmp_path / name).mkdir()
    words = ["data.datasets.0.path=rows.jsonl", "model.chat_template=chatml"]
    words += ['rewards=[{function="exact_match"},{name="b",function="calc.py:f"}]']
    words += ["eval.sets.0.path=none/there.jsonl"]
    table = load_config(write(tmp_path, GOOD), words).absolute()
    assert table["data"]["datasets"][0]["path"] == str(tmp_path / "rows.jsonl")
    assert [r["function"] for r in table["rewards"]] == ["exact_match", f"{tmp_path}/calc.py:f"]
    assert table["model"]["chat_template"] == "chatml" and table["model"]["tokenizer"] == "builtin"
    assert table["eval"]["sets"][0]["path"] == "none/there.jsonl"
    assert table["env"]["gym"]["directory"] == "."


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
        ("task.beta=1", "unknown key 'beta'; a section of another kind has it"),
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
        ("task={kind = 'preference', loss = 'no'}", "\n  task.loss: input should be 'sigmoid'"),
        ("adapter={kind = 'lora', target = 5}", "\n  adapter.target: input should be a valid str"),
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
    folder = Path(__file__).parents[2] / "docs" / "reference"
    pages = render_pages()
    assert {name: (folder / name).read_text() for name in pages} == pages, "run `make docs`"
    written = {str(path.relative_to(folder)) for path in folder.glob("config/*.md")}
    assert written == set(pages) - {"config.md"}, "a section's page is left over"


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


def test_a_key_with_several_types_is_named_once_without_the_names_of_types(tmp_path):
    word = 'data.datasets.0.column_formats={prompt = "{a.b}"}'
    with pytest.raises(UserError) as error:
        load_config(write(tmp_path, GOOD), [word])
    (line,) = [line for line in str(error.value).splitlines() if "column_formats" in line]
    assert line.strip() == (
        "data.datasets.0.column_formats.prompt: '{a.b}': braces hold the name of a column and"
        " nothing else"
    )


@pytest.mark.parametrize("section", ["run", "task", "data", "model"])
def test_a_section_that_is_no_table_is_named(section):
    with pytest.raises(UserError, match=f"  {section}: must be a table, found 'x'"):
        validate_config({**tomllib.loads(GOOD), section: "x"}, "it")
