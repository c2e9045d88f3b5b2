"""A PEFT adapter folder as it lies on disk: what it holds, and refusals of what it should not."""

import copy
import dataclasses
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.adapters.peft_config import match_patterns, read_peft_config
from jaxtrain.adapters.peft_experts import WrappedExperts
from jaxtrain.adapters.spec import LoRASpec
from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import shorten, spell
from jaxtrain.huggingface.ops import HEADS, full_index
from jaxtrain.huggingface.safetensors import SafetensorsFolder
from jaxtrain.models.decoder_config import DecoderConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
SUFFIX = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}

NAMED = re.compile(
    r"(?P<module>.+)\.(?:modules_to_save\.(?P<full>[^.]+)\.(?P<tensor>weight|bias)"
    r"|(?P<pair>lora_[AB])\.(?P<of_pair>[^.]+)\.weight"
    r"|(?P<single>lora_magnitude_vector|token_adapter\.trainable_tokens_delta)"
    r"\.(?P<of_single>(?!weight$)[^.]+)(?:\.weight)?)"
)
"""Names of tensors in a module's state_dict, which hold the adapter's name; save_pretrained leaves
it out."""

ROWS = "token_adapter.trainable_tokens_delta"
"""What ends the name of rows of a table, those of trainable_token_indices."""
BELOW = "token_adapter.base_layer.weight"
"""What ends the name of a table below such rows, which PEFT adds where it was resized."""

SAYS_NOTHING = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version"),
    *("revision", "task_type", "lora_dropout", "megatron_core", "loftq_config", "runtime_config"),
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"),
    *("target_modules", "target_parameters", "exclude_modules"),
    *("modules_to_save", "ensure_weight_tying", "trainable_token_indices"),
    *("layers_pattern", "layers_to_transform", "fan_in_fan_out"),
}
"""Keys of adapter_config.json that are read here, or that the tensors themselves tell."""
RENAMED = (
    ("backbone.", "model."),
    ("language_model.model.", "model.language_model."),
    ("embed_out", "lm_head"),
)
"""Beginnings of names in folders, and what transformers 5 makes of them: PEFT loads either and
writes the latter."""
SIDE_BY_SIDE = (("visual.", "model.visual."), ("model.", "model.language_model."))
"""Beginnings of names in folders of Qwen2-VL and Qwen2.5-VL, and those in PEFT."""
TOWER = re.compile(r"(model\.)?vision_tower\.(vision_model\.)?")
"""Beginning of the names of a tower in folders. PEFT knows only what transformers 5 makes of it:
"model.vision_tower."."""
NEUTRAL_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "lora_ga")
"""Initializations that leave the base's weights as they are."""


