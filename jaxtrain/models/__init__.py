"""Model families, by the architecture name of config.json.

A module here has `Config` (from_hf, to_hf), `Model` (a Decoder that makes its blocks) and
`names(config)`. For all of them `families.py` reads configs, `build.py` draws random models,
`loading.py` and `saving.py` read and write folders. Families of other packages are found by entry
point in group jaxtrain.models, named as the architecture, or by model.family.
"""

ARCHITECTURES = {
    "AfmoeForCausalLM": "jaxtrain.models.afmoe",
    "ArceeForCausalLM": "jaxtrain.models.arcee",
    "Cohere2ForCausalLM": "jaxtrain.models.cohere2",
    "CohereForCausalLM": "jaxtrain.models.cohere",
    "DeepseekV2ForCausalLM": "jaxtrain.models.deepseek_v2",
    "DeepseekV32ForCausalLM": "jaxtrain.models.deepseek_v32",
    "DeepseekV3ForCausalLM": "jaxtrain.models.deepseek_v3",
    "Dots1ForCausalLM": "jaxtrain.models.dots1",
    "Ernie4_5ForCausalLM": "jaxtrain.models.ernie4_5",
    "Ernie4_5_MoeForCausalLM": "jaxtrain.models.ernie4_5_moe",
    "Exaone4ForCausalLM": "jaxtrain.models.exaone4",
    "Gemma2ForCausalLM": "jaxtrain.models.gemma2",
    "Gemma3ForCausalLM": "jaxtrain.models.gemma3",
    "Gemma3ForConditionalGeneration": "jaxtrain.models.gemma3",
    "Gemma4ForCausalLM": "jaxtrain.models.gemma4",
    "Gemma4ForConditionalGeneration": "jaxtrain.models.gemma4",
    "GemmaForCausalLM": "jaxtrain.models.gemma",
    "Glm4ForCausalLM": "jaxtrain.models.glm4",
    "Glm4MoeForCausalLM": "jaxtrain.models.glm4_moe",
    "Glm4MoeLiteForCausalLM": "jaxtrain.models.glm4_moe_lite",
    "GlmForCausalLM": "jaxtrain.models.glm",
    "GlmMoeDsaForCausalLM": "jaxtrain.models.glm_moe_dsa",
    "GptOssForCausalLM": "jaxtrain.models.gpt_oss",
    "GraniteForCausalLM": "jaxtrain.models.granite",
    "GraniteMoeForCausalLM": "jaxtrain.models.granitemoe",
    "GraniteMoeHybridForCausalLM": "jaxtrain.models.granitemoehybrid",
    "GraniteMoeSharedForCausalLM": "jaxtrain.models.granitemoeshared",
    "GraniteSWAForCausalLM": "jaxtrain.models.granite_swa",
    "HeliumForCausalLM": "jaxtrain.models.helium",
    "HunYuanDenseV1ForCausalLM": "jaxtrain.models.hunyuan_v1_dense",
    "HunYuanMoEV1ForCausalLM": "jaxtrain.models.hunyuan_v1_moe",
    "HyperCLOVAXForCausalLM": "jaxtrain.models.hyperclovax",
    "Idefics3ForConditionalGeneration": "jaxtrain.models.idefics3",
    "Jais2ForCausalLM": "jaxtrain.models.jais2",
    "Lfm2MoeForCausalLM": "jaxtrain.models.lfm2_moe",
    "LlamaForCausalLM": "jaxtrain.models.llama",
    "MiniMaxM2ForCausalLM": "jaxtrain.models.minimax_m2",
    "Ministral3ForCausalLM": "jaxtrain.models.ministral3",
    "MinistralForCausalLM": "jaxtrain.models.ministral",
    "Mistral3ForConditionalGeneration": "jaxtrain.models.mistral",
    "Mistral4ForCausalLM": "jaxtrain.models.mistral4",
    "MistralForCausalLM": "jaxtrain.models.mistral",
    "MixtralForCausalLM": "jaxtrain.models.mixtral",
    "NemotronForCausalLM": "jaxtrain.models.nemotron",
    "NemotronHForCausalLM": "jaxtrain.models.nemotron_h",
    "Olmo2ForCausalLM": "jaxtrain.models.olmo2",
    "Olmo3ForCausalLM": "jaxtrain.models.olmo3",
    "OlmoForCausalLM": "jaxtrain.models.olmo",
    "OlmoeForCausalLM": "jaxtrain.models.olmoe",
    "Phi3ForCausalLM": "jaxtrain.models.phi3",
    "Qwen2ForCausalLM": "jaxtrain.models.qwen2",
    "Qwen2MoeForCausalLM": "jaxtrain.models.qwen2_moe",
    "Qwen3ForCausalLM": "jaxtrain.models.qwen3",
    "Qwen3MoeForCausalLM": "jaxtrain.models.qwen3_moe",
    "Qwen3NextForCausalLM": "jaxtrain.models.qwen3_next",
    "Qwen3VLForConditionalGeneration": "jaxtrain.models.qwen3_vl",
    "Qwen3_5ForCausalLM": "jaxtrain.models.qwen3_5",
    "Qwen3_5ForConditionalGeneration": "jaxtrain.models.qwen3_5",
    "Qwen3_5MoeForCausalLM": "jaxtrain.models.qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "jaxtrain.models.qwen3_5_moe",
    "SeedOssForCausalLM": "jaxtrain.models.seed_oss",
    "SmolVLMForConditionalGeneration": "jaxtrain.models.smolvlm",
    "SmolLM3ForCausalLM": "jaxtrain.models.smollm3",
    "SolarOpenForCausalLM": "jaxtrain.models.solar_open",
    "StableLmForCausalLM": "jaxtrain.models.stablelm",
    "Starcoder2ForCausalLM": "jaxtrain.models.starcoder2",
    "VaultGemmaForCausalLM": "jaxtrain.models.vaultgemma",
}
"""The built-in ones, imported when a config.json names them."""

TEXTS: dict[tuple[str, str], str] = {
    ("Mistral3ForConditionalGeneration", "ministral3"): "jaxtrain.models.ministral3",
    ("Mistral3ForConditionalGeneration", "mistral4"): "jaxtrain.models.mistral4",
}
"""Of architectures around several texts, those whose text_config.model_type is another one."""

DRAFTS: dict[str, str] = {
    "DFlashDraftModel": "jaxtrain.models.dflash",
    "LlamaForCausalLMEagle3": "jaxtrain.models.eagle3",
}
"""Families of draft models (models/draft.py), which stand beside a target and write nothing alone.
"""
