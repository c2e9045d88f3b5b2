"""Configs from strangers: whatever is in them, a sentence and no more than a page of it."""

import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxtrain.config import load_config
from jaxtrain.config.overrides import parse_value
from jaxtrain.config.root import Config
from jaxtrain.config.secrets import HIDDEN, is_secret, redact_command, reveal
from jaxtrain.errors import UserError
from jaxtrain.main import main
from jaxtrain.text_safety import UNSEEN, escape_control_chars, shorten, show

GOOD = '[run]\nmax_steps = 3\n[model]\npath = "some/model"\n[[data.datasets]]\npath = "a.jsonl"\n'
TRIES = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def refuse(path, overrides=()):
    """The message of a config that is refused, in moments."""
    began = time.monotonic()
    with pytest.raises(UserError) as error:
        load_config(path, overrides)
    assert len(str(error.value)) <= 2000 and not UNSEEN.search(str(error.value))
    assert time.monotonic() - began < 20
    return str(error.value)


def write(folder, content, name="c.toml"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("c.toml", GOOD.encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
        ("c.toml", GOOD.encode() + b'#\nx = "\xe9"\n', "byte 0xe9 in line 8"),
        ("c.toml", b"a = 1\n\0", "NUL byte in line 2"),
        ("c.toml", "x = " + "[" * 50_000, "nested deeper than 100"),
        ("c.toml", "a" + ".a" * 100_000 + " = 1", "a key of more than 64 parts in line 1"),
        ("c.toml", "x = " + "1" * 100_000, "4300 digits"),
        ("c.toml", "#" * 300_000, "at most 262,144"),
        ("c.toml", "[run]\nseed = 1\nseed = 2", "Cannot overwrite a value"),
        ("c.toml", "[run]\nseed = 2020-01-01", "run.seed"),
        ("c.json", "[" * 100_000, "nested deeper than 100"),
        ("c.json", '{"run": {"seed": 1,\n "seed": 2}}', "the key 'seed' stands twice"),
        ("c.json", '{"run": {"num_epochs": NaN}}', "NaN is no number"),
        ("c.json", '{"run": {"output_dir": "\\ud800"}}', "half a surrogate pair"),
        ("c.json", "5", "must hold sections, not a number"),
        ("c.yaml", "run: {seed: 1, seed: 2}", "the key 'seed' stands twice"),
        ("c.yaml", "run:\n  seed: 1\n  seed: 2", "(lines 2 and 3)"),
        ("c.yaml", "run: &r [*r]", "holds itself"),
        ("c.yaml", "? " * 50_000, "nested deeper than 100"),
        ("c.yaml", "run: !!python/object/apply:os.system [ls]", "constructor"),
        ("c.yaml", "run: !!bool maybe", "does not fit its tag"),
        ("c.yaml", "run: " + "1:" * 50_000 + "1", "a number of over 100 digits"),
        ("c.yaml", "1: 2\n[a]: b", "unhashable"),
        ("c.yaml", "run:\n  1: 2", "the key 1 is a number, not a text"),
        ("c.yaml", "run: {seed: .inf}", "run.seed: inf is no number"),
        ("c.yaml", "run: {output_dir: 2020-01-01}", "write it in quotes"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "bytes",
)
def test_broken_files(tmp_path, name, content, expected):
    assert expected in refuse(write(tmp_path, content, name))


def test_aliases_that_grow(tmp_path):
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, 12):
        again = ", ".join([f"*a{level - 1}"] * 10)
        lines.append(f"a{level}: &a{level} {{<<: [{again}]}}")
    assert "with its aliases written out" in refuse(write(tmp_path, "\n".join(lines), "c.yaml"))


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    assert load_config(write(tmp_path, b"\xef\xbb\xbf" + GOOD.encode())).run.max_steps == 3


def test_places_that_are_no_files(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe.toml")
    assert "pipe or a device" in refuse(tmp_path / "pipe.toml")
    (tmp_path / "folder.toml").mkdir()
    assert "is a folder" in refuse(tmp_path / "folder.toml")
    assert "File name too long" in refuse(tmp_path / ("x" * 300 + ".toml"))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.max_steps=true", "must be a number, found true"),
        ("optim.learning_rate=true", "must be a number, found true"),
        ("adapter.alpha_pattern.mlp=true", "must be a number, found true"),
        ("data.length_buckets=[true]", "must be a number, found true"),
        ("data.packing=1", "must be true or false, found 1"),
        ("data.packing=0.0", "must be true or false, found 0.0"),
        ("data.packing=maybe", "must be true or false, found 'maybe'"),
        ("run.output_dir=true", "must be a text, in quotes, found true"),
        ("optim.learning_rate=nan", "no number"),
        ("optim.learning_rate='nan'", "finite number"),
        ("optim.max_grad_norm=inf", "no number"),
        ("eval.sets.0.threshold='inf'", "finite number"),
        ("rewards.0.options.x=nan", "no number"),
        ("run.max_steps=1e12", "at most 1,000,000,000"),
        ("data.micro_batch_size=1000000000", "less than or equal to"),
        ("data.packing_window=1000000000000", "less than or equal to"),
        ("data.sequence_len=0", "greater than or equal to 8"),
        ("data.sequence_len=-1", "greater than or equal to 8"),
        ("adapter.rank=100000000", "less than or equal to"),
        ("adapter.rank_pattern.mlp=100000000000", "at most 1,000,000,000"),
        ("parallel.start_timeout=1e300", "less than or equal to"),
        ("sampling.seed=" + "9" * 400, "too large"),
        ("data.sequence_len=8000000 data.micro_batch_size=8", "tokens in one forward pass"),
        ("data.global_batch_size=3 data.micro_batch_size=2", "not a multiple"),
        ("data.length_buckets=[4]", "lengths of rows are 8 to"),
        ("run.overwrite=true run.resume=required", 'resume is "required"; keep one'),
        ("data.datasets.0.tools=tools.json", "tools has no effect without task.kind tree"),
        ("task.kind=[1]", "task.kind: must be a text, found [1]"),
        ("task.kind=json.decoder", "has no class Section"),
        ("run.seed=1\n[model]", "run.seed"),
        ("run.seed=1]\nx=[1", "run.seed"),
        ("run.seed=1 # two", "run.seed"),
        ("run..seed=1", "not of the form"),
        ("=1", "not of the form"),
        ("a" + ".a" * 100_000 + "=1", "parts"),
        ("data.datasets.²=1", "position in a list"),
        ("data.datasets.99999999999999999999=1", "position in a list"),
        ("data.datasets=[5] data.datasets.0.path=x", "holds a number"),
        ("run.max_steps.x=1", "not a section"),
        ("run=" + "x" * 10**6, "no presets"),
        ("x" * 10**6 + "=1", "unknown key"),
        ("run." + "x" * 10**6 + "=1", "unknown key"),
        ("run.output_dir=\x1b[31m\0", "NUL"),
    ],
    ids=lambda text: text[:40],
)
def test_overrides_that_are_refused(tmp_path, override, expected):
    words = override.split(" ") if " data." in override or " run." in override else [override]
    assert expected in refuse(write(tmp_path, GOOD), words)


