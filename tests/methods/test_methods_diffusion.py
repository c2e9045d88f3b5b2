"""Masked diffusion through the step and whole runs: meshes, going on, folders, what is refused."""

import json
import shutil

import jax
import numpy as np
import pytest
import step_harness as harness
from step_harness import make_table, read_metrics, run_config, write_run

from jaxtrain.data.packing.pack import Fields, build_batch, lay_out
from jaxtrain.data.packing.tree import chain
from jaxtrain.errors import UserError
from jaxtrain.main import main

TABLE = make_table({"kind": "diffusion"}, num_layers=1, sequence_len=40)


def make(**changes):
    return harness.merge(TABLE, changes)


def make_batch():
    """[1, 4, 40]: packed documents."""
    rng = np.random.default_rng(0)

    def document(length):
        weights = (rng.random(length) < 0.8).astype(np.float64)
        return lay_out(chain(rng.integers(1, 200, length).astype(np.int32), {"nll": weights}))

    lengths = [(21, 15), (30,), (9, 9, 9), (40,)]
    batch = build_batch([[document(n) for n in row] for row in lengths], 40, Fields(since=True))
    return jax.tree.map(lambda x: x[None], batch)


@pytest.mark.thorough
def test_microsteps_and_meshes_are_one_batch_on_one_device():
    """float32, the order of sums: 1e-5 of the largest gradient. (That the masks are the same for
    any microsteps: test_data_masks.)"""
    task = make()
    expected = harness.update(task, make_batch())
    for changes in ({"microsteps": 2}, {"fsdp": 2, "context": 2}):
        harness.check_same(harness.update(task, make_batch(), **changes), expected, 1e-5)


def test_the_embedding_grows_for_a_new_mask_and_exports_say_so():
    task = make()
    parts = task.roles["policy"].bundle
    assert parts.architecture.vocab_size == 513 and parts.architecture.grown == 1
    raw = parts.architecture.to_hf()
    assert raw["mask_token_id"] == 512 and raw["vocab_size"] == 513
    assert raw["jaxtrain_task"] == {"kind": "diffusion", "shift": True, "mask_token_id": 512}
    assert "grows from 512 to 513" in task.data.note
    larger = make(model={"architecture": TABLE["model"]["architecture"] | {"vocab_size": 520}})
    assert larger.roles["policy"].bundle.architecture.vocab_size == 520
    with pytest.raises(UserError, match="adapter"):
        make(adapter={"kind": "lora"})


def test_what_cannot_work_is_refused():
    for changes, output in (
        (
            {"task": {"kind": "diffusion", "min_mask_ratio": 0.5, "max_mask_ratio": 0.4}},
            "not above",
        ),
        ({"task": {"kind": "diffusion", "mask_token_id": 1, "mask_token": "a"}}, "keep one"),
        ({"task": {"kind": "diffusion", "padding": 40}}, "not below"),
        ({"sampling": {"top_p": 0.9}}, "sampling.top_p"),
    ):
        with pytest.raises(UserError, match=output):
            make(**changes)


CONFIG = run_config(
    """
[task]
kind = "diffusion"
block_length = 4
padding = 3
[sampling]
max_new_tokens = 8
""",
    num_layers=1,
    data="cache = false",
).replace("learning_rate = 1e-2", 'learning_rate = 1e-2\nlr_scheduler = "constant"')


def read_lines(folder):
    return read_metrics(folder, "loss", "accuracy", "bound", "mask", "eval/", "grad")


@pytest.mark.slow
def test_a_run_goes_on_exactly_and_its_folder_says_what_it_is(tmp_path, capsys):
    words = write_run(tmp_path, CONFIG, " {0}")
    assert main(words) == 0
    lines = read_lines(tmp_path / "run")
    assert {name for _, name in lines} >= {"loss", "accuracy", "bound", "mask_ratio", "eval/loss"}
    shutil.rmtree(tmp_path / "run")
    assert main([*words, "run.max_steps=2"]) == 0 and main(words) == 0
    again = read_lines(tmp_path / "run")
    for key in [key for key in lines if key[0] > 2]:
        assert again[key] == lines[key], key

    folder = tmp_path / "run" / "model"
    assert json.loads((folder / "config.json").read_text())["mask_token_id"] == 512
    capsys.readouterr()
    actual = []
    for name in (tmp_path / "run", folder):
        output = tmp_path / "answers.jsonl"
        provided = ["--prompt", "[3, 4, 5]", "--ids", "--output", str(output), "--overwrite"]
        assert main(["generate", str(name), "sampling.max_new_tokens=8", *provided]) == 0
        actual.append(json.loads(output.read_text())["completion_ids"])
    assert actual[0] == actual[1] and 0 < len(actual[0]) <= 8

    causal = tmp_path / "causal.toml"
    rest = CONFIG.split("[run]")[1].split("[task]")[0].replace("ROWS", str(tmp_path / "rows.jsonl"))
    causal.write_text(f'[model]\npath = "{folder}"\n[run]\noutput_dir = "x"\n{rest}')
    refused = {"predicts no next token; set task.kind to it": ["--config", str(causal)]}
    refused["texts have no log-probs"] = [
        "score",
        str(folder),
        str(tmp_path / "rows.jsonl"),
        "--top-k",
        "2",
    ]
    refused["texts have no log-probs"] += ["--output", str(tmp_path / "scores.jsonl")]
    for printed, bad in refused.items():
        assert main(bad) == 2
        assert printed in capsys.readouterr().err
