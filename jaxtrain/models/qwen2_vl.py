"""Qwen2-VL (Wang et al. 2024, arXiv:2409.12191): Qwen2's network, whose pairs of dims turn by time,
row or column, and a tower without learned positions.

Published folders have the text's attributes beside `vision_config`; transformers 5 writes them into
`text_config`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from typing_extensions import override

from jaxtrain.errors import UserError
from jaxtrain.models import qwen2
from jaxtrain.models.blocks import SpecDecoder
from jaxtrain.models.qwen_vision import QwenImageConfig, QwenTowerConfig, qwen_names

OUTER = {
    *("architectures", "model_type", "vision_config", "tie_word_embeddings"),
    *("image_token_id", "video_token_id", "vision_token_id"),
    *("vision_start_token_id", "vision_end_token_id"),
    *("dtype", "torch_dtype", "transformers_version"),
}
"""Keys beside the text's attributes in folders of one level."""


class PlainTowerConfig(QwenTowerConfig):
    """Tower of Qwen2-VL and of Qwen2.5-VL: shared keys and tensor names."""

    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **QwenTowerConfig.fixed,
        "tokens_per_second": (),  # of videos
    }
    merger: ClassVar[Mapping[str, str]] = {
        **{"merger.norm": "ln_q", "merger.up": "mlp.0", "merger.down": "mlp.2"}
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowerConfig(PlainTowerConfig):
    model_type: ClassVar[str] = "qwen2_vl_vision"
    renamed: ClassVar[Mapping[str, str]] = {
        **QwenTowerConfig.renamed,
        "hidden_size": "embed_dim",
        "out_hidden_size": "hidden_size",
    }
    tensors: ClassVar[Mapping[str, str]] = {"up": "fc1", "down": "fc2", **PlainTowerConfig.merger}
    intermediate_size: int = 0
    """Computed from the next one."""
    mlp_ratio: int

    def __post_init__(self):
        object.__setattr__(self, "intermediate_size", int(self.hidden_size * self.mlp_ratio))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(QwenImageConfig, qwen2.Config):
    architecture: ClassVar[str] = "Qwen2VLForConditionalGeneration"
    model_type: ClassVar[str] = "qwen2_vl"
    text_type: ClassVar[str] = "qwen2_vl_text"
    tower_type: ClassVar[type[PlainTowerConfig]] = TowerConfig
    prefixes: ClassVar[tuple[str, ...]] = ("model.", "model.language_model.")
    rope_keys: ClassVar[tuple[str, ...]] = ("mrope_section",)
    section: ClassVar[tuple[int, ...]] = (16, 24, 24)

    one_level: bool = False
    """True for folders without `text_config`."""

    @classmethod
    @override
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        if "text_config" in raw:
            return super().from_hf(raw)
        outer = {key: value for key, value in raw.items() if key in OUTER}
        text = {key: value for key, value in raw.items() if key not in OUTER}
        return dataclasses.replace(super().from_hf({**outer, "text_config": text}), one_level=True)

    @classmethod
    @override
    def read_text(cls, text: dict[str, Any]) -> dict[str, Any]:
        values = super().read_text(text)
        # transformers 4's name for rotations by three axes, beside which it writes the type.
        values["rope"] = tuple(item for item in values["rope"] if item[0] != "type")
        return values

    @override
    def to_hf(self) -> dict[str, Any]:
        raw = super().to_hf()
        text = raw["text_config"]
        rope = text["rope_parameters"]
        if rope.get("rope_type", "default") == "default" and "mrope_section" in rope:
            # Where transformers 4 and servers read the section.
            scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
            text["rope_scaling"] = {**scaling, "type": "mrope"}
        if not self.one_level:
            return raw
        del raw["text_config"], text["model_type"]
        return {**text, **raw}

    @property
    @override
    def tower_root(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        # Folders as published have both parts of a model on top, others both within `model.`.
        return "visual." if self.prefix == "model." else "model.visual."

    @override
    def divide_axes(self, pairs: int, section: Sequence[int]) -> tuple[int, ...]:
        if sum(section) != pairs:
            raise UserError(
                f"config.json: mrope_section is {list(section)}; the sum of its numbers must be the"
                f" {pairs} pairs of a head"
            )
        return tuple(axis for axis, count in enumerate(section) for _ in range(count))


Model, names = SpecDecoder, qwen_names