@dataclasses.dataclass(frozen=True)
class PeftFolder:
    """An adapter on disk. Raises UserError for features that are not supported."""

    path: Path
    config: Mapping[str, Any]
    files: SafetensorsFolder

    @property
    def dora(self) -> bool:
        return bool(self.config.get("use_dora"))

    @property
    def inputs_first(self) -> bool:
        """True if the base has its matrices as [in, out]."""
        return bool(self.config.get("fan_in_fan_out"))

    @property
    def targets(self) -> list[str]:
        """Names in target_parameters, without those of routers, whose pairs are a Linear's."""
        return [name for name in self._parameters if not name.endswith(".weight")]

    @property
    def _parameters(self) -> list[str]:
        targets = self.config.get("target_parameters") or []
        return [targets] if isinstance(targets, str) else list(targets)

    def called_as(self, names: Collection[str]) -> "PeftFolder":
        """Return the adapter with the name prefixes of the base's `names`; see RENAMED."""
        tensors = dict(self.files.tensors)
        if lies_beside(names):
            for old, new in SIDE_BY_SIDE:
                tensors = {
                    PREFIX + old + name.removeprefix(PREFIX + new)
                    if name.startswith(PREFIX + new)
                    else name: stored
                    for name, stored in tensors.items()
                }
        for old, new in (*RENAMED, *((new, old) for old, new in RENAMED)):
            if not any(name.startswith(old) for name in names):
                continue
            tensors = {
                PREFIX + old + name.removeprefix(PREFIX + new)
                if name.startswith(PREFIX + new) and not name.startswith(PREFIX + old)
                else name: stored
                for name, stored in tensors.items()
            }
        roots = (match[0] for match in map(TOWER.match, names) if match)
        if (root := next(roots, None)) is not None:
            tensors = {
                PREFIX + TOWER.sub(root, name.removeprefix(PREFIX), 1)
                if TOWER.match(name, len(PREFIX))
                else name: stored
                for name, stored in tensors.items()
            }
        files = copy.copy(self.files)
        files.tensors = tensors
        return dataclasses.replace(self, files=files)

    def modules(self) -> dict[str, LoRASpec]:
        """Return the slot of each adapted Hugging Face module, by its name in the base model."""
        pairs = self.pairs()
        return self._slots({m: rank for m, rank in self._ranks().items() if m not in pairs})

    def pairs(self) -> set[str]:
        """Return the modules whose pair belongs to one of target_parameters."""
        owners = {target.rpartition(".")[0] or "experts" for target in self.targets}
        return {
            module
            for module in self._ranks()
            if any(f".{module.replace('.base_layer', '')}".endswith(f".{o}") for o in owners)
        }

    def pair_slots(self, experts: WrappedExperts, targets: set[str]) -> list[LoRASpec | None]:
        """Return the slot of a matrix of experts in each layer."""
        ranks, expert_ranks = self._ranks(), {}
        for layer, parameter in enumerate(experts.parameters):
            module = experts.module(layer, targets)
            if module in ranks:
                rank, rest = divmod(ranks[module], experts.num_experts)
                if rest or not rank:
                    raise UserError(
                        f"{self.path / WEIGHTS}: lora_A of {spell(module)} has {ranks[module]}"
                        f" rows, no multiple of the {experts.num_experts} experts"
                    )
                expert_ranks[parameter] = rank
        slots = self._slots(expert_ranks)
        return [slots.get(parameter) for parameter in experts.parameters]

    def _ranks(self) -> dict[str, int]:
        """Rows of each factor A, by module."""
        end = f".{SUFFIX['a']}"
        names = [n for n in self.files.tensors if n.startswith(PREFIX) and n.endswith(end)]
        return {n[len(PREFIX) : -len(end)]: self.files.tensors[n].shape[0] for n in names}

    def _slots(self, ranks: Mapping[str, int]) -> dict[str, LoRASpec]:
        patterns = self.config.get("alpha_pattern") or {}
        called = {
            # Patterns are of parameters where these have the pairs.
            name: f"{name}.weight"
            if any(f".{name}.weight".endswith(f".{parameter}") for parameter in self._parameters)
            else name
            for name in ranks
        }
        chosen = match_patterns(
            self.path / CONFIG, "alpha_pattern", [*patterns], [*called.values()]
        )
        return {
            name: LoRASpec(
                rank,
                float(patterns.get(chosen.get(called[name]), self.config["lora_alpha"])),
                bool(self.config.get("use_rslora")),
                self.dora,
            )
            for name, rank in ranks.items()
        }

    def full(self) -> set[str]:
        """Tensors of the base model that the adapter replaces."""
        return {
            name[len(PREFIX) :]
            for name in self.files.tensors
            if not any(name.endswith(f".{suffix}") for suffix in (*SUFFIX.values(), ROWS, BELOW))
        }

    def _is_copy(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether rows repeat those of the embedding, as PEFT may write them for a tied
        head."""
        tables = [n for n in self.files.tensors if n.endswith(f".{ROWS}") and n != name]
        rows = self.files.fetch(name, full_index(shape))
        same = (n for n in tables if self.files.tensors[n].shape == shape)
        return any(np.array_equal(rows, self.files.fetch(n, full_index(shape))) for n in same)

    def rows(self) -> dict[str, tuple[int, ...]]:
        """Return the ids of the tokens whose rows it replaces, by the module of the table."""
        stated = self.config.get("trainable_token_indices") or {}
        rows_of = {}
        for name, stored in self.files.tensors.items():
            if not name.endswith(f".{ROWS}"):
                continue
            module = name[len(PREFIX) : -len(ROWS) - 1]
            if isinstance(stated, dict):
                names = tuple(f".{name}" for name in (module, module_in_memory(module)))
                listed = (
                    i for key, i in stated.items() if any(n.endswith(f".{key}") for n in names)
                )
                ids = next(listed, ())
            else:  # of the embedding, whatever its name
                ids = () if module_in_memory(module).endswith("lm_head") else stated
            if not ids and self._is_copy(name, stored.shape):
                continue
            if len(ids) != stored.shape[0] or len(set(ids)) < len(ids):
                raise UserError(
                    f"{self.path / WEIGHTS}: {spell(name)} has {stored.shape[0]} rows; {CONFIG}"
                    f" names {len(set(ids))} tokens for them (trainable_token_indices)"
                )
            rows_of[module] = tuple(ids)
        return rows_of


def check_orientation(peft: PeftFolder, config: DecoderConfig | None) -> None:
    """Raise UserError if an adapter says of other matrices than the base's that their inputs come
    first. config: the base's; None: unknown, which no such adapter may be."""
    if peft.inputs_first and not (config and config.inputs_first):
        raise UserError(
            f"{peft.path / CONFIG}: fan_in_fan_out=True is for bases that hold matrices as [in,"
            " out], such as GPT-2; the base is none of them"
        )


def open_peft(folder: str | os.PathLike) -> PeftFolder:
    """Open and check the adapter of a PEFT folder."""
    folder = Path(folder)
    file = folder / CONFIG
    if not file.is_file():
        below = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))
        listed = ", ".join(map(spell, below[:8]))
        raise UserError(
            f"{file} does not exist; expected a PEFT adapter folder"
            + (f"; the folder holds the adapters {listed}: name one of them" if below else "")
        )
    raw = read_peft_config(file)
    odd = {key: value for key, value in raw.items() if key not in SAYS_NOTHING and value}
    if odd.get("bias") == "none":
        del odd["bias"]
    if isinstance(odd.get("init_lora_weights"), str | bool | None) and (
        odd.get("init_lora_weights") in NEUTRAL_INITS
    ):
        odd.pop("init_lora_weights", None)
    if not raw.get("use_qalora"):
        odd.pop("qalora_group_size", None)
    if odd:
        shown = {k: repr(spell(v)) if isinstance(v, str) else shorten(v) for k, v in odd.items()}
        listed = ", ".join(f"{spell(key)}={shown[key]}" for key in [*odd][:8])
        raise UserError(f"{file}: not supported: {listed}")
    peft = PeftFolder(folder, raw, SafetensorsFolder(folder, single=WEIGHTS))
    tensors = peft.files.tensors = remove_adapter_name(folder, peft.files.tensors)
    strange = [name for name in tensors if not name.startswith(PREFIX)]
    suffixes = [*SUFFIX.values()] if peft.dora else [SUFFIX["a"], SUFFIX["b"]]
    strange += [n for n in tensors if "lora_" in n and not n.endswith(tuple(suffixes))]
    if strange:
        listed = ", ".join(map(spell, strange[:4]))
        raise UserError(f"{folder / WEIGHTS}: unexpected tensors {listed}")
    check_shapes(peft)
    parts = [(name, f".{end}") for name in tensors for end in suffixes]
    adapted = {name.removesuffix(end) for name, end in parts if name.endswith(end)}
    required = {f"{module}.{end}" for module in adapted for end in suffixes}
    if missing := sorted(required - set(tensors)):
        raise UserError(f"{folder / WEIGHTS}: missing tensors {', '.join(map(spell, missing[:4]))}")
    check_ranks(peft)
    return peft


