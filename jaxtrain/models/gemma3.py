"""Gemma 3 (Gemma Team 2025, arXiv:2503.19786): norms before and behind both layers, five layers of
a sliding window to one of full attention, each kind with a position encoding of its own.

Folders of the Hub are of text alone (270M, 1B), or have a tower for images, whose tokens see the
whole of their image."""

import dataclasses
import json
import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Self

from jaxtrain.errors import UserError
from jaxtrain.huggingface.config import read_fields
from jaxtrain.huggingface.files import describe
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.layers.mixer import IMAGES, LayerSpec
from jaxtrain.layers.norm import RMSNorm, ZeroCenteredRMSNorm
from jaxtrain.models.blocks import AttentionSpec, BlockSpec, SpecDecoder, spec_names
from jaxtrain.models.gemma_vision import SquareConfig, square_names
from jaxtrain.models.multimodal import ImageTextConfig
from jaxtrain.models.naming import SANDWICH_NORMS
from jaxtrain.models.windows import FULL, SLIDING, name_layers, windowed_layers

PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")
"""Which so many-th layer sees all, in files that do not name the kind of each. transformers writes
the second and does not read it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ImageTextConfig):
    architecture: ClassVar[str] = "Gemma3ForCausalLM"
    also: ClassVar[tuple[str, ...]] = ("Gemma3ForConditionalGeneration",)
    model_type: ClassVar[str] = "gemma3"
    text_type: ClassVar[str] = "gemma3_text"
    tower_type: ClassVar[type[SquareConfig]] = SquareConfig
    renamed: ClassVar[Mapping[str, str]] = {"hidden_act": "hidden_activation"}
    norm: ClassVar[type[RMSNorm]] = ZeroCenteredRMSNorm
    rope_by_kind: ClassVar[bool] = True
    rope_keys: ClassVar[tuple[str, ...]] = ("rope_local_base_freq",)
    tower_tensors: ClassVar[tuple[str, ...]] = (
        *("vision_tower.", "multi_modal_projector."),
        *("model.vision_tower.", "model.multi_modal_projector."),
    )
    prefixes: ClassVar[tuple[str, ...]] = (
        *("model.language_model.", "language_model.model.", "model."),
    )
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "cache_implementation": ("hybrid",),
        **dict.fromkeys(PATTERNS, ()),
    }
    media: ClassVar[tuple[str, ...]] = ("image_token_index", "image_token_id")

    attention_bias: bool = False
    """On all four projections."""
    query_pre_attn_scalar: int
    """Scores are multiplied with its root's inverse."""
    layer_types: tuple[str, ...]
    sliding_window: int
    final_logit_softcapping: float | None = None
    tower_prefix: str = ""
    """Beginning of the names of the tower's tensors; "": as published beside the text's."""

    def fit(self, tensors: Collection[str]) -> Self:
        end = "embeddings.patch_embedding.weight"
        prefix = next((name.removesuffix(end) for name in tensors if name.endswith(end)), "")
        return dataclasses.replace(super().fit(tensors), tower_prefix=prefix)

    def check(self) -> None:
        super().check()
        if self.vision is not None and (self.merge < 1 or self.vision.side % self.merge):
            raise UserError(
                f"config.json: mm_tokens_per_image={self._tokens} must be the square of a number"
                f" that divides the {self.vision.side} patches along a side of an image"
                " (vision_config.image_size / patch_size)"
            )

    @property
    def merge(self) -> int:
        edge = math.isqrt(max(self._tokens, 0))
        return self.vision.side // edge if edge**2 == self._tokens > 0 else 0

    @property
    def _tokens(self) -> int:
        count = json.loads(self.around or "{}").get("mm_tokens_per_image", 256)
        if type(count) is not int:
            raise UserError(
                f"config.json: mm_tokens_per_image is {describe(count)}; it must be a number"
            )
        return count

    @property
    def tower_roots(self) -> tuple[str, str]:
        """Beginnings of the names of the tensors of tower and projector."""
        top = self.prefix.partition("language_model.")[0]
        tower = self.tower_prefix or f"{top}vision_tower.vision_model."
        return tower, f"{tower.partition('vision_tower.')[0]}multi_modal_projector."

    @property
    def carries(self) -> tuple[str, ...]:
        """Prefixes of the text's carried tensors, and of a head on the tower, whose output the text
        does not read."""
        head = () if self.vision is None else (f"{self.tower_roots[0]}head.",)
        return (*super().carries, *head)

    @classmethod
    def read_text(cls, text: dict[str, Any]) -> dict[str, Any]:
        name_layers(text, PATTERNS[:1], 6, (SLIDING, FULL))
        return read_fields(cls, text)

    def to_hf(self) -> dict[str, Any]:
        raw = super().to_hf()
        text = raw.get("text_config", raw)
        text["rope_local_base_freq"] = text["rope_parameters"][SLIDING]["rope_theta"]
        return raw

    def layers(self) -> tuple[LayerSpec, ...]:
        kinds, window = (SLIDING, FULL), self.sliding_window
        specs = windowed_layers(self.num_hidden_layers, self.layer_types, window, kinds)
        return tuple(dataclasses.replace(spec, mask=IMAGES) for spec in specs)

    @property
    def embedding_scale(self) -> float:
        return self.hidden_size**0.5

    @property
    def logit_softcap(self) -> float | None:
        return self.final_logit_softcapping

    def block_spec(self, kind: str) -> BlockSpec:
        bias, scale = self.attention_bias, self.query_pre_attn_scalar**-0.5
        return BlockSpec(
            AttentionSpec(qkv_bias=bias, out_bias=bias, qk_norm="head", scale=scale),
            norms=SANDWICH_NORMS,
        )


Model = SpecDecoder


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a Hugging Face folder that it is made of."""
    tower = [] if config.vision is None else square_names(config.vision, *config.tower_roots)
    return [*spec_names(config), *tower]
