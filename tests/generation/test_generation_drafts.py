"""Real drafts with random weights: through folders, the command line and runs nothing they guess
changes an answer, and drafts that do not fit are named."""

import json
import re

import numpy as np
import pytest
from test_generation_continuous import RAW

from jaxtrain.cli.published_tau import find_published
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Sampling
from jaxtrain.generation.local.draft_model import check_draft
from jaxtrain.generation.local.sampler import LocalSampler
from jaxtrain.generation.local.slots import unstack
from jaxtrain.generation.local.speculation import DraftedModel
from jaxtrain.main import main
from jaxtrain.models import build, families, loading, saving

TARGET = {
    **RAW,
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "num_hidden_layers": 3,
}


def make_dflash(target: dict, **changes):
    """The config of a small DFlash draft for a target."""
    raw = {
        **target,
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 2,
        "block_size": 4,
        "num_target_layers": target["num_hidden_layers"],
        "dflash_config": {"mask_token_id": 500, "target_layer_ids": [0, 2]},
        "tie_word_embeddings": False,
        **changes,
    }
    return families.config_from_hf(raw)


def save(config, seed, folder):
    saving.save(build.init(config, seed), config, folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(target, DFlash draft) of random weights."""
    position = tmp_path_factory.mktemp("models")
    target = save(families.config_from_hf(TARGET), 0, position / "target")
    return target, save(make_dflash(TARGET), 1, position / "draft")


PROMPTS = [[5, 9, 2], [7, 100, 101, 102], [8, 3]]


def make_eagle3():
    """A small Eagle3 draft of random weights for the target."""
    raw = {key: value for key, value in TARGET.items() if key != "model_type"}
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "ttt_length": 3}
    local_value = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "rope_theta": 1e4,
    }
    return build.init(families.config_from_hf({**raw, **local_value, "eagle_config": layers}), 1)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["dflash", "eagle3"])
def test_answers_do_not_depend_on_a_draft(folders, family):
    target = unstack(loading.load(folders[0]))
    draft = unstack(loading.load(folders[1]) if family == "dflash" else make_eagle3())
    sampling = Sampling(max_new_tokens=30, temperature=0.8, top_k=50, seed=4)
    plain, drafted = (
        LocalSampler(model, (3,), max_len=128) for model in (target, DraftedModel(target, draft))
    )
    for entry, second in zip(
        plain.generate(PROMPTS, sampling), drafted.generate(PROMPTS, sampling), strict=True
    ):
        assert entry.tokens == second.tokens
        np.testing.assert_allclose(entry.logprobs, second.logprobs, atol=1e-5)
    assert drafted.acceptance.cycles > 50


@pytest.mark.slow
def test_generate_and_speculate_use_a_draft(folders, tmp_path, capsys):
    target, draft = map(str, folders)
    words = [target, "model.tokenizer=builtin", "sampling.max_new_tokens=12"]
    requests = ["--raw", "--prompt", "What is 2 + 3?"]
    assert main(["generate", *words, *requests]) == 0
    plain = capsys.readouterr().out
    assert main(["generate", *words, *requests, "--draft", draft]) == 0
    captured = capsys.readouterr()
    assert captured.out == plain and "tokens a pass" in captured.err
    report = tmp_path / "report.json"
    rows = ["--input", "builtin:calculator", "--most", "3", "--output", str(report)]
    assert main(["speculate", *words, "--draft", draft, *rows, "--rows", "1;2"]) == 2
    assert "'1;2' is no list such as 1,4,16" in capsys.readouterr().err
    target, tokenizer, length = words  # overrides may stand behind it
    words = [target, tokenizer, "--draft", draft, *rows, "--rows", "1,2", length]
    assert main(["speculate", *words]) == 0
    messages, (entry,) = capsys.readouterr().out, json.loads(report.read_text())["sets"]
    assert "all 3 equal" in messages
    assert entry["prompts"] == 3 and [timing["rows"] for timing in entry["timings"]] == [1, 2]
    assert sum(entry["histogram"]) == entry["cycles"] and len(entry["histogram"]) == 4
    assert entry["tau_pooled"] == 1 + entry["accepted"] / entry["cycles"]
    assert sum(entry["accepted_by_position"]) == pytest.approx(entry["tau_pooled"] - 1)
    for timing in entry["timings"]:
        assert timing["different_answers"] == 0 and timing["largest_logprob_difference"] < 1e-4
        assert timing["tokens"] <= 36 and timing["drafted_tokens_per_second"] > 0
        for kind in ("plain", "drafted"):
            pairs = zip(timing[f"{kind}_decoding_seconds"], timing[f"{kind}_seconds"], strict=True)
            assert all(0 < decoding < whole for decoding, whole in pairs)
            rate = timing[f"{kind}_decoding_tokens_per_second"]
            assert rate == (timing["tokens"] - 3) / timing[f"{kind}_decoding_seconds"][0]
    assert entry["published"] == {}  # those are of benchmarks
    draft = loading.load(folders[1])
    assert sorted(find_published(draft, "gsm8k").values()) == [3.89, 6.54]
    assert [*find_published(draft, "aime24").values()] == [3.98]
    assert sorted(find_published(make_eagle3(), "mt-bench").values()) == [2.83]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_size": 64}, "reads states of 64 features.*hidden_size 32"),
        ({"vocab_size": 1024}, "vocabulary of 1024 tokens.*of 512"),
        ({"num_target_layers": 7}, "target of 7 layers.*has 3"),
    ],
)
def test_drafts_of_another_target_are_refused(folders, tmp_path, capsys, changes, expected):
    config = make_dflash(TARGET, **changes)
    save(config, 0, tmp_path / "draft")
    words = ["generate", str(folders[0]), "model.tokenizer=builtin", "--raw", "--prompt", "x"]
    assert main([*words, "--draft", str(tmp_path / "draft")]) == 2
    assert re.search(expected, capsys.readouterr().err)


def test_what_is_no_draft_is_refused(folders, tmp_path):
    class Parts:
        architecture = families.config_from_hf(TARGET)

    check_draft(str(folders[1]), Parts, "--draft")
    with pytest.raises(UserError, match="--draft .* holds Qwen3ForCausalLM, which is no draft"):
        check_draft(str(folders[0]), Parts, "--draft")
    with pytest.raises(UserError, match="--draft './nothing' is not a folder here"):
        check_draft("./nothing", Parts, "--draft")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="is a run; name the draft folder"):
        check_draft(str(tmp_path), Parts, "rollout.draft")
