"""A real vLLM on CPU loads the draft folders that runs write, and guesses with them.

As in test_generation_vllm_server.py: JAXTRAIN_VLLM_PYTHON names the Python of an environment with
vLLM (0.32 guesses on CPUs, too).
"""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from real_vllm import PYTHON, make_model

from jaxtrain.models import build, dflash, families, loading, saving
from jaxtrain.models.decoder_config import DecoderConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(
        not Path(PYTHON or "/nowhere").is_file(),
        reason="JAXTRAIN_VLLM_PYTHON does not name the Python of an environment with vLLM",
    ),
]
SCRIPT = Path(__file__).with_name("vllm_drafts.py")
PROMPTS = [[5, 9, 200, 31, 7], [300, 4, 4, 17, 80, 91, 2]]
TOKENS, GUESSES = 12, 3


def make_draft(target: Path, folder: Path) -> dflash.Model:
    """A DFlash draft of random weights for a target of two layers."""
    template = families.read_config(target)
    shared = {f.name: getattr(template, f.name) for f in dataclasses.fields(DecoderConfig)}
    config = dflash.Config(
        **{**shared, "tie_word_embeddings": False, "num_hidden_layers": 2},
        capture=(1, 0),
        target_hidden_size=template.hidden_size,
        num_target_layers=template.num_hidden_layers,
        mask_token_id=511,
        block_size=GUESSES + 1,
        layer_types=("full_attention",) * 2,
        max_window_layers=2,
    )
    draft = build.init(config, 3)
    saving.save(draft, config, folder)
    return draft


def count_accepted(target, draft) -> tuple[list[list[int]], int, int]:
    """(answers, cycles, guesses that were accepted) by plain loops: the target reads what is there
    anew for every token, the draft its states."""
    states = jax.jit(lambda tokens: target.decode(tokens, target.init_cache(1, 64), capture=(1, 0)))
    propose = jax.jit(
        lambda tokens, captured, count, token: draft.propose(
            draft.read(draft.init_cache(1, 64), target, tokens, captured, count), target, token
        )
    )
    answers, cycles, accepted = [], 0, 0
    for prompt in PROMPTS:
        text = list(prompt)
        while len(text) < len(prompt) + TOKENS:
            tokens = jnp.asarray([text + [0] * (40 - len(text))], jnp.int32)
            text.append(int(target.logits(states(tokens).hidden)[0, len(text) - 1].argmax()))
        answer, done = text[len(prompt) :], 1
        answers.append(answer)
        tokens = jnp.asarray([text + [0] * (40 - len(text))], jnp.int32)
        captured = states(tokens).captured
        while done < TOKENS:
            recorded = len(prompt) + done - 1  # tokens that the target has read
            token = jnp.asarray([text[recorded]], jnp.int32)
            guesses = propose(tokens, captured, jnp.asarray([recorded], jnp.int32), token)[0]
            right = np.asarray(guesses) == np.resize(answer[done:] + [-1] * GUESSES, GUESSES)
            retained = int(np.cumprod(right).sum())
            cycles, accepted, done = cycles + 1, accepted + retained, done + retained + 1
    return answers, cycles, accepted


def test_vllm_guesses_with_a_dflash_folder(tmp_path):
    folder = make_model(tmp_path / "target", 0, True)
    draft = make_draft(folder, tmp_path / "draft")
    command = [PYTHON, str(SCRIPT), str(folder), str(tmp_path / "draft"), "dflash", str(GUESSES)]
    environ = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, str(TOKENS), json.dumps(PROMPTS)], capture_output=True, text=True, env=environ
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    payload = json.loads(line.removeprefix("FOUND "))
    answers, cycles, accepted = count_accepted(loading.load(folder), draft)
    assert payload["answers"] == answers
    counted = payload["counted"]
    assert counted["vllm:spec_decode_num_drafts"] == pytest.approx(cycles, abs=len(PROMPTS))
    assert (counted["vllm:spec_decode_num_accepted_tokens"] or 0) == pytest.approx(
        accepted, abs=GUESSES * len(PROMPTS)
    )
