"""jaxtrain.api and the verbs around it, on a tiny model folder; transformers is the reference.

Tolerance 2e-5: float32 logits of order 1 whose sums run in another order.
"""

import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_run import save_model

from jaxtrain import api
from jaxtrain.data.packing.pack import build_batch, lay_out
from jaxtrain.data.packing.tree import build_tree
from jaxtrain.errors import UserError
from jaxtrain.huggingface.safetensors import SafetensorsFolder
from jaxtrain.main import main

TEXTS = ["Water boils at 100 degrees.", [3, 1, 4, 1, 5], "", np.array([7]), list(range(200)), "ß ü"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_model(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return api.Model(folder)


def run(*words) -> int:
    return main([str(word) for word in words])


@pytest.mark.slow  # transformers' models take long to import; tests/models has them by family
def test_logits_and_logprobs_are_transformers(folder, model):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    actual, scored = model.logits(TEXTS), model.logprobs(TEXTS)
    assert len(actual) == len(scored) == len(TEXTS)
    for ids, logits, logp in zip(model.encode(TEXTS), actual, scored, strict=True):
        assert logits.shape == (len(ids), 512) and logp.shape == (len(ids),)
        assert logits.dtype == logp.dtype == np.float32
        if not len(ids):
            continue
        with torch.no_grad():
            want = reference(torch.tensor(ids[None].astype(np.int64))).logits[0].numpy()
        np.testing.assert_allclose(logits, want, rtol=2e-5, atol=2e-5)
        of_all = np.asarray(jax.nn.log_softmax(want, axis=-1))
        assert logp[0] == 0.0
        np.testing.assert_allclose(
            logp[1:], of_all[np.arange(len(ids) - 1), ids[1:]], rtol=2e-5, atol=2e-5
        )


@pytest.mark.slow
def test_texts_that_share_rows_are_what_they_are_alone(model):
    many = [list(range(i, i + 1 + i % 40)) for i in range(60)]
    together = model.logprobs(many, temperature=0.7)
    for index in (0, 17, 59):
        alone = api.logprobs(model, [many[index]], temperature=0.7)[0]
        np.testing.assert_allclose(together[index], alone, rtol=1e-5, atol=1e-5)
    assert api.logits(model, []) == []


@pytest.mark.parametrize(
    "texts, message",
    [
        ("a text", "give a list of texts"),
        (3, "give a list of texts"),
        ([[1, 512]], "text 0 holds the id 512"),
        ([[1], [-1]], "text 1 holds the id -1"),
        ([[True, False]], "must be a list of token ids"),
        ([[1.5]], "must be a list of token ids"),
        ([[[1], [2, 3]]], "must be a list of token ids"),
        ([None], "must be a list of token ids"),
        ([{"a": 1}], "must be a list of token ids"),
        ([[1] * 257], "text 0 has 257 tokens, more than max_position_embeddings 256"),
    ],
)
def test_what_is_no_text_is_named(model, texts, message):
    with pytest.raises(UserError, match=message):
        model.logprobs(texts)


junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner)),
    max_leaves=6,
)


@settings(max_examples=80, deadline=None)
@given(junk)
def test_anything_is_ids_or_named(model, content):
    try:
        for ids in model.encode(content):
            assert ids.dtype == np.int32 and ids.ndim == 1
            assert not len(ids) or (0 <= ids.min() and ids.max() < model.vocab_size)
    except UserError as error:
        assert len(str(error)) < 2000


PROMPTS = [[5, 6, 7], [9, 8]]


@pytest.fixture(scope="module")
def answers(model):
    return model.generate(PROMPTS, temperature=0.0, max_new_tokens=4)


def test_generate_answers_with_the_most_probable_tokens(model, answers):
    """The sampler decodes token by token, logits and logprobs score all at once."""
    texts = [[*ids, *answer.tokens] for ids, answer in zip(PROMPTS, answers, strict=True)]
    for ids, answer, table, scored in zip(
        PROMPTS, answers, model.logits(texts), model.logprobs(texts), strict=True
    ):
        assert answer.tokens == table.argmax(-1)[len(ids) - 1 : -1].tolist()
        np.testing.assert_allclose(answer.logprobs, scored[len(ids) :], rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="max_new_tokenz"):
        model.generate(PROMPTS, max_new_tokenz=4)


def make_tree():
    parts = [(-1, [1, 2], [0, 1], "system"), (0, [3], [1], "think")]
    parts += [(0, [4, 5], [1, 1], "answer"), (2, [6], [1], "a"), (2, [7], [0], "b")]
    return build_tree(parts)


