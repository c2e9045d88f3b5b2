"""Exported drafts, loaded by transformers with trust_remote_code, against the models themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_methods_eagle3 as eagle
from dflash_reference import row_hidden
from test_models_dflash import CONFIG, VOCAB, WIDTH, K, make_models, to_tensors
from tiny_models import documents, pack

from jaxtrain.models import families, saving

torch = pytest.importorskip("torch", reason="the modules are PyTorch's")
transformers = pytest.importorskip("transformers", reason="it loads the folders")
pytestmark = pytest.mark.slow
FLOAT32 = {"rtol": 1e-4, "atol": 1e-5}
"""transformers' norms and angles are float32, whatever the model is."""

draft_pair = eagle.draft_pair


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Save a draft and load it as a user of transformers does, in float64."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    monkeypatch.syspath_prepend(str(tmp_path / "hf"))

    def load(model, config):
        folder = tmp_path / "draft"
        saving.save(model, config, folder)
        options = {"trust_remote_code": True, "dtype": torch.float64, "output_loading_info": True}
        loaded, info = transformers.AutoModel.from_pretrained(folder, **options)
        assert not any(info.values()), info
        return loaded.eval()

    return load


def tensor(x):
    return torch.from_numpy(np.array(x))


def test_dflash_guesses_the_same_with_and_without_a_cache(load):
    """Full and sliding layers, biases; the block behind 12 tokens."""
    rng = np.random.default_rng(2)
    tokens, states = rng.integers(1, 96, 13), rng.standard_normal((1, 13, 2 * WIDTH))
    with jax.enable_x64():
        (params, rebuild), (ends, rebuild_ends) = make_models()
        draft, target = rebuild(params), rebuild_ends(ends)
        cache = draft.init_cache(1, 32)
        counts = jnp.asarray([12], jnp.int32)
        cache = draft.read(
            cache, target, jnp.asarray(tokens[None], jnp.int32), jnp.asarray(states), counts
        )
        expected = draft.propose(cache, target, jnp.asarray(tokens[12:], jnp.int32))
        block = jnp.asarray([[tokens[12], *[CONFIG.mask_token_id] * (K - 1)]], jnp.int32)
        embedded = tensor(target.embed(block))
        hidden = row_hidden(
            to_tensors(params),
            CONFIG,
            target.embed.embedding[...],
            jnp.asarray(tokens),
            np.arange(13),
            jnp.asarray(states[0]),
            [(12, list(range(12)), [12, -1, -1, -1])],
        )
        head = tensor(target.lm_head.embedding[...])
    torch_draft = load(draft, CONFIG)
    assert (torch_draft.block_size, torch_draft.target_layer_ids) == (K, [2, 0])
    positions, states = torch.arange(12 + K)[None], tensor(states)[:, :12]
    with torch.no_grad():
        options = {"noise_embedding": embedded}
        uncached = torch_draft(positions, target_hidden=states, **options)
        cache = transformers.DynamicCache()
        first = {"target_hidden": states[:, :5], "past_key_values": cache}
        torch_draft(positions[:, : 5 + K], **first, **options)
        cache.crop(-K)
        later = torch_draft(
            positions[:, 5:], target_hidden=states[:, 5:], past_key_values=cache, **options
        )
    np.testing.assert_allclose(later, uncached, **FLOAT32)
    np.testing.assert_allclose(uncached[0], hidden, **FLOAT32)
    logits = uncached[:, 1:] @ head.T
    assert logits.shape == (1, K - 1, VOCAB)
    assert logits.argmax(-1).tolist() == expected.tolist()


def test_eagle3_guesses_the_same_in_its_first_two_steps(load, draft_pair):
    target, draft = draft_pair
    text = documents(4, 11)[0]
    with jax.enable_x64():
        batch = eagle.label(eagle.wide(pack([[text]], len(text))))
        captured, _ = eagle.states_of(target, text)
        following = jnp.arange(1, len(text) + 1)[None].at[0, -1].set(-1)
        normed = draft.unroll(target, captured[None], batch, following, 2)
        expected = [np.asarray(draft.logits(states))[0] for states in normed]
        draft_ids = np.asarray(draft.kept_ids())
        embedded = tensor(target.embed(jnp.asarray(text)[None]))
    torch_draft = load(draft, eagle.make_config(families.config_from_hf(eagle.RAW)))
    assert torch_draft.to_target(torch.arange(eagle.P)).tolist() == draft_ids.tolist()
    states, cache = tensor(captured)[None], transformers.DynamicCache()
    with torch.no_grad():
        # All pairs but the last, whose token is what the second step reads.
        first = torch_draft(embedded[:, 1:-1], target_hidden=states[:, :-2], past_key_values=cache)
        second = torch_draft(embedded[:, -1:], hidden=first.hidden[:, -1:], past_key_values=cache)
    np.testing.assert_allclose(first.logits[0], expected[0][1:-1], **FLOAT32)
    np.testing.assert_allclose(second.logits[0, 0], expected[1][-2], **FLOAT32)
