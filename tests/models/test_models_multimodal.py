"""Folders that transformers writes of models with a vision tower: their text is what it computes,
everything else comes back byte by byte."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="parity needs torch, which this environment has not")

import torch
import transformers
from test_models_families import FAMILIES, read_flat, relative_error
from tiny_models import compute_logits, documents, pack

from jaxtrain.errors import UserError
from jaxtrain.models import families, loading, saving

PIXTRAL = {
    **{"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "head_dim": 8},
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 4},
}


LLAMA_TOWER = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vision_output_dim": 16},
    **{"num_attention_heads": 2, "projector_input_dim": 16, "projector_output_dim": 16},
    **{"image_size": 16, "patch_size": 4},
}
TOWERS = {
    "mistral": ("Mistral3", PIXTRAL),
    "ministral3": ("Mistral3", PIXTRAL),
    "llama4": ("Llama4", LLAMA_TOWER),
}
"""The beginning of the names of transformers' classes, and the tower."""


def write_folder(folder, text: str, tied: bool):
    """The folder of a multimodal model around a text of `FAMILIES`, and its class."""
    torch.manual_seed(0)
    name, tower = TOWERS[text]
    config = getattr(transformers, f"{name}Config")(
        text_config={**FAMILIES[text], "tie_word_embeddings": tied},
        vision_config=tower,
        image_token_index=5,
        tie_word_embeddings=tied,
    )
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    model = kind._from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    return model, kind


def compute_text(model, tokens) -> np.ndarray:
    """The logits of one document."""
    # transformers 5.24 fails on Llama 4's whole model without images.
    text = model.language_model if "Llama4" in type(model).__name__ else model
    with torch.no_grad():
        return text(torch.from_numpy(tokens[None]).long()).logits[0].numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "tied"),
    [
        ("ministral3", False),
        ("mistral", True),
        pytest.param("llama4", False, marks=pytest.mark.thorough),
    ],
)
def test_the_text_of_a_model_with_a_tower(text, tied, tmp_path):
    reference, kind = write_folder(tmp_path / "in", text, tied)
    config = families.read_config(tmp_path / "in")
    assert config.text_type == FAMILIES[text]["model_type"]
    assert config.prefix == "language_model.model."
    model = loading.load(tmp_path / "in")
    (document,) = documents(3, 24)
    document = np.where(document == 5, 6, document)
    actual_values = compute_logits(model, pack([[document]], 24))[0]
    expected = compute_text(reference, document)
    assert relative_error(np.asarray(actual_values), expected) < 1e-5

    saving.save(model, config, tmp_path / "out")
    stored, actual = read_flat(tmp_path / "in"), read_flat(tmp_path / "out")
    assert set(actual) == set(stored)
    assert tied == ("language_model.lm_head.weight" not in actual)
    for name, array in stored.items():
        assert actual[name].tobytes() == array.tobytes(), name
    assert families.read_config(tmp_path / "out") == config
    again = kind.from_pretrained(tmp_path / "out", attn_implementation="eager")
    np.testing.assert_array_equal(compute_text(again, document), expected)


def test_a_text_that_no_family_has_is_refused_by_name():
    raw = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": {"model_type": "qwen2"},
    }
    with pytest.raises(UserError, match="text_config.model_type='qwen2'"):
        families.config_from_hf(raw)