def test_branches_of_a_tree_and_of_its_row_are_the_same():
    tree, second = make_tree(), build_tree([(-1, [8, 9], [0, 1], "")])
    branches = api.list_branches(tree)
    # A tree carries the sum over a token's branches: each branch gets its own part back.
    expected = [[0, 1, 1], [0, 1, 1, 1, 1], [0, 1, 1, 1, 0]]
    for branch, weights in zip(branches, expected, strict=True):
        np.testing.assert_allclose(branch.weights["nll"], weights)
    assert [b.tokens.tolist() for b in branches] == [[1, 2, 3], [1, 2, 4, 5, 6], [1, 2, 4, 5, 7]]
    rows = [[lay_out(tree, "branch"), lay_out(second, "branch")], [lay_out(second, "branch")]]
    batch = build_batch(rows, 12)
    flat = api.list_branches(batch)
    want = [[1, 2, 3], [1, 2, 4, 5, 6], [1, 2, 4, 5, 7], [8, 9], [8, 9]]
    assert [branch.tokens.tolist() for branch in flat] == want
    assert [branch.row for branch in flat] == [(0,)] * 4 + [(1,)]
    for branch, alone in zip(flat, branches, strict=False):
        np.testing.assert_allclose(branch.weights["nll"], alone.weights["nll"])
    total = sum(branch.weights["nll"].sum() for branch in flat)
    np.testing.assert_allclose(total, batch.weights["nll"].sum())
    without = api.list_branches(batch._replace(owner=None))
    assert [branch.tokens.tolist() for branch in without] == want


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_export_casts_and_cuts_a_model_folder(folder, tmp_path, capsys, dtype):
    output = tmp_path / "out"
    words = [] if dtype is None else ["--dtype", dtype]
    assert run("export", folder, "--output", output, "--max-shard-size", "20KB", *words) == 0
    before, after = SafetensorsFolder(folder), SafetensorsFolder(output)
    shards = sorted(output.glob("model-*.safetensors"))
    assert len(shards) > 2 and max(shard.stat().st_size for shard in shards) < 70_000
    assert before.tensors.keys() == after.tensors.keys()
    for name, stored in before.tensors.items():
        index = tuple(slice(0, size) for size in stored.shape)
        want = before.fetch(name, index).astype(dtype or stored.dtype)
        assert after.fetch(name, index).tobytes() == want.tobytes()
    config = json.loads((output / "config.json").read_text())
    assert config["torch_dtype"] == (dtype or "float32") and config["hidden_size"] == 32
    assert (output / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert "is now in" in capsys.readouterr().out
    if dtype is None:
        texts = ["the same"]
        np.testing.assert_array_equal(api.logits(output, texts)[0], api.logits(folder, texts)[0])


@pytest.mark.parametrize("words", [["export"], ["quantize", "--scheme", "int8"]])
def test_a_missing_folder_is_called_missing(tmp_path, capsys, words):
    assert run(words[0], tmp_path / "nowhere", *words[1:]) == 2
    assert "nowhere does not exist; of a model name where" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "name where to write with --output"),
        (["--output", "SELF"], "was not made by a run|holds"),
        (["--output", "new", "--step", "3"], "--step is of a run's checkpoints"),
        (["--output", "new", "--max-shard-size", "big"], "is no size"),
        (["--output", "new", "--max-shard-size", "0MB"], "is no size"),
    ],
)
def test_export_says_what_is_missing(folder, tmp_path, capsys, words, message):
    import re

    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    named = {"SELF": folder, "new": tmp_path / "new"}
    assert run("export", folder, *[named.get(word, word) for word in words]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not (tmp_path / "new").exists()


def test_export_refuses_to_cast_codes(folder, tmp_path, capsys):
    import shutil

    quantized = tmp_path / "quantized"
    shutil.copytree(folder, quantized)
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq"}
    (quantized / "config.json").write_text(json.dumps(config))
    assert run("export", quantized, "--output", tmp_path / "o", "--dtype", "float32") == 2
    assert "quantization_config" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_raw_prompts_may_be_messages_as_json(folder, tmp_path, capsys):
    talk = json.dumps([{"role": "user", "content": "hi"}])
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": talk}) + "\n")
    words = ["--raw", "--input", tmp_path / "in.jsonl", "sampling.max_new_tokens=2"]
    assert run("generate", folder, *words) == 0
    assert f">>> {talk}" in capsys.readouterr().out
    (tmp_path / "in.jsonl").write_text('{"prompt": "x", "system": "y"}\n')
    assert run("generate", folder, *words) == 2
    assert "line 1: --raw needs a text in the column prompt" in capsys.readouterr().err


def test_generate_reads_and_writes_ids(folder, answers, tmp_path, capsys):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt_ids": [5, 6, 7], "name": "a"}\n[9, 8]\n')
    words = ["sampling.temperature=0", "sampling.max_new_tokens=4"]
    ids = ["generate", folder, "--ids"]
    assert run(*ids, "--input", source, "--output", output, *words) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["completion_ids"] for row in rows] == [answer.tokens for answer in answers]
    assert rows[0]["name"] == "a" and rows[1]["prompt_ids"] == [9, 8]
    assert rows[0]["finish_reason"] == answers[0].finish_reason
    np.testing.assert_allclose(rows[0]["logprobs"], answers[0].logprobs, rtol=1e-5)
    capsys.readouterr()
    assert run(*ids, "--prompt", "[9, 8]", *words) == 0
    assert json.loads(capsys.readouterr().out)["completion_ids"] == answers[1].tokens


@pytest.mark.parametrize(
    "words, message",
    [
        (["--prompt", "[1, 2"], "is not valid JSON"),
        (["--prompt", "3"], "must be an object"),
        (["--prompt", '{"prompt": "a"}'], "needs a list of token ids in the key prompt_ids"),
        (["--prompt", "[1, 512]"], "holds the id 512"),
        (["--prompt", '[1, "a"]'], "must be a list of token ids"),
        (["--prompt", "[]"], "is empty"),
        (["--prompt", "[" * 100000], "is not valid JSON"),
        ([], "need --prompt or --input"),
        (["--raw", "--prompt", "[1]"], "--ids continues token ids"),
    ],
)
def test_wrong_ids_are_named(folder, capsys, words, message):
    assert run("generate", folder, "--ids", *words) == 2
    error = capsys.readouterr().err
    assert message in error and len(error) < 2000
