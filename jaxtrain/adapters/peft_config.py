"""adapter_config.json: read untrusted ones, with a time limit for patterns; describe adapters."""

import collections
import json
import math
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.adapters.spec import Adapter, Linears
from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import describe, read_object, shorten, spell

MAX_RANK = 2**16
MAX_ENTRIES = 10_000
MAX_PATTERN = 1000
"""Characters."""
PATTERN_SECONDS = 5.0
SIMPLE = re.compile(r"(?:[\w\-.|]|\\\.|\\d\+(?!\\d))*")
"""Names or one of several, with any character for a dot and numbers: what matches in no time."""

SWITCHES = ("use_rslora", "use_dora", "fan_in_fan_out", "inference_mode", "ensure_weight_tying")
NAMES = ("target_modules", "target_parameters", "exclude_modules", "layers_pattern")
TEXTS = ("base_model_name_or_path", "revision", "task_type", "peft_version")
OBJECTS = ("auto_mapping", "loftq_config", "runtime_config", "eva_config", "megatron_config")

TASK_SUFFIXES = {"SEQ_CLS": "ForSequenceClassification", "TOKEN_CLS": "ForTokenClassification"}
"""What the architecture of an adapted model ends in, by PEFT's task_type, where it is no language
model."""

MATCHER = """
import json, re, sys
patterns, names = json.load(sys.stdin)
found = {}
for number, pattern in enumerate(patterns):
    for name in names:
        if name not in found and re.match(pattern, name):
            found[name] = number
print(json.dumps(found))
"""


def read_peft_config(file: Path) -> dict[str, Any]:
    """Return the content of an adapter_config.json. Raises UserError for a key of the wrong
    type."""
    raw = read_object(file)
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise UserError(f"{file}: peft_type {shorten(kind)}; only LORA is supported")
    if "lora_alpha" not in raw:
        raise UserError(f"{file}: lora_alpha is missing; it is the factor of the adapter, times r")
    _require(file, "lora_alpha", raw["lora_alpha"], _is_alpha, ALPHA)
    if raw.get("r") is not None:
        _require(file, "r", raw["r"], _is_rank, RANK)
    for key, fits, allowed in (
        ("rank_pattern", _is_rank, RANK),
        ("alpha_pattern", _is_alpha, ALPHA),
    ):
        table = raw.get(key)
        if table is None:
            continue
        if not isinstance(table, dict) or len(table) > MAX_ENTRIES:
            raise UserError(f"{file}: {key} is {describe(table)}; it must be an object or null")
        for pattern, value in table.items():
            _require(file, f"{key}.{spell(pattern)}", value, fits, allowed)
            _check_pattern(file, key, pattern)
    for key in SWITCHES:
        _require(file, key, raw.get(key), lambda v: v is None or v in (True, False), "a switch")
    for key in NAMES:
        _require(file, key, raw.get(key), _are_names, "a text, a list of texts or null")
    _require(
        file,
        "modules_to_save",
        raw.get("modules_to_save"),
        lambda v: not isinstance(v, str) and _are_names(v),
        "a list of texts or null",
    )
    _require(
        file,
        "layers_to_transform",
        raw.get("layers_to_transform"),
        lambda v: v is None or all(type(n) is int for n in (v if isinstance(v, list) else [v])),
        "a number, a list of numbers or null",
    )
    tokens = raw.get("trainable_token_indices")
    _require(file, "trainable_token_indices", tokens, _are_ids, "ids of tokens, by module or alone")
    for key in TEXTS:
        _require(file, key, raw.get(key), lambda v: v is None or isinstance(v, str), "a text")
    for key in OBJECTS:
        _require(file, key, raw.get(key), lambda v: v is None or isinstance(v, dict), "an object")
    dropout = raw.get("lora_dropout")
    _require(file, "lora_dropout", dropout, lambda v: v is None or _is_share(v), "from 0 to 1")
    return raw


