"""Model families, by the architecture name of config.json.

A module here has `Config` (from_hf, to_hf), `Model` (a Decoder that makes its blocks) and
`names(config)`; `build.py` makes, loads and saves models of any of them.
"""

from types import ModuleType

from jaxtrain.models import llama, mistral, mixtral, qwen2, qwen3, qwen3_moe

ARCHITECTURES: dict[str, ModuleType] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
}
