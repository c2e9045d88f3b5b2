"""Model families, by the architecture name of config.json.

A module here has `Config` (from_hf, to_hf), `Model` (a Decoder that makes its blocks) and
`names(config)`; `build.py` makes, loads and saves models of any of them. Modules of other packages
do the same: by entry point in group jaxtrain.models, named as the architecture, or by model.family.
"""

ARCHITECTURES = {
    "Gemma3ForCausalLM": "jaxtrain.models.gemma3",
    "Gemma3ForConditionalGeneration": "jaxtrain.models.gemma3",
    "DeepseekV2ForCausalLM": "jaxtrain.models.deepseek_v2",
    "DeepseekV3ForCausalLM": "jaxtrain.models.deepseek_v3",
    "Glm4MoeLiteForCausalLM": "jaxtrain.models.glm4_moe_lite",
    "GraniteMoeHybridForCausalLM": "jaxtrain.models.granitemoehybrid",
    "LlamaForCausalLM": "jaxtrain.models.llama",
    "MistralForCausalLM": "jaxtrain.models.mistral",
    "MixtralForCausalLM": "jaxtrain.models.mixtral",
    "NemotronHForCausalLM": "jaxtrain.models.nemotron_h",
    "Qwen2ForCausalLM": "jaxtrain.models.qwen2",
    "Qwen3ForCausalLM": "jaxtrain.models.qwen3",
    "Qwen3NextForCausalLM": "jaxtrain.models.qwen3_next",
    "Qwen3_5ForCausalLM": "jaxtrain.models.qwen3_5",
    "Qwen3_5ForConditionalGeneration": "jaxtrain.models.qwen3_5",
    "Qwen3_5MoeForCausalLM": "jaxtrain.models.qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "jaxtrain.models.qwen3_5_moe",
    "Qwen3MoeForCausalLM": "jaxtrain.models.qwen3_moe",
}
"""The built-in ones, imported when a config.json names them."""

DRAFTS: dict[str, str] = {
    "DFlashDraftModel": "jaxtrain.models.dflash",
    "LlamaForCausalLMEagle3": "jaxtrain.models.eagle3",
}
"""Families of draft models (models/draft.py), which stand beside a target and write nothing alone.
"""
