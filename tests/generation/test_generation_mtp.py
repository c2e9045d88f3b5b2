"""Multi-token prediction heads as drafts of their models."""

import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_generation_speculation import KINDS, LENGTHS, ask, check_same, open_sampler

from jaxtrain.batch import Batch
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.generation.local.draft_model import renew_draft
from jaxtrain.generation.local.slots import unstack
from jaxtrain.generation.local.speculation import DraftedModel
from jaxtrain.main import main
from jaxtrain.models import build, families, saving
from jaxtrain.models.mtp import HeadDraft, with_head

sys.path.append(str(Path(__file__).parents[1] / "models"))
from families_added import FAMILIES as ADDED
from tiny_models import RAW, SIZES

HYBRID = {
    **SIZES,
    **RAW["qwen3_5"],
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "vocab_size": 61,
    "initializer_range": 0.3,
}
ONE_LAYER = HYBRID | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}

NEMOTRON = {**SIZES, **RAW["nemotron_h_moe"], "vocab_size": 61, "initializer_range": 0.3}
MIMO = {
    key: value
    for key, value in {**SIZES, **ADDED["mimo_v2_flash"], "vocab_size": 61}.items()
    if value is not None
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(HYBRID, id="qwen3_5"),
        pytest.param(NEMOTRON, id="nemotron_h", marks=pytest.mark.thorough),
        pytest.param(MIMO, id="mimo_v2_flash", marks=pytest.mark.thorough),
    ],
)
def raw(request):
    return request.param


@pytest.fixture(scope="module")
def model(raw):
    return build.init(with_head(families.config_from_hf(raw), None), 0)


def flat_batch(tokens):
    T = len(tokens)
    index = np.arange(T, dtype=np.int32)[None]
    fields = (np.asarray(tokens, np.int32)[None], index, index - 1, np.full((1, T), T, np.int32))
    return Batch(*map(jnp.asarray, fields), weights={})


@pytest.mark.slow
def test_guesses_are_those_of_the_training_pass(model, raw):
    """Rows of 7, 4 and no tokens, read in two parts; the first guess is the likeliest token by the
    pair of the drawn one."""
    draft = HeadDraft(model.mtp, raw["num_hidden_layers"])
    rng = np.random.default_rng(0)
    texts = rng.integers(4, 61, (3, 8)).astype(np.int32)
    counts = np.array([7, 4, 0], np.int32)
    cache, state = model.init_cache(3, 12), draft.init_cache(3, 12)
    for start, stop in ((0, 3), (3, 7)):
        part = np.clip(counts - start, 0, stop - start).astype(np.int32)
        read = model.decode(texts[:, start:stop], cache, part, capture=draft.capture)
        state = draft.read(state, model, texts[:, start:stop], read.captured, part)
        cache = read.cache
    drawn = np.take_along_axis(texts, counts[:, None], axis=1)[:, 0]
    guesses = np.asarray(draft.propose(state, model, jnp.asarray(drawn)))
    assert guesses.shape == (3, draft.num_drafted)
    for row in (0, 1):
        batch = flat_batch(texts[row, : counts[row] + 1])
        pairs = model.mtp.read_rows(model, model.hidden(batch).hidden, batch)
        assert guesses[row, 0] == int(model.logits(pairs)[0, -1].argmax())


@pytest.mark.slow
def test_newer_weights_bring_their_head():
    config = with_head(families.config_from_hf(ONE_LAYER), None)
    older, newer = build.init(config, 0), build.init(config, 1)
    draft = unstack(HeadDraft(older.mtp, 1))
    renewed = renew_draft(draft, newer)
    assert jax.tree.structure(renewed) == jax.tree.structure(draft), "compiled programs serve"
    kernel = np.asarray(renewed.head.fc.kernel[...])
    np.testing.assert_array_equal(kernel, newer.mtp.fc.kernel[...])
    assert not np.array_equal(kernel, draft.head.fc.kernel[...])
    # The head of a folder stays beside a model that has none of its own.
    assert renew_draft(draft, SimpleNamespace(mtp=None)) is draft


@pytest.mark.thorough
def test_answers_are_those_of_plain_decoding(model, raw):
    """Greedy and sampled rows, filled again, with a recurrent layer that reads accepted tokens
    again."""
    rng = np.random.default_rng(0)
    prompts = [[10 + i, *rng.integers(4, 61, n - 1).tolist()] for i, n in enumerate(LENGTHS)]
    plain = ask(open_sampler(model), prompts)
    sampler = open_sampler(DraftedModel(model, HeadDraft(model.mtp, raw["num_hidden_layers"])))
    check_same(ask(sampler, prompts), plain)
    assert sampler.acceptance.cycles > len(KINDS)


@pytest.mark.slow
def test_a_folder_drafts_with_its_head(tmp_path, capsys):
    """`--draft mtp` of a folder gives the answer of the folder alone; one without a head is
    refused."""
    config = families.config_from_hf(ONE_LAYER | {"vocab_size": 512})
    for name, changed in (("head", with_head(config, None)), ("plain", config)):
        saving.save(build.init(changed, 0), changed, tmp_path / name)
        load_tokenizer("builtin").save_pretrained(tmp_path / name)
    words = ["--prompt", "one and two", "sampling.max_new_tokens=12", "sampling.temperature=0"]
    answers = []
    for draft in ([], ["--draft", "mtp"]):
        assert main(["generate", str(tmp_path / "head"), *words, *draft]) == 0
        answers.append(capsys.readouterr())
    assert answers[0].out == answers[1].out and answers[0].out.strip()
    assert "guesses accepted" in answers[1].err
    assert main(["generate", str(tmp_path / "plain"), *words, "--draft", "mtp"]) != 0
    assert "--draft mtp: the model's folder has no multi-token" in capsys.readouterr().err