def remove_adapter_name(folder: Path, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a state_dict under the names of save_pretrained, others as they are.
    Raises UserError for tensors of several adapters."""
    named, adapters = {}, set()
    for name, stored in tensors.items():
        if (match := NAMED.fullmatch(name)) is not None:
            adapters.add(match["full"] or match["of_pair"] or match["of_single"])
            end = match["tensor"] or match["single"] or f"{match['pair']}.weight"
            name = f"{match['module']}.{end}"
        named[name] = stored
    if len(adapters) > 1 or len(named) < len(tensors):
        listed = ", ".join(map(spell, sorted(adapters)[:8]))
        listed += ", and tensors without a name" if len(adapters) == 1 else ""
        raise UserError(
            f"{folder / WEIGHTS}: holds several adapters ({listed}); choose one by saving it alone,"
            " as PEFT does: model.save_pretrained(FOLDER, selected_adapters=[NAME]) writes"
            " FOLDER/NAME, or FOLDER itself for default"
        )
    return named


def check_shapes(peft: PeftFolder) -> None:
    """Raise UserError if a part of an adapter has the wrong number of dimensions."""
    for name, stored in peft.files.tensors.items():
        kind = next((kind for kind, end in SUFFIX.items() if name.endswith(f".{end}")), None)
        dims = 1 if kind == "magnitude" else 2
        checked = kind is not None or name.endswith(f".{ROWS}")
        if checked and (len(stored.shape) != dims or 0 in stored.shape):
            raise UserError(
                f"{stored.file}: {spell(name)} has shape {stored.shape}; it must have {dims}"
                f" dimension{'s' * (dims > 1)}, none of them 0"
            )


def check_ranks(peft: PeftFolder) -> None:
    """Raise UserError if the tensors of an adapter do not fit each other."""
    tensors, ends = peft.files.tensors, {kind: f".{end}" for kind, end in SUFFIX.items()}
    stated = None if peft.config.get("rank_pattern") else peft.config.get("r")
    for name, down in tensors.items():
        if not name.endswith(ends["a"]):
            continue
        module = name.removesuffix(ends["a"])
        up = tensors[module + ends["b"]]
        # The factors of experts lie in one tensor, expert after expert.
        if stated is not None and ".experts" not in module and down.shape[0] != stated:
            raise UserError(
                f"{down.file}: lora_A of {spell(module)} has rank {down.shape[0]}, and {CONFIG}"
                f" says r={stated}, by which lora_alpha is divided"
            )
        if up.shape[1] != down.shape[0]:
            raise UserError(
                f"{down.file}: {spell(module)} has lora_A {down.shape} and lora_B {up.shape}; their"
                " ranks differ"
            )
        magnitude = tensors.get(module + ends["magnitude"])
        if magnitude is not None and magnitude.shape != up.shape[:1]:
            raise UserError(
                f"{down.file}: {spell(module)} has a magnitude {magnitude.shape} for lora_B"
                f" {up.shape}"
            )


def find_head(tensors: Collection[str]) -> str:
    """Return what the base calls its head, or would if it stored one."""
    stored = [name for name in HEADS if name in tensors]
    return stored[0] if stored else HEADS["gpt_neox.embed_in.weight" in tensors]


def lies_beside(names: Collection[str]) -> bool:
    """Return whether a base with modules or tensors of these `names` has a tower beside its text,
    see SIDE_BY_SIDE."""
    return any(name.startswith(SIDE_BY_SIDE[0][0]) for name in names)


def module_in_memory(module: str, beside: bool = False) -> str:
    """Return what transformers 5 calls a module of a folder, by its whole name. beside: the folder
    is one of SIDE_BY_SIDE."""
    for old, new in SIDE_BY_SIDE if beside else RENAMED:
        if module.startswith(old):
            return new + module.removeprefix(old)
    return TOWER.sub("model.vision_tower.", module, 1) if TOWER.match(module) else module