def match_patterns(file: Path, key: str, patterns: Sequence[str], names: Sequence[str]) -> Mapping:
    """{name: the first of the patterns that names it}, read as PEFT does: at its end, after a dot.

    Expressions that may take for ever are matched in a process of their own, within
    PATTERN_SECONDS; UserError where they do not end, or are none.
    """
    full_patterns = [rf"(.*\.)?({pattern})$" for pattern in patterns]
    if all(SIMPLE.fullmatch(pattern) for pattern in patterns):
        matches = {}
        for pattern, expression in zip(patterns, map(re.compile, full_patterns), strict=True):
            for name in names:
                if name not in matches and expression.match(name):
                    matches[name] = pattern
        return matches
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", MATCHER],
            input=json.dumps([full_patterns, list(names)]),
            capture_output=True,
            text=True,
            timeout=PATTERN_SECONDS,
            check=True,
        )
        return {name: patterns[number] for name, number in json.loads(done.stdout).items()}
    except subprocess.TimeoutExpired:
        why = f"takes longer than {PATTERN_SECONDS:g} s to match"
    except subprocess.CalledProcessError as error:
        why = f"cannot be matched: {spell((error.stderr.strip().splitlines() or ['?'])[-1], 200)}"
    shown = ", ".join(shorten(pattern) for pattern in patterns[:4])
    raise UserError(f"{file}: {key} ({shown}) {why}; write plain names of modules")


def _check_pattern(file: Path, key: str, pattern: str) -> None:
    try:
        fits = len(pattern) <= MAX_PATTERN and re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(f"{file}: {key} {shorten(pattern)} is no expression: {error}") from None
    if not fits:
        raise UserError(f"{file}: {key} {shorten(pattern)} is longer than {MAX_PATTERN} characters")


def _require(file: Path, key: str, value: Any, fits: Any, allowed: str) -> None:
    if not fits(value):
        raise UserError(f"{file}: {key} is {describe(value)}; it must be {allowed}")


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_RANK


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= 10**6


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1 and math.isfinite(value)


def _are_ids(value: Any) -> bool:
    lists = value.values() if isinstance(value, dict) else [value if value is not None else []]
    return all(
        isinstance(ids, list) and all(type(n) is int and 0 <= n < 2**31 for n in ids)
        for ids in lists
    )


def _are_names(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, str)
        or (isinstance(value, list) and all(isinstance(name, str) for name in value))
    )


ALPHA = "a number above 0, of at most a million"
RANK = f"a whole number from 1 to {MAX_RANK}"


