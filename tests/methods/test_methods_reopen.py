"""Which dtype a folder is computed in."""

import json

import pytest

from jaxtrain.methods.reopen import choose_dtypes

FLOAT = {"compute_dtype": "float32"}
HALF = {"param_dtype": "bfloat16", "compute_dtype": "bfloat16"}


@pytest.mark.parametrize(
    "raw, overrides, own_dtype, expected",
    [
        ({"torch_dtype": "bfloat16"}, [], True, HALF),
        ({"dtype": "bfloat16"}, ["sampling.seed=1"], True, HALF),
        ({"text_config": {"dtype": "bfloat16"}}, [], True, HALF),
        ({"dtype": "float16"}, [], True, FLOAT | {"param_dtype": "float32"}),
        ({}, [], True, FLOAT | {"param_dtype": "float32"}),
        ({"dtype": "bfloat16"}, ["model.compute_dtype=float32"], True, FLOAT),
        ({"dtype": "bfloat16"}, [], False, FLOAT),
    ],
)
def test_a_folder_is_computed_in_its_own_dtype(tmp_path, raw, overrides, own_dtype, expected):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert choose_dtypes(str(tmp_path), overrides, own_dtype) == expected
