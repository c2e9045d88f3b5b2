"""Task sft shares prefixes where the model's layers follow trees, and says where they do not."""

from pathlib import Path

import pytest

from jaxtrain.config import Config
from jaxtrain.data.packing.tree import Tree
from jaxtrain.data.sample import Sample
from jaxtrain.methods.sft import method as sft

QWEN3 = str(Path(__file__).parents[1] / "data" / "qwen3.jinja")
TALK = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "B"},
]


@pytest.mark.parametrize(("share", "follows"), [(True, True), (True, False), (False, True)])
def test_sharing_is_the_default_for_models_that_follow_trees(share, follows, monkeypatch):
    config = Config.model_validate(
        {
            "run": {"max_steps": 1},
            "model": {
                "architecture": {
                    "model_type": "qwen3",
                    "architectures": ["Qwen3ForCausalLM"],
                    "vocab_size": 512,
                    "hidden_size": 16,
                    "intermediate_size": 24,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 1,
                    "head_dim": 8,
                    "max_position_embeddings": 4096,
                },
                "tokenizer": "builtin",
                "chat_template": QWEN3,
            },
            "data": {
                "datasets": [{"path": "x"}],
                "share_prefixes": share,
                "packing": False,
            },
        }
    )
    monkeypatch.setattr(sft, "follows_trees", lambda architecture: follows)
    data = sft.make(config).data
    assert ("do not follow trees" in data.note) is (share and not follows)
    tokenize = data.recipe.open(
        config.data.datasets[0].model_copy(update={"path": "builtin:calculator"})
    ).tokenize
    kinds = [type(item) for item in tokenize({"messages": TALK}, "x")]
    assert kinds == ([Tree] if share and follows else [Sample, Sample])