def describe_adapter(
    linears: Linears,
    adapter: Adapter,
    base_name: str | None,
    parameters: Mapping[str, Sequence[str]],
    tables: Mapping[str, str],
) -> dict[str, Any]:
    """Return the content of adapter_config.json; parameters: those of target_parameters by path.
    tables: see peft.table_modules."""
    slots = list(adapter.slots.values())
    plain = [path for path in adapter.slots if path not in parameters]
    # PEFT 0.21 warns of patterns that name no module, though it follows those of parameters. So
    # what no module has goes without a pattern, if that can be.
    of_modules = {adapter.slots[path] for path in plain}
    alone = [adapter.slots[path] for path in parameters if adapter.slots[path] not in of_modules]
    common = (alone if plain and alone else None) or slots
    common = collections.Counter(common).most_common(1)[0][0]
    names: dict[str, Sequence[str]] = {}
    for path in plain:
        layers, every = adapter.slots[path].layers, linears[path].by_layer()
        modules = [name for layer in layers or () for name in every[layer]]
        if layers is None and (_shares_tail(linears, adapter, path) or _names_outer(linears, path)):
            modules = [name for layer_modules in every for name in layer_modules]
        names[path] = modules or [shared_name(linears, adapter, path)]
    targets: list[str] | str = sorted({name for path in plain for name in names[path]})
    names |= parameters
    of_experts = sorted({name for listed in parameters.values() for name in listed})
    if any("\\" in name for name in targets):
        targets = rf"(.*\.)?({'|'.join(targets)})"  # PEFT takes a list of names or one expression

    def list_values(key: str) -> dict[str, Any]:
        values = {path: getattr(slot, key) for path, slot in adapter.slots.items()}
        unlike = {path: v for path, v in values.items() if v != getattr(common, key)}
        return {name: value for path, value in unlike.items() for name in names[path]}

    modules = {f"{path}.embedding": name.rpartition(".")[2] for path, name in tables.items()}
    modules |= {"lm_head.bias": "lm_head", "score.weight": "score", "score.bias": "score"}
    task = "CAUSAL_LM"
    if "score.weight" in adapter.full:
        task = "TOKEN_CLS" if "score.bias" in adapter.full else "SEQ_CLS"
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base_name,
        "r": common.rank,
        "lora_alpha": _plain(common.alpha),
        "rank_pattern": _write_patterns(list_values("rank"), of_experts),
        "alpha_pattern": _write_patterns(list_values("alpha"), of_experts),
        "target_modules": targets,
        "target_parameters": of_experts or None,
        "modules_to_save": sorted({modules[path] for path in adapter.full}) or None,
        "use_rslora": common.rslora,
        "use_dora": common.dora,
        "lora_dropout": adapter.dropout,
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _write_patterns(
    values: Mapping[str, float], parameters: Collection[str]
) -> dict[str, float | int]:
    """Return a pattern for each name, or one for all names of a parameter's value, see
    `describe_adapter`."""
    patterns: dict[str, float | int] = {}
    for value in dict.fromkeys(values.values()):
        named = [name for name in values if values[name] == value]
        joined = any(name in parameters for name in named)
        patterns |= dict.fromkeys(["|".join(sorted(named))] if joined else named, _plain(value))
    return patterns


def shared_name(linears: Linears, adapter: Adapter, path: str) -> str:
    """ "q_proj" where every Linear of that last name has the same adapter, else `short_name`; two
    names in a tower, whose patches have a "proj", too, which is no Linear."""
    alike = {adapter.slots.get(namesake) for namesake in _namesakes(linears, path)}
    if path.startswith("vision."):
        return _tail(linears, path, 2)
    return _tail(linears, path, 1) if len(alike) == 1 else short_name(linears, path)


def short_name(linears: Linears, path: str) -> str:
    """ "q_proj", or with its parent where another Linear has the same last name; for experts, which
    have a number there, an expression."""
    if _namesakes(linears, path) == [path]:
        return _tail(linears, path, 1)
    if ".experts." in path:
        return rf"experts\.\d+\.{_tail(linears, path, 1)}"
    return _tail(linears, path, 2)


def _shares_tail(linears: Linears, adapter: Adapter, path: str) -> bool:
    """Return whether another Linear without this adapter has the same last two names, as in a text
    and its tower."""
    if ".experts." in path:
        return False
    tail, slot = _tail(linears, path, 2), adapter.slots[path]
    namesakes = (
        candidate for candidate in _namesakes(linears, path) if _tail(linears, candidate, 2) == tail
    )
    return any(adapter.slots.get(namesake) != slot for namesake in namesakes)


def _names_outer(linears: Linears, path: str) -> bool:
    """Return whether a module around another Linear has this one's last name, as around the
    clipped ones of Gemma 4's towers ("q_proj.linear")."""
    name = _tail(linears, path, 1)
    return any(linear.modules[0].split(".")[-2:-1] == [name] for linear in linears.values())


def _namesakes(linears: Linears, path: str) -> list[str]:
    return [
        candidate
        for candidate in linears
        if _tail(linears, candidate, 1) == _tail(linears, path, 1)
    ]


def _tail(linears: Linears, path: str, parts: int) -> str:
    return ".".join(linears[path].modules[0].split(".")[-parts:])


def _plain(value: float) -> float | int:
    return int(value) if value == int(value) else value
