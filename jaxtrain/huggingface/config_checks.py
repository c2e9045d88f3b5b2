"""Checks of a config.json: the type of every attribute, and the range of every size.

They run before transformers' config class, which accepts any value and may build any number of
layers.
"""

import json
import math
import types
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import describe, spell

TASK = "jaxtrain_task"
"""Attribute with the keys of the section task of the method that reads the folder."""
KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id", "use_cache", TASK)
"""Attributes that do not affect the network; carried along for export."""
SIZES = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "moe_intermediate_size": 2**22,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "num_experts": 2**14,
    "num_local_experts": 2**14,
    "num_experts_per_tok": 2**14,
    "n_routed_experts": 2**14,
    "n_shared_experts": 2**8,
    "moe_num_experts": 2**14,
    "moe_num_shared_experts": 2**8,
    "moe_k": 2**14,
    "moe_topk": 2**14,
    "n_group": 2**14,
    "topk_group": 2**14,
    "shared_intermediate_size": 2**22,
    "moe_shared_expert_intermediate_size": 2**22,
    "moe_latent_size": 2**20,
    "mamba_num_heads": 2**14,
    "mamba_n_heads": 2**14,
    "mamba_head_dim": 2**14,
    "mamba_d_head": 2**14,
    "n_groups": 2**14,
    "mamba_n_groups": 2**14,
    "ssm_state_size": 2**14,
    "mamba_d_state": 2**14,
    "attn_layer_period": 2**12,
    "expert_layer_period": 2**12,
    "mamba_dt_rank": 2**20,
    "mamba_expand": 2**8,
    "conv_kernel": 2**8,
    "mamba_d_conv": 2**8,
    "conv_L_cache": 2**8,
    "q_lora_rank": 2**20,
    "kv_lora_rank": 2**20,
    "qk_nope_head_dim": 2**14,
    "qk_rope_head_dim": 2**14,
    "v_head_dim": 2**14,
    "max_position_embeddings": 2**31 - 1,
    "query_pre_attn_scalar": 2**20,
}
"""At least 1, and at most this: far beyond any model, but no number that only hangs."""
FROM_ZERO = (
    *("num_experts", "num_local_experts", "num_experts_per_tok"),
    *("n_shared_experts", "moe_num_shared_experts", "shared_intermediate_size"),
)
"""Of these, 0 where a family may have none; the others refuse that themselves."""
MAX_PARAMETERS = 2**45
MAX_ENTRIES = 2**14
"""Limit of a list."""
CONTRADICTIONS: dict[str, dict[Any, str]] = {
    "is_encoder_decoder": {True: "only decoders are read"},
    "add_cross_attention": {True: "only decoders without cross attention are read"},
    "alibi": {True: "positions are rotated"},
    "position_embedding_type": dict.fromkeys(
        ("alibi", "absolute", "relative_key", "relative_key_query"), "positions are rotated"
    ),
}
"""Values that no decoder here computes, whether transformers looks at the key or not."""
DTYPES = (
    *("float32", "bfloat16", "float16", "float64", "auto", "float", "half", "double"),
    *("float8_e4m3fn", "float8_e5m2", "int8", "uint8"),
)
"""Allowed names of dtypes, as in torch."""
FRACTIONS = {
    "rms_norm_eps": (0.0, 1.0),
    "layer_norm_epsilon": (0.0, 1.0),
    "initializer_range": (0.0, 100.0),
    "attn_logit_softcapping": (1e-3, 1e6),
    "final_logit_softcapping": (1e-3, 1e6),
}


def check_names(raw: Any, source: str = "config.json") -> tuple[list[str], str | None]:
    """Return (architectures, model_type) of the content of a config.json; UserError for other
    content."""
    if not isinstance(raw, Mapping):
        raise UserError(f"{source} holds {describe(raw)}, not an object")
    named, model_type = raw.get("architectures"), raw.get("model_type")
    if named is not None and not (
        isinstance(named, list) and all(isinstance(name, str) and len(name) < 200 for name in named)
    ):
        raise UserError(
            f"{source}: architectures is {describe(named)}; it is a list of names, such as"
            ' ["Qwen3ForCausalLM"]'
        )
    if model_type is not None and not isinstance(model_type, str):
        raise UserError(f"{source}: model_type is {describe(model_type)}; it is a name")
    for key in ("dtype", "torch_dtype"):
        dtype = raw.get(key)
        name = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
        if name is not None and not isinstance(name, dict) and name not in DTYPES:
            raise UserError(
                f"{source}: {key} is {describe(dtype)}; it is one of {', '.join(DTYPES)}"
            )
    return named or [], model_type


def check_value(key: str, value: Any, hint: Any) -> None:
    """Raise UserError if an attribute has not the type of its field, or is an impossible size."""
    kinds = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind = next((k for k in kinds if k is not type(None)), hint)
    if kind is int:
        low, high = (int(key not in FROM_ZERO), SIZES[key]) if key in SIZES else (0, 2**31 - 1)
        fits, allowed = (
            type(value) is int and low <= value <= high,
            f"a number from {low} to {high}",
        )
    elif kind is float:
        low, high = FRACTIONS.get(key, (-1e6, 1e6))
        fits = is_number(value) and low <= value <= high
        allowed = f"a number from {low:g} to {high:g}"
    elif kind is bool:
        fits, allowed = type(value) is bool, "true or false"
    elif kind is str:
        fits, allowed = isinstance(value, str), "a text"
    elif get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        same = isinstance(value, list) and all(
            type(item) is inner or (inner is float and is_number(item)) for item in value
        )
        fits = same and len(value) <= MAX_ENTRIES
        allowed = f"a list of at most {MAX_ENTRIES} {'texts' if inner is str else 'numbers'}"
    else:  # a family from outside checks its own
        return
    if not fits:
        raise UserError(f"config.json: {key} is {describe(value)}; it must be {allowed}")


