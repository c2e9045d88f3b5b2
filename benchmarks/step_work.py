"""Shapes of models and rows of tokens that training steps are measured on. No framework.

Works: an agent's tree of 7,889 or 31,972 packed tokens (20 or 28 leaves), and a row of packed
documents of unequal length. All tokens train but the first of each tree or document.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtrain_kernels.testing import agent_tree, documents

from jaxtrain.batch import Batch
from jaxtrain.data.packing.branches import list_branches
from jaxtrain.data.packing.pack import build_batch, fit_rows, lay_out, stack_batches
from jaxtrain.data.packing.tree import Tree, build_tree, chain


def _qwen3(hidden: int, ffn: int, layers: int, heads: int, *, tied: bool, **second) -> dict:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "initializer_range": 0.02,
    } | second


def _qwen3_5(hidden: int, ffn: int, layers: int, heads: tuple[int, int], **second) -> dict:
    """The text of a Qwen3.5 with (key, value) heads of linear attention."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "linear_num_key_heads": heads[0],
        "linear_num_value_heads": heads[1],
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
        },
    } | second


def _qwen3_moe(hidden: int, ffn: int, layers: int, heads: int, **second) -> dict:
    """ffn: of an expert."""
    return _qwen3(hidden, 3 * hidden, layers, heads, tied=False) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": ffn,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "rope_theta": 1000000.0,
        **second,
    }


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "attention_bias": True,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
"""gpt-oss-20b."""

TINY_EXPERTS = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
}
TINY_HYBRID = {
    "vocab_size": 512,
    "num_attention_heads": 4,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}

MODELS: dict[str, dict[str, Any]] = {
    "tiny": _qwen3(64, 128, 2, 4, tied=True, vocab_size=512, num_key_value_heads=2, head_dim=16),
    "tiny-hybrid": _qwen3_5(64, 128, 4, (2, 4), **TINY_HYBRID),
    "tiny-moe": _qwen3_moe(64, 64, 2, 4, num_experts=8, num_experts_per_tok=2, **TINY_EXPERTS),
    "tiny-gpt-oss": GPT_OSS
    | TINY_EXPERTS
    | {
        "intermediate_size": 64,
        "num_local_experts": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.041666666666666664,
    },
    "qwen3-moe-0.9b": _qwen3_moe(1024, 384, 12, 16, num_experts=32, num_experts_per_tok=4),
    "qwen3-30b-a3b": _qwen3_moe(2048, 768, 48, 32),
    "gpt-oss-20b": GPT_OSS,
    "qwen3.5-0.8b": _qwen3_5(1024, 3584, 24, (16, 16)),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    },
}
"""config.json of each, by name."""


@dataclasses.dataclass(frozen=True)
class Work:
    """A row's forest; every row of a step has other tokens in the same forest."""

    forest: Callable[[], list[tuple[int, int]]]
    """(size, parent) of its nodes."""
    row: int
    """T of a row, padding included."""

    def trees(self, vocabulary: int, seed: int = 0) -> list[Tree]:
        """The trees of one row with random tokens."""
        rng = np.random.default_rng(seed)
        trees: list[list] = []
        first = 0
        for index, (size, parent) in enumerate(self.forest()):
            if parent < 0:
                trees.append([])
                first = index
            tokens = rng.integers(0, vocabulary, size).astype(np.int32)
            trees[-1].append((parent - first if parent >= 0 else -1, tokens, np.ones(size), ""))
        return [build_tree(parts) for parts in trees]

    def batch(self, vocabulary: int, rows: int = 1, microsteps: int = 1) -> Batch:
        """Batch [A, B, T]."""
        seeds = iter(range(rows * microsteps))
        micro = [
            [self.trees(vocabulary, next(seeds)) for _ in range(rows)] for _ in range(microsteps)
        ]
        return stack_batches(
            [build_batch([[lay_out(t) for t in row] for row in rows], self.row) for rows in micro]
        )

    def packed_branches(self, vocabulary: int, length: int = 8192) -> Batch:
        """Batch [A, 1, length]: every branch of one row alone, first-fit-decreasing into rows."""
        branches = [
            chain(b.tokens, {name: w / tree.num_branches for name, w in b.weights.items()})
            for tree in self.trees(vocabulary)
            for b in list_branches(tree)
        ]
        length = max(length if self.row > 1024 else self.row, *(b.num_tokens for b in branches))
        rows = fit_rows([branch.num_tokens for branch in branches], length)
        return stack_batches(
            [build_batch([[lay_out(branches[i]) for i in row]], length) for row in rows]
        )


def one_document(length: int) -> Work:
    """Return rows of one document."""
    return Work(lambda: documents([length]), length)


WORKS: dict[str, Work] = {
    "tiny-tree": Work(lambda: agent_tree(4, 24, 10), 256),
    "tiny-docs": Work(lambda: documents([100, 30, 60, 17]), 256),
    "tiny-doc": one_document(64),
    "tiny-doc16": one_document(16),
    "doc512": one_document(512),
    **{f"doc{n}k": one_document(1024 * n) for n in (2, 4, 8, 16, 128, 1024)},
    "tree2k": Work(lambda: agent_tree(10, 165, 35), 2048),
    "tree8k": Work(lambda: agent_tree(20, 330, 70), 7936),
    "tree32k": Work(lambda: agent_tree(28, 1000, 170), 32000),
    "docs8k": Work(lambda: documents([2900, 410, 1290, 160, 730, 1980, 90, 620]), 8192),
}


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A tokenizer whose words are w2, w3, ...; 0 is padding and 1 the end."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>"] + [f"w{i}" for i in range(2, vocabulary)]
    level = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>")
    tokenizer = Tokenizer(level)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)
