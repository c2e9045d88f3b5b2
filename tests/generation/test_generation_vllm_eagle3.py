"""Exported drafts in the real vLLM on CPU: the same answers, and the same guesses accepted.

JAXTRAIN_VLLM_PYTHON names the Python of an environment with vLLM. An engine is up after half a
minute, so this is slow.
"""

import json
import os
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from real_vllm import PYTHON

from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.models import build, eagle3, families, saving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(
        not Path(PYTHON or "/nowhere").is_file(),
        reason="JAXTRAIN_VLLM_PYTHON does not name the Python of an environment with vLLM",
    ),
]
PROMPTS, TOKENS, GUESSES = [[5, 9, 100, 7], [3, 8, 44, 61, 77, 12]], 24, 4
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}


def make_pair(folder: Path):
    """A target and an Eagle3 draft that like the same few tokens, and their folders."""
    tokenizer = load_tokenizer("builtin")
    raw = {**SIZES, "model_type": "qwen3", "num_hidden_layers": 7, "intermediate_size": 128}
    config = families.config_from_hf({**raw, "eos_token_id": tokenizer.eos_token_id})
    local_value = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    small = eagle3.Config(
        **local_value,
        vocab_size=512,
        draft_vocab_size=60,
        target_hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope=(("rope_theta", 1e4), ("rope_type", "default")),
        capture=(1, 2, 3),
        num_target_layers=7,
        length=GUESSES,
    )
    target, draft = build.init(config, 0), build.init(small, 1)
    ids = np.sort(np.random.default_rng(5).choice(512, 60, replace=False))
    draft.kept[...] = jnp.asarray(ids, jnp.int32)
    for table, rows in ((target.lm_head, ids[:6]), (draft.lm_head, np.arange(6))):
        table.embedding[...] = table.embedding[...].at[rows].multiply(6.0)
    saving.save(target, config, folder / "target")
    saving.save(draft, small, folder / "draft")
    tokenizer.save_pretrained(folder / "target")
    return target.unstack(), draft


def decode(target, draft, prompt):
    """(greedy answer, cycles, accepted by place), one token a pass."""

    @jax.jit
    def read(tokens, cache, followed):
        actual = target.decode(tokens, cache, capture=draft.capture)
        count = jnp.array([tokens.shape[1]], jnp.int32)
        followed = draft.read(followed, target, tokens, actual.captured, count)
        return target.logits(actual.hidden[0, -1]).argmax(), actual.cache, followed

    propose = jax.jit(lambda followed, token: draft.propose(followed, target, token))
    cache, followed = target.init_cache(1, 64), draft.init_cache(1, 64)
    token, cache, followed = read(jnp.array([prompt], jnp.int32), cache, followed)
    answer, cycles, accepted = [int(token)], 0, np.zeros(GUESSES, int)
    while len(answer) < TOKENS:
        guesses = propose(followed, jnp.array(answer[-1:], jnp.int32))[0].tolist()
        cycles += 1
        for position in range(GUESSES + 1):
            last = jnp.array([answer[-1:]], jnp.int32)
            token, cache, followed = read(last, cache, followed)
            answer.append(int(token))
            if position == GUESSES or guesses[position] != answer[-1]:
                break
            accepted[position] += 1
    return answer[:TOKENS], cycles, accepted


def test_vllm_reads_an_eagle3_export(tmp_path):
    """Layers, positions, tables and names are right if as many guesses are accepted, by place."""
    target, draft = make_pair(tmp_path)
    actual = [decode(target, draft, prompt) for prompt in PROMPTS]
    words = [str(tmp_path / "target"), str(tmp_path / "draft"), "eagle3", str(GUESSES), str(TOKENS)]
    script = Path(__file__).with_name("vllm_drafts.py")
    local_value = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [PYTHON, str(script), *words, json.dumps(PROMPTS)],
        env={**os.environ, **local_value, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    output = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert output, (done.stdout + done.stderr)[-3000:]
    payload = json.loads(output[-1].removeprefix("FOUND "))
    assert payload["answers"] == [answer for answer, _, _ in actual]
    accepted = sum(places for _, _, places in actual)
    counted = payload["counted"]
    assert counted["vllm:spec_decode_num_drafts"] == sum(cycles for _, cycles, _ in actual)
    assert counted["vllm:spec_decode_num_accepted_tokens_per_pos"] == accepted.tolist()
    assert accepted.sum() > 0
