"""docs/models.md says what the code and the tests of families say, and of vLLM what it says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.models import ARCHITECTURES

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import make_models_table as table


@pytest.mark.slow
def test_the_page_is_up_to_date():
    assert table.make_table() in table.PAGE.read_text(), "run python scripts/make_models_table.py"


def test_every_type_without_a_family_is_listed_with_the_reason():
    """Of transformers' causal language models."""
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    page = table.PAGE.read_text()
    rows = page[page.index("<!-- others -->") : page.index("<!-- end others -->")].splitlines()
    listed = [name for row in rows[3:] for name in re.findall(r"`([^`]*)`", row.split("|")[2])]
    names = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert sorted(listed) == sorted(t for t, name in names.items() if name not in ARCHITECTURES)


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_has_these_classes():
    python = os.environ.get("JAXTRAIN_VLLM_PYTHON")
    if not python:
        pytest.skip("JAXTRAIN_VLLM_PYTHON does not name the Python of an environment with vLLM")
    code = (
        "import json; from vllm.model_executor.models.registry import ModelRegistry as R;"
        "print('found', json.dumps(sorted(R.get_supported_archs())))"
    )
    out = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in out.splitlines() if line.startswith("found ")]
    served = set(json.loads(line.removeprefix("found ")))
    assert set(ARCHITECTURES) - served - table.UNASKED == table.NOT_IN_VLLM
