"""Configs that make a model's context longer: logits against transformers, family by family."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="parity needs torch, which this environment has not")

import torch
from test_models_families import FAMILIES, make_torch, relative_error
from tiny_models import compute_logits, documents, pack

from jaxtrain.models import build, families, loading

TOKENS, ORIGINAL = 48, 16
KEYS = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 3.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        **{"factor": 3.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": {
        **{"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.0, 3.0, 5.0, 9.0]},
        "original_max_position_embeddings": ORIGINAL,
    },
}
"""Keys of rope_parameters by rope_type. A head of 8 dims has four pairs."""
CHOSEN = [("llama", "dynamic")]
CASES = [
    *(("llama", kind) for kind in ("linear", "longrope")),
    *(("gpt_neox", kind) for kind in ("dynamic", "yarn")),
    *(("mixtral", kind) for kind in ("dynamic", "llama3", "longrope")),
    *(("olmo2", kind) for kind in ("dynamic", "linear")),
    *(("falcon", "yarn"), ("cohere", "dynamic"), ("starcoder2", "longrope")),
    ("phimoe", "longrope"),
]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in CHOSEN),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in CASES),
    ],
)
def test_longer_contexts_are_those_of_transformers(name, kind, tmp_path):
    """Compare a text as long as the run's rows, by which dynamic NTK and LongRoPE choose."""
    raw = {key: value for key, value in FAMILIES[name].items() if not key.startswith("rope_")}
    # NTK alone goes beyond max_position_embeddings.
    longest = ORIGINAL if kind == "dynamic" else 4 * ORIGINAL
    rope = {"rope_type": kind, "rope_theta": 500.0, **KEYS[kind]}
    if name == "mixtral":
        raw["head_dim"] = 8  # transformers computes with it as it is stated
    if name == "phimoe":
        rope |= {"short_mscale": 1.1, "long_mscale": 1.3}
    if name == "gpt_neox":
        rope["partial_rotary_factor"] = 0.5
    reference = make_torch({**raw, "max_position_embeddings": longest, "rope_parameters": rope})
    if name == "phimoe":  # transformers 5.24 computes its frequencies without the text's length
        rotary = reference.model.rotary_emb
        compute = rotary.rope_init_fn
        rotary.rope_init_fn = lambda config, *_, **__: compute(config, seq_len=TOKENS)
    reference.save_pretrained(tmp_path)
    config = families.read_config(tmp_path).for_rows(TOKENS)
    assert config.longest == longest * (3 if kind == "dynamic" else 1)
    model = loading.load(tmp_path)
    model.encodings = build.abstract(config).encodings
    (text,) = documents(5, TOKENS)
    with torch.no_grad():
        expected = reference(torch.from_numpy(text[None]).long(), use_cache=False).logits
    actual = compute_logits(model, pack([[text]], TOKENS))
    assert relative_error(np.asarray(actual), expected.numpy()) < 1e-4
