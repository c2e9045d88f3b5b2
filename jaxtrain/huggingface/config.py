"""Convert config.json to a frozen dataclass and back.

An attribute that no field of the family reads is refused if transformers computes with it, and
carried along if transformers does not know it. transformers' config class fills in missing
attributes and converts old spellings (`rope_theta`, `rope_scaling`) and the new one
(`rope_parameters`) to one form, so defaults are always those of transformers.
"""

import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from jaxtrain.errors import UserError
from jaxtrain.huggingface.config_checks import (
    KEPT,
    allows_none,
    check_kept,
    check_rope,
    check_total,
    check_value,
    find_contradictions,
    is_number,
    is_off,
)
from jaxtrain.huggingface.files import shorten, spell

IGNORED = {
    *KEPT,
    *("_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path"),
    *("architectures", "model_type", "tokenizer_class", "transformers_version"),
    *("auto_map", "is_llama_config", "transformers.js_config"),
    *("unsloth_fixed", "unsloth_version"),
    *(
        "dtype",
        "torch_dtype",
        "gradient_checkpointing",
        "pretraining_tp",
        "chunk_size_feed_forward",
    ),
    # Intended use and sampling defaults.
    *("id2label", "label2id", "num_labels", "problem_type", "task_specific_params"),
    *("output_attentions", "output_hidden_states", "return_dict", "torchscript"),
    *("do_sample", "max_length", "max_new_tokens", "num_beams", "repetition_penalty"),
    *("temperature", "top_k", "top_p", "typical_p"),
}
"""Neither these nor KEPT change what the network computes."""
TRAINING_NOISE = re.compile(r".*(dropout|_pdrop|_dropout_prob|jitter_noise)")
"""Used by transformers in training only; evaluation is unaffected, and jaxtrain does not use it."""

NOT_ATTRIBUTES = {
    *("rope", "carried_attributes", "fixed_attributes", "unread_attributes"),
    *("grown", "row_tokens", "score", "around", "prefix", "fused_experts"),
    *("vision", "transposed_experts", "tower_prefix", "one_level", "mtp", "resaved"),
}
"""Fields of the dataclass that are no attributes of a config.json."""
ROPE = {"rope_theta", "rope_scaling", "rope_parameters"}
OLD_ROPE = {"partial_rotary_factor", "rope_local_base_freq"}
"""Keys of older files besides rope_scaling, for families that read them."""
READ = re.compile(r"""\bconfig\.(\w+)|getattr\((?:self\.)?config, ["'](\w+)""")
"""An attribute that a modeling file of transformers reads."""
TAKEN = re.compile(r"""kwargs\.(?:pop|get)\(["'](\w+)""")
"""An argument that a config class takes without naming it."""


def hf_defaults(model_type: str) -> dict[str, Any]:
    """Return all attributes of transformers' config class of that type, at their defaults."""
    return _config_class(model_type)().to_dict()


