"""The tensor names that Hugging Face's dense decoders share."""

from jaxtrain.hf.ops import Entry, Op, Stack, Tensor, Transpose
from jaxtrain.models.decoder import DecoderConfig


def decoder_names(
    config: DecoderConfig,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> list[Entry]:
    """Entries of every parameter of a `Decoder` with a `PreNormBlock`."""

    def layers(param: str, name: str, transpose: bool = False) -> Entry:
        tensors: list[Op] = [
            Tensor(f"model.layers.{layer}.{name}") for layer in range(config.num_hidden_layers)
        ]
        ops = [Transpose(tensor) for tensor in tensors] if transpose else tensors
        return Entry(f"stack.block.{param}", Stack(tuple(ops)))

    def linear(param: str, name: str, bias: bool) -> list[Entry]:
        kernel = layers(f"{param}.kernel", f"{name}.weight", transpose=True)
        return [kernel, layers(f"{param}.bias", f"{name}.bias")] if bias else [kernel]

    entries = [
        Entry("embed.embedding", Tensor("model.embed_tokens.weight")),
        Entry("norm.scale", Tensor("model.norm.weight")),
        layers("attention_norm.scale", "input_layernorm.weight"),
        layers("mlp_norm.scale", "post_attention_layernorm.weight"),
        *linear("attention.q", "self_attn.q_proj", qkv_bias),
        *linear("attention.k", "self_attn.k_proj", qkv_bias),
        *linear("attention.v", "self_attn.v_proj", qkv_bias),
        *linear("attention.out", "self_attn.o_proj", out_bias),
        *linear("mlp.gate", "mlp.gate_proj", mlp_bias),
        *linear("mlp.up", "mlp.up_proj", mlp_bias),
        *linear("mlp.down", "mlp.down_proj", mlp_bias),
    ]
    if qk_norm:
        entries.append(layers("attention.q_norm.scale", "self_attn.q_norm.weight"))
        entries.append(layers("attention.k_norm.scale", "self_attn.k_norm.weight"))
    if not config.tie_word_embeddings:
        entries.append(Entry("lm_head.embedding", Tensor("lm_head.weight")))
    return entries
