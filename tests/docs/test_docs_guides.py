"""docs/guides.md is generated, and its commands are ones that the families' models take."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from jaxtrain.cli.models import list_families
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.main import main

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import make_guides as guides

SIZES = {"vocab_size": 512, "max_position_embeddings": 512, "eos_token_id": 1, "pad_token_id": 0}
WIDE = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 64),
    **dict.fromkeys(("head_dim", "kv_lora_rank", "q_lora_rank", "v_head_dim"), 64),
}
"""Widths of models in 4 bits, whose blocks have 64 inputs."""
LENGTHS = ["data.sequence_len=256", "data.num_workers=0"]


def test_the_page_is_up_to_date():
    assert guides.PAGE.read_text() == guides.render_page(), "run python scripts/make_guides.py"


@pytest.mark.thorough
@pytest.mark.parametrize("guide", guides.GUIDES, ids=lambda guide: guide.family)
def test_a_command_works_on_a_tiny_model(guide, tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch", reason="the tiny configs lie beside tests that need torch")
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "models")
    monkeypatch.chdir(tmp_path)
    from test_models_families import FAMILIES
    from tiny_models import HYBRID, RAW
    from tiny_models import SIZES as TINY

    tiny = {**FAMILIES, **HYBRID, **RAW}
    named = (raw for raw in tiny.values() if raw.get("model_type") == guide.family)
    raw = {**TINY, **(tiny.get(guide.family) or next(named)), **SIZES}
    if guide.config in ("qlora_qwen3_moe", "lora_gpt_oss"):
        raw |= {key: size for key, size in WIDE.items() if key in raw}
    known = next(
        f
        for f in list_families()
        if f["family"] in (guide.family, guide.family.removesuffix("_text"))
    )
    raw["architectures"] = known["architectures"][:1]
    (tmp_path / "model").mkdir()
    load_tokenizer("builtin").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw))
    chat = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    (tmp_path / "train.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 64)
    words = shlex.split(guides.write_command(guide))[1:]
    words = [guide.config if word.startswith("configs/") else word for word in words]
    words = ["model.path=model" if word.startswith("model.path=") else word for word in words]
    assert main([*words, *LENGTHS, "model.init=random", "--dry-run"]) == 0
    assert "dry run: nothing was allocated" in capsys.readouterr().out
