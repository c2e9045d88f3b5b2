"""Exact rollouts through the front door: in every round the compiled step computes the sampler's
log-probs, to the bit; what cannot be so is refused."""

import jax
import numpy as np
import pytest
from test_methods_rl import CONFIG, run

from jaxtrain.api import Model
from jaxtrain.config.load import load_config
from jaxtrain.core import scorer
from jaxtrain.errors import UserError
from jaxtrain.methods.rl.method import make


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    devices = jax.devices
    monkeypatch.setattr(jax, "devices", lambda *backend: devices(*backend)[:1])


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "rl.toml"
    path.write_text(CONFIG.replace("[rollout]\n", "[rollout]\nexact = true\n"))
    return path


def check(lines, updates=1):
    for step, line in enumerate(lines):
        if step % updates == 0:
            assert (line["mismatch/exact"], line["mismatch/max_abs"]) == (1.0, 0.0)
            assert line["ratio/min"] == line["ratio/max"] == 1.0
            assert line["sampling/sampling_logp_difference/max"] == 0.0


@pytest.mark.slow
def test_every_round_begins_at_the_samplers_log_probs(config, tmp_path, monkeypatch, capsys):
    """Two updates a round, so that the fast path would score the policy before the first one."""
    monkeypatch.setattr(scorer, "make_logp", None)
    lines = run(config, tmp_path / "run", "task.num_minibatches=2", "run.max_steps=6")
    assert len(lines) == 6
    check(lines, updates=2)
    # Weights have moved: the second update of a round does not meet its sampler any more.
    assert any(line["ratio/max"] != 1.0 for line in lines[1::2])
    assert "mismatch/exact" not in lines[1]
    assert "old log-probs are the sampler's" in capsys.readouterr().out
    # Later uses of the run open the exact model, too.
    model = Model(tmp_path / "run")
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3]]
    answers = model.generate(prompts, max_new_tokens=9, temperature=0.7, seed=1)
    texts = [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, answers, strict=True)]
    for text, answer, logp in zip(texts, answers, model.logprobs(texts, 0.7), strict=True):
        assert len(answer.tokens) > 1 and len(logp) == len(text)
        drawn = np.asarray(answer.logprobs, np.float32)
        np.testing.assert_array_equal(logp[-len(drawn) :].view(np.uint32), drawn.view(np.uint32))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ["adapter.kind=lora", "adapter.rank=4", "model.compute_dtype=bfloat16"], id="lora"
        ),
        pytest.param(["task.share_prompts=false", "rollout.max_batch=5"], id="flat rows"),
    ],
)
def test_every_round_is_exact_with(config, tmp_path, words):
    lines = run(config, tmp_path / "run", *words)
    assert len(lines) == 4
    check(lines)


@pytest.mark.thorough
def test_a_resumed_run_is_exact_as_users_compile_it(config, tmp_path):
    """Compile with XLA's optimizations, which other tests leave out."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        options = ("checkpoint.every=1", "model.compute_dtype=bfloat16")
        run(config, tmp_path / "run", *options, "run.max_steps=1")
        longer = ("run.max_steps=3", "run.allow_config_change=true")
        lines = run(config, tmp_path / "run", *options, *longer)
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
    assert [line["step"] for line in lines] == [1, 2, 3]
    check(lines)


def test_all_reasons_against_it_are_one_message(config, monkeypatch):
    words = {
        'rollout.engine "vllm"': [
            "rollout.engine=vllm",
            'rollout.vllm.servers=["http://127.0.0.1:1"]',
        ],
        'model.matmul "fp8"': "model.matmul=fp8",
        "adapter.dropout 0.1": ["adapter.kind=lora", "adapter.dropout=0.1"],
        "model.neftune_alpha 5": "model.neftune_alpha=5",
        'adapter.kind "dora"': "adapter.kind=dora",
        'rollout.local.cache "fp8"': "rollout.local.cache=fp8",
        "structured_outputs": "sampling.structured_outputs.regex=a+",
        'model.attention "triton"': "model.attention=triton",
    }
    for sentence, overrides in words.items():
        overrides = [overrides] if isinstance(overrides, str) else overrides
        with pytest.raises(UserError, match=sentence):
            make(load_config(config, overrides))
    monkeypatch.undo()
    both = ["model.neftune_alpha=5", "rollout.local.weights=int8"]
    with pytest.raises(UserError) as caught:
        make(load_config(config, both))
    for reason in ("neftune_alpha 5", '"int8" rounds', "4 devices share the work"):
        assert reason in str(caught.value)
