"""Layers that have an exact form, and those that are refused by name."""

import pytest
from families_gemma import FAMILIES as GEMMA
from tiny_models import RAW, SIZES

from jaxtrain.layers.exact import find_inexact_layers
from jaxtrain.models import build, families


@pytest.mark.parametrize(
    ("raw", "reasons"),
    [
        (RAW["qwen3"], []),
        (RAW["mistral"], []),
        (RAW["qwen3_5"], ["GatedDelta"]),
        (RAW["nemotron_h_moe"], ["SingleBlock"]),
        (
            {**SIZES, **GEMMA["gemma4_per_layer"]},
            [
                "attention that shares keys and values between layers",
                "layers with inputs of their own or experts beside an MLP",
            ],
        ),
    ],
    ids=["attention", "windows", "recurrent", "mamba", "shared keys"],
)
def test_layers_without_an_exact_form_are_named(raw, reasons):
    assert sorted(find_inexact_layers(build.abstract(families.config_from_hf(raw)))) == reasons