def test_several_mistakes_at_once(tmp_path):
    kinds = refuse(write(tmp_path, GOOD), ["run.seed=-1", "optim.lr=1", "data.packing=1"])
    assert all(key in kinds for key in ("run.seed", "optim.lr", "data.packing"))
    conflicts = refuse(
        write(tmp_path, GOOD), ["log.profile_start=9", "eval.at_start=true", "optim.min_lr=1"]
    )
    assert len(conflicts.splitlines()) == 4
    many = refuse(write(tmp_path, GOOD), [f"run.x{i}=1" for i in range(50)])
    assert "and 42 more" in many and len(many.splitlines()) == 10


def test_a_preset_keeps_what_it_does_not_name(tmp_path):
    text = GOOD + '[adapter]\nkind = "lora"\nrank = 64\n'
    adapter = load_config(write(tmp_path, text), ["adapter=qlora", "adapter.alpha=8"]).adapter
    assert (adapter.rank, adapter.quantize, adapter.alpha) == (64, "nf4", 8)
    text = GOOD.replace('path = "some/model"', 'path = "some/model"\nremat = "full"')
    model = load_config(write(tmp_path, text), ["model=tiny"]).model
    assert model.path is None and model.remat == "full" and model.architecture


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("[[1], [2]]", [[1], [2]]),
        ("'a # b'", "a # b"),
        ("a # b", "a # b"),
        ("1 # b", "1 # b"),
        ("1, 2", "1, 2"),
        ("1,", "1,"),
        ("{a = 1}", {"a": 1}),
        ("2020-01-01", "2020-01-01"),
        ("null", None),
        ("", ""),
        ("1\n", 1),
        ("1]\nx = [2", "1]\nx = [2"),
        ('"a"\n[model]', '"a"\n[model]'),
    ],
)
def test_the_whole_text_is_the_value(text, value):
    assert parse_value(text) == value


KEYS = sorted(
    f"{section}.{key}"
    for section, field in Config.model_fields.items()
    for key in getattr(field.annotation, "model_fields", {"x": None})
)
VALUES = st.one_of(
    st.sampled_from(["nan", "-inf", "1e999", "9" * 5000, "true", "[]", "{}", "null", "-1", "0"]),
    st.text(max_size=40),
    st.integers().map(str),
    st.floats().map(repr),
    st.lists(st.text(max_size=5)).map(json.dumps),
)


