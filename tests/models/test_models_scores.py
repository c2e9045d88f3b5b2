"""Heads that score: what transformers and PEFT compute with what is written, and back."""

import dataclasses
import json

import jax
import numpy as np
import pytest

pytest.importorskip("torch", reason="parity needs torch, which this environment has not")

import torch
import transformers
from tiny_models import RAW, documents, pack

from jaxtrain.adapters.attach import attach
from jaxtrain.adapters.peft import load_trained, read_adapter, write_peft
from jaxtrain.adapters.spec import Adapter, LoRASpec, choose_slots, find_linears
from jaxtrain.core.architecture import choose_head
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.errors import UserError
from jaxtrain.models import build, families, loading, saving
from jaxtrain.models.parameters import split_model
from jaxtrain.models.scores import ScoreHead, name_labels

SEQUENCE, TOKEN = ScoreHead("sequence", name_labels(1)), ScoreHead("token", name_labels(2))
PAD = 0
TEXTS = documents(5, 9, 17, 12)


def score_texts(model):
    """Our scores [3, 17, n] of TEXTS, right padded as transformers would."""
    params, rebuild = split_model(model)

    def score(params, batch):
        model = rebuild(params)
        return model.scores(model.hidden(batch).hidden)

    return np.asarray(jax.jit(score)(params, pack([[text] for text in TEXTS], 17)))


def their_inputs():
    """(ids, mask) [3, 17] of TEXTS, right padded."""
    ids = np.full((3, 17), PAD)
    for row, text in enumerate(TEXTS):
        ids[row, : len(text)] = text
    lengths = np.array([len(text) for text in TEXTS])
    return torch.from_numpy(ids), torch.from_numpy(np.arange(17) < lengths[:, None]).long()


def last_tokens(scores):
    return np.stack([scores[row, len(text) - 1] for row, text in enumerate(TEXTS)])


SMALL = {"vocab_size": 97, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
OLDER = {
    "gpt2": {"model_type": "gpt2", **SMALL},
    "gptj": {"model_type": "gptj", **SMALL, "rotary_dim": 4, "tie_word_embeddings": False},
}
"""With a class of another name, and a bias on the head that predicts tokens."""


def make_config(name, head):
    raw = {**RAW, **OLDER}[name]
    return families.with_score(families.config_from_hf({**raw, "pad_token_id": PAD}), head)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("qwen3", SEQUENCE),
        slow("llama", TOKEN),
        slow("mixtral", SEQUENCE),
        slow("gpt2", SEQUENCE),
        slow("gptj", SEQUENCE),
        pytest.param("qwen3_moe_mixed", TOKEN, marks=pytest.mark.thorough),
        slow("qwen3_5", SEQUENCE),
        pytest.param("qwen3_next", TOKEN, marks=pytest.mark.thorough),
    ],
)
def test_transformers_scores_what_we_write(name, head, tmp_path):
    config = make_config(name, head)
    saving.save(build.init(config, 3), config, tmp_path)
    kind = "Sequence" if head is SEQUENCE else "Token"
    auto = getattr(transformers, f"AutoModelFor{kind}Classification")
    reference, report = auto.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert families.read_config(tmp_path) == config
    actual = score_texts(loading.load(tmp_path))
    ids, mask = their_inputs()
    with torch.no_grad():
        expected = reference.eval()(ids, attention_mask=mask).logits.numpy()
    if head is SEQUENCE:
        np.testing.assert_allclose(last_tokens(actual), expected, atol=1e-5)
        return
    for row, text in enumerate(TEXTS):
        local_result = (row, slice(len(text)))
        np.testing.assert_allclose(actual[local_result], expected[local_result], atol=1e-5)


def test_heads_for_tokens_of_another_name_are_refused():
    with pytest.raises(UserError, match="under the name classifier"):
        make_config("gpt2", TOKEN)


@pytest.mark.parametrize("name", ["llama", slow("gptj")])
def test_a_language_model_gets_a_head_and_keeps_the_rest(name, tmp_path):
    config = families.config_from_hf({**RAW, **OLDER}[name])
    saving.save(build.init(config, 3), config, tmp_path)
    expected = choose_head(families.read_config(tmp_path), SEQUENCE)
    assert expected.score == dataclasses.replace(SEQUENCE, drawn=True)
    actual = dict(loading.read_params(tmp_path, config=expected, seed=1))
    base = split_model(loading.load(tmp_path))[0]
    predicts = {"lm_head.embedding", "lm_head.bias"}
    assert actual.keys() == base.keys() - predicts | {"score.weight"}
    assert all(np.array_equal(actual[path], base[path]) for path in actual if path in base)
    head = np.asarray(actual["score.weight"])
    (_, second), *_ = build.draw_params(expected, 2, only={"score.weight"})
    assert not np.array_equal(head, second)
    assert 0.5 < head.std() / config.initializer_range < 2


@pytest.mark.slow
def test_peft_loads_an_adapter_with_its_head(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed on this Python")
    base = families.config_from_hf({**RAW["qwen3"], "pad_token_id": PAD})
    saving.save(build.init(base, 3), base, tmp_path / "base")
    config = choose_head(base, SEQUENCE)
    slots = choose_slots(find_linears(config), ["all-linear"], LoRASpec(4, 6.0), {}, {})
    adapter = Adapter(slots, ("score.weight",))
    shapes, rebuild = split_model(attach(build.abstract(config), adapter))
    named_sharding = jax.sharding.NamedSharding(
        make_mesh(jax.devices()[:1]), jax.sharding.PartitionSpec()
    )
    shapes = {
        path: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=named_sharding)
        for path, shape in shapes.items()
        if adapter.trains(path)
    }
    rng = np.random.default_rng(0)
    values = {
        path: 0.2 * rng.standard_normal(shape.shape).astype(np.float32)
        for path, shape in shapes.items()
    }
    write_peft(values, config, adapter, tmp_path / "adapter", str(tmp_path / "base"))
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "base", num_labels=1, attn_implementation="eager"
    )
    reference = peft.PeftModel.from_pretrained(reference, str(tmp_path / "adapter")).eval()
    ids, mask = their_inputs()
    with torch.no_grad():
        expected = reference(ids, attention_mask=mask).logits.numpy()

    actual = read_adapter(tmp_path / "adapter", config, "float32")
    assert (actual.slots, actual.full) == (adapter.slots, adapter.full)
    loaded = load_trained(shapes, config, actual)
    params = dict(loading.read_params(tmp_path / "base", config=config))
    assert all(np.array_equal(loaded[path], values[path]) for path in values)
    actual_values = score_texts(rebuild({**params, **loaded}))
    np.testing.assert_allclose(last_tokens(actual_values), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("raw", "score", "output"),
    [
        ({"architectures": ["Qwen3ForSequenceClassification"]}, None, "jaxtrain score"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, SEQUENCE, "with 2 labels"),
        ({"architectures": ["Qwen3ForTokenClassification"]}, SEQUENCE, "ForSequenceClass"),
        (
            {"architectures": ["Qwen3ForTokenClassification"], "id2label": {"1": "x"}},
            TOKEN,
            "id2label",
        ),
        (
            {"architectures": ["Qwen3ForTokenClassification"], "num_labels": -1},
            TOKEN,
            "num_labels",
        ),
    ],
)
def test_heads_that_do_not_fit_are_told(raw, score, output):
    raw = json.loads(json.dumps({**RAW["qwen3"], **raw}))
    with pytest.raises(UserError, match=output):
        choose_head(families.config_from_hf(raw), score)