def find_contradictions(raw: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Return a clause for each value that contradicts what is computed: one that `fixed` does not
    list (an empty list allows any), or one of CONTRADICTIONS."""
    problems = []
    for key, allowed in fixed.items():
        if allowed and raw[key] is not None and raw[key] not in allowed:
            only = " or ".join(map(json.dumps, allowed))
            problems.append(f"{key}={describe(raw[key])} is not supported; only {only} is")
    for key, values in CONTRADICTIONS.items():
        if key not in fixed and raw.get(key) in values:
            problems.append(f"{key}={describe(raw[key])} is not supported; {values[raw[key]]}")
    return problems


def is_off(value: Any) -> bool:
    """Return whether a value switches off what it names: 0, false and null."""
    return value is None or value is False or (is_number(value) and value == 0)


def check_total(values: Mapping[str, Any]) -> None:
    """Raise UserError if the sizes are possible one by one, but not together."""

    def size(name: str, default: int) -> int:
        value = values.get(name)
        return default if value is None else value

    width, heads = size("hidden_size", 1), size("num_attention_heads", 1)
    inner = size("moe_intermediate_size", size("intermediate_size", 1))
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    experts = max(size(name, 1) for name in names)
    layer = width * (4 * heads * size("head_dim", max(width // heads, 1)) + 3 * inner * experts)
    total = size("num_hidden_layers", 1) * layer + 2 * size("vocab_size", 1) * width
    if total > MAX_PARAMETERS:
        raise UserError(
            f"config.json describes about {total:.1e} parameters (hidden_size={width},"
            f" num_hidden_layers={size('num_hidden_layers', 1)}, intermediate size {inner}); at"
            f" most {MAX_PARAMETERS:.1e} are taken for a model"
        )


def check_rope(raw: Mapping[str, Any], by_kind: bool = False) -> None:
    """Raise UserError unless rope attributes are numbers, texts and switches; by_kind: each kind of
    layer may have its own."""
    for key in ROPE_NUMBERS & raw.keys():
        if raw[key] is not None:
            _check_rope_value(key, raw[key])
    for name in ("rope_scaling", "rope_parameters"):
        table = raw.get(name)
        if table is not None:
            _check_rope_table(name, table, by_kind)


def _check_rope_table(name: str, table: Any, by_kind: bool) -> None:
    if not isinstance(table, Mapping) or len(table) > 100:
        raise UserError(f"config.json: {name} is {describe(table)}; it is an object or null")
    for key, value in table.items():
        if isinstance(value, Mapping):
            if not by_kind:
                raise UserError(
                    f"config.json: {name}.{spell(key)} is {describe(value)}; positions that differ"
                    " by kind of layer are not supported"
                )
            _check_rope_table(f"{name}.{spell(key)}", value, False)
        elif value is not None:
            _check_rope_value(key, value, f"{name}.")
    low, high = table.get("low_freq_factor"), table.get("high_freq_factor")
    if low is not None and high is not None and low > high:
        raise UserError(
            f"config.json: {name}.high_freq_factor={high} must be at least low_freq_factor={low}"
        )


def _check_rope_value(key: str, value: Any, prefix: str = "") -> None:
    name = f"config.json: {prefix}{spell(key)}"
    if key in ("rope_type", "type"):
        if not isinstance(value, str):
            raise UserError(f"{name} is {describe(value)}; it is a name")
    elif key == "truncate":
        if not isinstance(value, bool):
            raise UserError(f"{name} is {describe(value)}; it is true or false")
    elif key in ("short_factor", "long_factor"):
        fits = isinstance(value, list | tuple) and len(value) <= MAX_ENTRIES
        if not fits or not all(is_number(item) and 0 < item <= 1e15 for item in value):
            raise UserError(f"{name} is {describe(value)}; it must be a list of numbers above 0")
    elif key in ROPE_NUMBERS:
        low = 1.0 if key == "rope_theta" else 0.0
        nothing = key == "llama_4_scaling_beta" and value == 0
        if not is_number(value) or not (low < value <= 1e15 or nothing):
            raise UserError(f"{name} is {describe(value)}; it must be a number above {low:g}")
        if key in ROPE_LENGTHS and value < 1:
            raise UserError(f"{name} is {describe(value)}; it must be at least 1")


def check_kept(raw: Mapping[str, Any]) -> None:
    """Raise UserError if a carried attribute, such as a token id, has the wrong type."""
    for key in KEPT:
        value = raw.get(key)
        if key == "use_cache":
            fits, allowed = value is None or isinstance(value, bool), "true or false"
        elif key == TASK:
            fits, allowed = value is None or isinstance(value, dict), "a table of keys"
        else:
            ids = value if isinstance(value, list) else [] if value is None else [value]
            fits = all(type(item) is int and abs(item) < 2**31 for item in ids)
            fits, allowed = fits and len(ids) <= MAX_ENTRIES, "a number, a list of numbers or null"
        if not fits:
            raise UserError(f"config.json: {key} is {describe(value)}; it must be {allowed}")


ROPE_LENGTHS = ("factor", "original_max_position_embeddings")
ROPE_NUMBERS = {
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "partial_rotary_factor", "alpha", "llama_4_scaling_beta"),
    "rope_local_base_freq",
}


def is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def allows_none(hint: Any) -> bool:
    return hint is None or type(None) in get_args(hint)