@TRIES
@given(st.lists(st.tuples(st.sampled_from(KEYS) | st.text(max_size=20), VALUES), max_size=4))
def test_any_overrides(tmp_path, words):
    path = tmp_path / "c.toml"
    if not path.exists():
        write(tmp_path, GOOD)
    try:
        load_config(path, [f"{key}={value}" for key, value in words])
    except UserError as error:
        assert len(str(error)) <= 2000 and not UNSEEN.search(str(error))


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@TRIES
@given(st.sampled_from(["toml", "yaml", "json"]), st.binary(max_size=60) | JSON, st.integers(0, 9))
def test_any_file(tmp_path, kind, content, number):
    """Bytes of all kinds, and values of all kinds where a section or a key should be."""
    if not isinstance(content, bytes):
        section = sorted(Config.model_fields)[number]
        key = next(iter(getattr(Config.model_fields[section].annotation, "model_fields", {"x": 0})))
        table = {section: {key: content}} if number % 2 else {section: content}
        content = json.dumps(table).encode()
        kind = "json" if kind == "toml" else kind
    try:
        load_config(write(tmp_path, content, f"c.{kind}"))
    except UserError as error:
        assert len(str(error)) <= 2000 and not UNSEEN.search(str(error))


def test_secrets_are_named_not_kept(tmp_path, monkeypatch):
    text = GOOD.replace("[run]", '[task]\nkind = "rl"\n[sampling]\ntemperature = 1\n[run]') + (
        '[[rewards]]\nfunction = "length"\n[rewards.options]\napi_key = "sk-123"\nlongest = 5\n'
        'headers = {Authorization = "Bearer sk-123", Accept = "all"}\nhf_token = "$HF"\n'
        'url = "https://me:sk-123@host/?key=sk-123"\nanswer_key = "label"\n'
    )
    config = load_config(write(tmp_path, text))
    retained = json.dumps(config.saved())
    assert "sk-123" not in retained and retained.count(HIDDEN) == 4
    assert all(word in retained for word in ("$HF", "label", "all", '"longest": 5'))
    assert "sk-123" in config.model_dump_json()
    monkeypatch.setenv("HF", "hf-1")
    options = config.rewards[0].options
    assert reveal(options, "rewards.0.options") == {**options, "hf_token": "hf-1"}
    monkeypatch.delenv("HF")
    with pytest.raises(UserError, match="rewards.0.options.hf_token .* HF is not set"):
        reveal(options, "rewards.0.options")
    with pytest.raises(UserError, match="which runs do not save; give it again"):
        reveal(config.saved()["rewards"][0]["options"], "rewards.0.options")
    words = ["jaxtrain", "rewards.0.options.api_key=sk-123", "env.options={token='sk-123'}"]
    words += ["observers=[{kind='webhook',options={secret_url='http://a/sk-123',every=2}}]"]
    shown = " ".join(redact_command(words))
    assert "sk-123" not in shown and "webhook" in shown and '"every": 2' in shown
    assert redact_command(["data.datasets=[{path='a'}]"]) == ["data.datasets=[{path='a'}]"]
    # A message about it does not repeat it either.
    assert "sk-123" not in refuse(write(tmp_path, text), ["task.api_key=sk-123"])


def test_which_names_are_secret():
    secret = "api_key apiKey OPENAI_API_KEY token hf_token X-Auth-Token password client_secret auth"
    plain = "max_tokens stop_token answer_key key_column api_key_var tokenizer monkey num_tokens"
    assert all(map(is_secret, secret.split())) and not any(map(is_secret, plain.split()))


@TRIES
@given(st.text(max_size=300) | st.recursive(st.integers() | st.text(), st.lists))
def test_whatever_is_shown_is_harmless(value):
    assert not UNSEEN.search(show(value)) and len(show(value)) < 400
    if isinstance(value, str):
        assert not UNSEEN.search(escape_control_chars(value))
        assert len(shorten(value, 100)) <= 100 and not UNSEEN.search(str(UserError(value)))


@pytest.mark.parametrize(
    "words",
    [
        ["model.path=https://me:canary@host/m"],
        ["data.datasets.0.path=https://host/a?token=canary", "data.datasets.0.weight=-1"],
        ["rewards=[{function='x.y:z', options={api_key='canary', timeout=[}}]"],
        ["env.options={api_key='canary'}", "env.kind=nosuch"],
        ["rollout.vllm.servers=['http://me:canary@host:1/', 3]"],
    ],
)
def test_no_message_repeats_a_secret(tmp_path, words, capsys):
    """A canary in a URL, a query and options: what is wrong is said without it."""
    assert main(["--config", str(write(tmp_path, GOOD)), "--dry-run", *words]) in (1, 2)
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ") and "canary" not in shown.err + shown.out