def read_fields(cls: type, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments for the dataclass `cls` from the content of a config.json.

    Every field of `cls` except NOT_ATTRIBUTES is named as in config.json, or by `cls.renamed`.
    Raises one UserError for all attributes that are not fields, are known to transformers and
    differ from its default; unknown ones become `unread_attributes`. `cls.rope_keys`: keys of
    rope_parameters that the family reads besides those of their type. `cls.fixed`: see
    DecoderConfig.
    """
    model_type = getattr(cls, "text_type", cls.model_type)
    positions = ROPE | OLD_ROPE & {*getattr(cls, "rope_keys", ())}
    by_kind = getattr(cls, "rope_by_kind", False)
    hints = get_type_hints(cls)
    hints |= {attribute: hints[field_name] for field_name, attribute in cls.renamed.items()}
    names = {field.name for field in dataclasses.fields(cls)} - NOT_ATTRIBUTES
    names = {cls.renamed.get(name, name) for name in names}
    defaults = hf_defaults(model_type)
    raw = _resolve_aliases(raw, _config_class(model_type).attribute_map, names)
    accepted = names | IGNORED | positions
    fixed = {key: v for key, v in getattr(cls, "fixed", {}).items() if key not in names}
    fixed_values = {key: raw[key] for key in raw if key in fixed}
    unread = {key: raw[key] for key in raw if key not in accepted and key not in fixed}
    problems = find_contradictions(raw, {k: v for k, v in fixed.items() if k in raw})
    problems += [
        f"{spell(key)}={shorten(value)} is not supported for model_type {spell(model_type)!r},"
        f" whose network transformers changes by it; {_describe_default(key, defaults)}"
        for key, value in unread.items()
        if key in read_attributes(model_type) and not _is_default(key, value, defaults)
    ]
    if problems:
        raise UserError("config.json: " + "\n  and ".join(problems))
    unread = {key: v for key, v in unread.items() if key not in read_attributes(model_type)}
    for name in names & set(raw):
        if raw[name] is not None:
            check_value(name, raw[name], hints[name])
    check_rope(raw, by_kind)
    check_kept(raw)
    used = {key: raw[key] for key in raw if key in names or key in positions or key in KEPT}
    try:
        full = _config_class(model_type).from_dict(json.loads(json.dumps(used))).to_dict()
        stated = full.get("rope_parameters") or {}
        rope = {key: value for key, value in stated.items() if value is not None}
    except Exception as error:  # transformers checks as it likes
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"config.json ({model_type}): {reason[:500]}") from error
    if by_kind and not all(isinstance(value, dict) for value in rope.values()):
        raise UserError(
            f"config.json ({model_type}): rope_parameters must hold an object for each kind of"
            ' layer, such as "full_attention"; it holds numbers and names for all'
        )
    values = {name: _freeze(full[name]) for name in names if name in full}
    for name, value in values.items():
        if not (value is None and allows_none(hints[name])):
            check_value(name, _thaw(value), hints[name])
    check_total(values)
    check_rope({"rope_parameters": rope}, by_kind)
    values |= {
        field_name: values.pop(attribute)
        for field_name, attribute in cls.renamed.items()
        if attribute in values
    }
    values["rope"] = tuple(sorted((key, _freeze(value)) for key, value in rope.items()))
    values["fixed_attributes"] = tuple(
        (key, json.dumps(value)) for key, value in sorted(fixed_values.items())
    )
    values["carried_attributes"] = tuple((key, json.dumps(raw[key])) for key in KEPT if key in raw)
    values["unread_attributes"] = tuple((key, json.dumps(unread[key])) for key in sorted(unread))
    return values


def _resolve_aliases(
    raw: Mapping[str, Any], aliases: Mapping[str, str], names: set[str]
) -> dict[str, Any]:
    """Return a config.json in which other names that transformers takes for a field of the family
    are replaced by it, where it is not there itself."""
    renames = {
        key: aliases[key]
        for key in raw
        if key not in names and aliases.get(key) in names and raw.get(aliases[key]) is None
    }
    unrenamed = {key: value for key, value in raw.items() if key not in renames.values()}
    return {renames.get(key, key): value for key, value in unrenamed.items()}


@functools.lru_cache(maxsize=64)
def read_attributes(model_type: str) -> frozenset[str]:
    """Return the attributes of a config.json that transformers knows for a model_type: those of its
    config class, their aliases, and those that the files of its network read."""
    config_class = _config_class(model_type)
    names = {*hf_defaults(model_type), *config_class.attribute_map, *ROPE, "partial_rotary_factor"}
    names |= {name for kind in config_class.__mro__ for name in inspect.get_annotations(kind)}
    file = Path(inspect.getfile(config_class))
    for source in (file, *file.parent.glob("modeling_*.py")):
        pattern = TAKEN if source == file else READ
        matches = pattern.finditer(source.read_text(encoding="utf-8"))
        names |= {match[match.lastindex or 0] for match in matches}
    return frozenset(names)


def _is_default(key: str, value: Any, defaults: Mapping[str, Any]) -> bool:
    """Return whether an attribute without a field leaves the network as it is here: off, or what
    transformers takes where it is absent."""
    default = 1 if key == "partial_rotary_factor" else defaults.get(key)
    if value is None or value == default or (is_off(value) and is_off(default)):
        return True
    return bool(TRAINING_NOISE.fullmatch(key)) and is_number(value) and 0 <= value < 1


def _describe_default(key: str, defaults: Mapping[str, Any]) -> str:
    default = f"the default {shorten(defaults[key])}" if key in defaults else "that it is absent"
    return f"this implementation only knows {default}"


def write_fields(config: Any) -> dict[str, Any]:
    """Return the content of a config.json that transformers 4 and 5 read as `config`."""
    raw: dict[str, Any] = {"architectures": [config.architecture], "model_type": config.model_type}
    for field in dataclasses.fields(config):
        if field.name not in NOT_ATTRIBUTES:
            name = config.renamed.get(field.name, field.name)
            raw[name] = _thaw(getattr(config, field.name))
    # A null under a name that transformers does not know says nothing; others read it as a number.
    defaults = hf_defaults(getattr(type(config), "text_type", config.model_type))
    raw = {key: v for key, v in raw.items() if v is not None or key in defaults}
    if config.head_dim is None:  # families without the attribute divide by a null
        raw.pop("head_dim", None)
    rope = thaw_rope(config.rope)
    if rope:
        raw["rope_parameters"] = rope
    if rope and not getattr(config, "newer", False):
        rope = rope.get("full_attention", rope)  # which version 4 has names for
        raw["rope_theta"] = rope["rope_theta"]
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        plain = rope.get("rope_type", "default") == "default"
        raw["rope_scaling"] = None if plain else scaling
        if "partial_rotary_factor" in rope:
            raw["partial_rotary_factor"] = rope["partial_rotary_factor"]
    raw.update(
        {
            key: json.loads(value)
            for key, value in (
                *config.unread_attributes,
                *config.fixed_attributes,
                *config.carried_attributes,
            )
        }
    )
    return raw


def _config_class(model_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # seconds: only here

    if model_type not in CONFIG_MAPPING:
        raise UserError(
            f"transformers knows no model_type {model_type!r}; register its config class where the"
            " family is written: transformers.AutoConfig.register(model_type, ConfigClass)"
        )
    return CONFIG_MAPPING[model_type]


def thaw_rope(rope: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """Return rope_parameters as in a config.json: for all layers, or {kind of layer:
    parameters}."""
    return {
        key: thaw_rope(value)
        if value and isinstance(value, tuple) and type(value[0]) is tuple
        # Numbers, or the items of a kind of layer.
        else _thaw(value)
        for key, value in rope
    }


def _freeze(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(sorted((key, _freeze(v)) for key, v in value.items() if v is not None))
    return tuple(map(_freeze, value)) if isinstance(value, list) else value


def _thaw(value: Any) -> Any:
    return list(map(_thaw, value)) if isinstance(value, tuple) else value
