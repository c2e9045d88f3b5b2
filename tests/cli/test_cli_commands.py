"""The verbs from the command line to their results, and one clear message for each mistake."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxtrain.main import NO_TRITON, main

CONFIG = """
[run]
max_steps = 4

[model]
tokenizer = "builtin"
compute_dtype = "float32"

[model.architecture]
architectures = ["Qwen3ForCausalLM"]
model_type = "qwen3"
vocab_size = 512
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
max_position_embeddings = 512
tie_word_embeddings = true

[parallel]
data = 1
fsdp = -1

[data]
sequence_len = 256
micro_batch_size = 1

[[data.datasets]]
path = "builtin:calculator"
options = { num_rows = 200 }

[[data.eval_datasets]]
path = "builtin:calculator"
split = "test"
options = { num_rows = 20 }

[optim]
learning_rate = 1e-2

[sampling]
max_new_tokens = 8
"""


def run(*words) -> int:
    return main([str(word) for word in words])


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "tiny.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "out"
    assert run("--config", config, f"run.output_dir={folder}") == 0
    return folder


def read_metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_training_leaves_everything_that_the_summary_names(trained):
    for name in (
        "config.json",
        "checkpoints",
        "metrics.jsonl",
        "curves.png",
        "report.html",
        "log.txt",
        "model",
    ):
        assert (trained / name).exists(), name
    steps = [line for line in read_metrics(trained) if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    for key in ("loss", "grad_norm", "learning_rate", "peak_memory_gib", "packing_efficiency"):
        assert all(np.isfinite(line[key]) for line in steps), key
    cosine = [1e-2 * (1 + np.cos(np.pi * i / 4)) / 2 for i in range(4)]
    # float32 on both sides of a subtraction.
    np.testing.assert_allclose([line["learning_rate"] for line in steps], cosine, rtol=1e-5)
    # All have one shape, so the first one compiles: no time of a step, and no rate either.
    for key in ("step_seconds", "tokens_per_second_per_device"):
        assert [key in line for line in steps] == [False, True, True, True], key
    assert steps[-1]["tokens_per_second_per_device"] > 0
    # Four devices, one row each; less what no sample fills.
    assert 0 < steps[0]["tokens"] <= jax.device_count() * 256
    log = (trained / "log.txt").read_text()
    assert "model" in log and "held-out loss" in log


def test_eval_repeats_the_training_runs_last_evaluation(trained, capsys):
    last = next(line for line in reversed(read_metrics(trained)) if "eval/loss" in line)
    assert run("eval", trained) == 0
    assert f"loss {last['eval/loss']:.6g}" in capsys.readouterr().out


def test_a_finished_run_has_nothing_left_to_do(config, trained, capsys):
    before = (trained / "metrics.jsonl").read_text()
    assert run("--config", config, f"run.output_dir={trained}") == 0
    assert "all 4 steps are done" in capsys.readouterr().out
    assert [line for line in read_metrics(trained) if "loss" in line] == [
        line for line in map(json.loads, before.splitlines()) if "loss" in line
    ]


def test_export_loads_in_transformers_with_the_same_logits(trained, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed on this Python")
    transformers = pytest.importorskip("transformers")
    from jaxtrain.batch import Batch
    from jaxtrain.methods.reopen import open_trained

    folder = tmp_path / "exported"
    assert run("export", trained, "--output", folder) == 0
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is 2 + 3?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0].numpy()
    held = open_trained(str(trained), []).snapshot
    n = len(ids)
    batch = Batch(
        tokens=np.array([ids], np.int32),
        positions=np.arange(n, dtype=np.int32)[None],
        prev=np.arange(-1, n - 1, dtype=np.int32)[None],
        until=np.full((1, n), n, np.int32),
        weights={},
    )
    model = held.model()
    with jax.set_mesh(held.roles.bundle.mesh):
        logits = model.logits(model.hidden(jax.tree.map(jax.numpy.asarray, batch)).hidden)
    # fp32 on both sides, sums in another order.
    np.testing.assert_allclose(np.asarray(logits)[0], expected, atol=1e-4)


@pytest.mark.slow
def test_an_exported_model_is_fine_tuned_again(config, trained, tmp_path):
    folder = tmp_path / "again"
    overrides = [f"model.path={trained / 'model'}", "model.architecture=null", "run.max_steps=1"]
    assert run("--config", config, f"run.output_dir={folder}", *overrides) == 0
    (line,) = [line for line in read_metrics(folder) if "loss" in line]
    first = read_metrics(trained)[0]["loss"]
    assert line["loss"] < first - 0.1, "starts from the trained weights, not at random"
    payload = json.loads((folder / "model" / "config.json").read_text())
    reference = json.loads((trained / "model" / "config.json").read_text())
    assert payload == reference


def test_generate_answers_prompts_and_files(trained, tmp_path, capsys):
    assert run("generate", trained, "--prompt", "What is 1 + 1?", "--prompt", "2 + 2?") == 0
    shown = capsys.readouterr().out
    assert ">>> What is 1 + 1?" in shown and ">>> 2 + 2?" in shown
    questions = tmp_path / "in.jsonl"
    rows = [{"prompt": "2 + 2?", "id": 7}, {"messages": [{"role": "user", "content": "2 + 2?"}]}]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = tmp_path / "out.jsonl"
    assert run("generate", trained, "--input", questions, "--output", answers) == 0
    first, second = map(json.loads, answers.read_text().splitlines())
    assert first["id"] == 7 and first["completion"] == second["completion"]


@pytest.mark.slow
def test_generate_converses(trained, monkeypatch, capsys):
    lines = iter(["What is 1 + 1?", "", "2 + 2?"])

    def typed(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    assert run("generate", trained) == 0


def test_generate_plays_an_environment(trained, tmp_path, capsys):
    """Play it with a run whose own config has no use for one."""
    words = ("generate", trained, "--env", "env.kind=calculator", "--prompt", "What is 1 + 1?")
    assert run(*words) == 0
    shown = capsys.readouterr().out
    assert "user: What is 1 + 1?" in shown and "assistant:" in shown and "reward" not in shown
    row = {"messages": [{"role": "user", "content": "What is 1 + 1?"}], "answers": ["2"], "id": 7}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    files = ("--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    assert run(*words, *files) == 0
    bare, judged = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert bare["completion"][0]["role"] == "assistant" and bare["rewards"] == {}
    assert judged["id"] == 7 and set(judged["rewards"]) == {"solved"}
    for mistake, message in (
        ([*words, "--raw"], "env.raw=true"),
        ([*words, "env.raw=true"], "env.raw has no effect while env.kind is calculator"),
        ([*words, "env.color=red"], "env.color: unknown key"),
        (["generate", trained, "env.kind=calculator", "--prompt", "x"], "without --env"),
    ):
        assert run(*mistake) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_an_older_version_opens_and_goes_on(trained, config, tmp_path, capsys):
    """Its saved config holds a key that nobody reads any more; a new config may not."""
    folder = tmp_path / "old"
    shutil.copytree(trained, folder)
    saved = json.loads((folder / "config.json").read_text())
    saved["eval"]["problems"] = 64
    (folder / "config.json").write_text(json.dumps(saved))
    assert run("eval", folder) == 0
    assert run("--config", config, f"run.output_dir={folder}") == 0
    shown = capsys.readouterr().out
    assert "all 4 steps are done" in shown and "eval.problems" not in shown
    assert run("--config", config, f"run.output_dir={folder}", "eval.problems=64") == 2
    assert 'here it is [[eval.sets]] with path = "builtin:calculator"' in capsys.readouterr().err


def test_preprocess_marks_what_trains(config, capsys):
    assert run("preprocess", "--config", config, "--samples", "1") == 0
    shown = capsys.readouterr().out
    assert "⟦The answer is" in shown and "trained tokens" in shown and "filled" in shown


def test_dry_run_allocates_and_writes_nothing(config, tmp_path, capsys):
    folder = tmp_path / "never"
    assert run("--config", config, "--dry-run", f"run.output_dir={folder}") == 0
    shown = capsys.readouterr().out
    assert "weights, GiB per device" in shown and "optimizer state" in shown and "⟦" in shown
    assert "'fsdp'" in shown, "with several devices the places are listed"
    assert "no estimate of a step's time: 'cpu' is not described here" in shown
    assert not folder.exists()


@pytest.mark.slow
def test_dry_run_estimates_steps_on_other_devices(config, capsys):
    words = ("--config", config, "--dry-run", "model.compute_dtype=bfloat16")
    assert run(*words, "--on", "h200:16", "parallel.tensor=2") == 0
    shown = capsys.readouterr().out
    assert "estimate for 16 x H200" in shown and "fsdp=8 tensor=2" in shown
    assert "no rollouts, no other models" in shown
    assert "fastest meshes by this estimate" in shown and "waits for launches" in shown
    assert run(*words, "--on", "abacus:16") == 2
    assert "'abacus' is unknown; choose one of h200" in capsys.readouterr().err
    assert run(*words, "--on", "h200:3", "parallel.fsdp=2") == 2
    assert "need 2 devices, but there are 3" in capsys.readouterr().err


def test_plot_compares_runs(trained, tmp_path):
    assert run("plot", trained, trained, "--output", tmp_path / "both.png") == 0
    assert (tmp_path / "both.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.architecture.vocab_size=100"], "has 512 tokens but the model's vocab_size is 100"),
        (["data.sequence_len=1024"], "longer than the model's max_position_embeddings 512"),
        (["data.datasets.0.path=missing.jsonl"], "missing.jsonl"),
        (["data.datasets.0.path=EMPTY", "data.datasets.0.options={}"], "EMPTY"),
        (["data.datasets.0.path=STRANGE", "data.datasets.0.options={}"], "color"),
        (["data.datasets.0.path=BROKEN", "data.datasets.0.options={}"], "line 2"),
        (["model.tokenizer=nowhere/at/all"], "nowhere/at/all"),
        (["model.architecture.surprise=3"], "surprise"),
        (["model.architecture.hidden_act=tanh"], "hidden_act"),
        (["parallel.fsdp=3"], "devices"),
        (["data.global_batch_size=7"], "not a multiple of"),
        (["data.sequence_len=16"], "too long"),
        (["model.path=nowhere/at/all/x", "model.architecture=null"], "not a folder here"),
        (["task.kind=magic"], "sft"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes_cost_seconds_and_one_message(config, tmp_path, capsys, overrides, expected):
    (tmp_path / "EMPTY.jsonl").write_text("")
    (tmp_path / "STRANGE.jsonl").write_text('{"color": "red"}\n')
    (tmp_path / "BROKEN.jsonl").write_text('{"text": "a"}\n{"text": \n')
    for name in ("EMPTY", "STRANGE", "BROKEN"):
        overrides = [word.replace(name, str(tmp_path / f"{name}.jsonl")) for word in overrides]
    folder = tmp_path / "run"
    assert run("--config", config, f"run.output_dir={folder}", *overrides) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and expected in error, error
    assert len(error.splitlines()) <= 12
    assert not (folder / "metrics.jsonl").exists() and not (folder / "checkpoints").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["fly"], "unknown verb 'fly'"),
        (["eval"], "give either RUN"),
        (["eval", "nowhere"], "nowhere"),
        (["plot", "nowhere"], "nowhere"),
        (["export", "nowhere"], "nowhere"),
        (["generate", "nowhere/at/all", "--prompt", "x"], "nowhere/at/all"),
        (["--config", "nowhere.toml"], "does not exist"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_verbs_name_what_is_missing(capsys, words, expected):
    assert run(*words) == 2
    assert expected in capsys.readouterr().err


def test_a_folder_without_config_json_is_not_exported(tmp_path, capsys):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"")
    assert run("export", tmp_path / "weights", "--output", tmp_path / "out") == 2
    assert "has no config.json" in capsys.readouterr().err and not (tmp_path / "out").exists()


def list_bytes(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


@pytest.mark.slow
def test_export_overwrites_nothing_but_the_runs_own_model(trained, tmp_path, monkeypatch, capsys):
    model = tmp_path / "theirs"
    shutil.copytree(trained / "model", model)
    (model / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "file").write_text("mine")
    before = list_bytes(tmp_path) | list_bytes(trained)
    monkeypatch.chdir(model)
    places = [model, f"{model}/", tmp_path / "link", ".", "../theirs", tmp_path / "file"]
    for output in [*places, trained, f"{trained}/", trained / "checkpoints", tmp_path]:
        assert run("export", trained, "--output", output) == 2, output
        assert "is there already and" in capsys.readouterr().err
    assert run("export", trained, "--output", trained / "log.txt") == 2
    for path, content in before.items():
        assert path.read_bytes() == content, path
    (tmp_path / "empty").mkdir()
    for output in (tmp_path / "empty", trained / "model", trained / "model"):
        assert run("export", trained, "--output", output) == 0
    assert (tmp_path / "empty" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("name", ["run[1] *?\\ $HOME 'it' \"x\" 🙂 ~"])
def test_a_run_in_a_folder_with_any_name(config, tmp_path, name, capsys):
    folder = tmp_path / name
    words = ("--config", config, "run.max_steps=1")
    table = json.dumps(str(folder), ensure_ascii=False)
    assert run(*words, f"run.output_dir={table}") == 0
    assert run(*words[:2], f"run.output_dir={table}", "run.max_steps=2") == 0
    assert "steps 2 to 2" in capsys.readouterr().out
    assert run("export", folder, "--output", folder / "again") == 0
    assert run("generate", folder / "again", "--prompt", "a", "sampling.max_new_tokens=1") == 0
    assert run("plot", folder) == 0


IMPORTS = """
import gc
from jaxtrain.cli.processes import large_imports

with large_imports():
    print(gc.isenabled())
print(gc.isenabled(), gc.get_freeze_count() > 0)
"""


def test_the_collector_waits_for_imports_and_leaves_what_they_bring():
    command = [sys.executable, "-c", IMPORTS]
    assert subprocess.run(command, capture_output=True, text=True).stdout.split() == [
        "False",
        "True",
        "True",
    ]


@pytest.mark.parametrize(
    "flags, package, remaining",
    [
        ("", None, NO_TRITON),
        ("--xla_a=1", None, f"--xla_a=1 {NO_TRITON}"),
        ("--xla_gpu_enable_triton_gemm=true", None, "--xla_gpu_enable_triton_gemm=true"),
        ("--xla_a=1", "libtpu", "--xla_a=1"),
        ("flags.txt", None, "flags.txt"),
    ],
)
def test_matmuls_are_left_to_cublas_where_there_may_be_one(monkeypatch, flags, package, remaining):
    """For every verb: `generate` compiles as many matmuls as training does."""
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: package)
    assert main(["--version"]) == 0
    assert os.environ["XLA_FLAGS"] == remaining
