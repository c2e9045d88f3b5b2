"""The text of folders that hold more: what concerns it stands in `text_config`, the rest around it.

Towers for sound, and of some families those for images, are no part of the model here; every export
takes their tensors along byte by byte. A folder of text alone has one level, and other names of its
tensors. `ImageTextConfig` is one whose tower is a part of the model.
"""

import dataclasses
import json
from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Self

from jaxtrain.errors import UserError
from jaxtrain.huggingface.config import hf_defaults, read_fields
from jaxtrain.huggingface.files import describe, spell
from jaxtrain.models.decoder_config import DecoderConfig

NOT_AROUND = {"text_config", "dtype", "torch_dtype", "transformers_version"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig(DecoderConfig):
    """A DecoderConfig whose config.json may have two levels."""

    text_type: ClassVar[str]
    """model_type of the text alone, by which transformers reads its attributes."""
    media: ClassVar[tuple[str, ...]] = ()
    """Keys on top that name ids which are no text."""
    prefixes: ClassVar[tuple[str, ...]] = ("model.language_model.", "model.")
    """What the tensors of text may begin with; the last one in folders of text alone."""

    around: str | None = None
    """JSON of what stands around `text_config`; None: there is no such level."""
    prefix: str = "model."
    """Of the tensors of text."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """From either form; UserError for anything that would be ignored."""
        around, text = split_levels(raw, cls)
        values = cls.read_text(text)
        if around is not None:
            values["around"] = json.dumps(around, sort_keys=True)
            values["prefix"] = cls.prefixes[0]
        config = cls(**values)
        config.check()
        return config

    @classmethod
    def read_text(cls, text: dict[str, Any]) -> dict[str, Any]:
        """The arguments of `cls` from the text's attributes."""
        return read_fields(cls, text)

    def to_hf(self) -> dict[str, Any]:
        raw = super().to_hf()
        if self.around is None:
            return {**raw, "model_type": self.text_type}
        head = {} if self.score is None else self.score.to_hf(self.architecture, pictured=True)
        text = {key: raw[key] for key in raw if key != "architectures" and key not in head}
        text["model_type"] = self.text_type
        outer = {**json.loads(self.around), **head, "model_type": self.model_type}
        return {**outer, "text_config": text}

    def fit(self, tensors: Collection[str]) -> Self:
        """The prefix stands in the folder, not in its config: transformers writes a flat config
        beside long names."""
        for prefix in self.prefixes:
            if f"{prefix}embed_tokens.weight" in tensors:
                return dataclasses.replace(self, prefix=prefix)
        return self

    def check(self) -> None:
        if self.score is not None and self.around is not None and self.vision is None:
            raise UserError(
                f"{self.architecture}: a model that scores has no place for a vision tower that is"
                " not read here; start from its text alone: transformers.AutoModelForCausalLM"
                ".from_pretrained(FOLDER).save_pretrained(TEXT)"
            )
        super().check()

    def check_drawn(self) -> None:
        if self.around is not None:
            raise UserError(
                f"{self.architecture}: the vision tower of a multimodal config cannot be drawn at"
                f' random here; give what is in text_config alone, with architectures ["'
                f'{self.architecture}"]'
            )

    @property
    def media_tokens(self) -> Mapping[int, str]:
        raw = {} if self.around is None else json.loads(self.around)
        return {raw[key]: key for key in self.media if type(raw.get(key)) is int}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageTextConfig(TextConfig):
    """A TextConfig with a tower for images, described by `vision_config`."""

    tower_type: ClassVar[Any]
    """models.vision.VisionConfig of the tower."""
    tower_tensors: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the names of the tensors of tower and projector, in families that also have
    folders of text alone: without `vision_config` these tensors are carried along."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        if cls.tower_tensors and raw.get("vision_config") is None:
            return super().from_hf(raw)
        for key in ("text_config", "vision_config"):
            if not isinstance(raw.get(key), Mapping):
                raise UserError(
                    f"config.json: {key} is {describe(raw.get(key))}; {cls.architecture} has an"
                    " object there"
                )
        vision = cls.tower_type.from_hf(raw["vision_config"])
        config = dataclasses.replace(super().from_hf(raw), vision=vision)
        config.check()
        return config

    def check(self) -> None:
        """Raise UserError if the sizes do not fit together, or the token of images is none."""
        super().check()
        outer = {} if self.vision is None else json.loads(self.around or "{}")
        for key in (key for key in self.media if key.startswith("image_token")):
            token = outer.get(key)
            if token is None or (type(token) is int and 0 <= token < self.vocab_size):
                continue
            raise UserError(
                f"config.json: {key} is {describe(token)}; it must be the id of a token, from 0 to"
                f" {self.vocab_size - 1} (vocab_size={self.vocab_size})"
            )

    @property
    @abstractmethod
    def merge(self) -> int:
        """Patches along a side of the block that one feature is made of."""

    @property
    def carries(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (*(self.tower_tensors if self.vision is None else ()), *super().carries)

    def check_drawn(self) -> None:
        """Refuse a tower that is carried along; others are drawn with the text."""
        if self.vision is None:
            super().check_drawn()


def split_levels(
    raw: Mapping[str, Any], cls: type[TextConfig]
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """(what stands around the text's attributes, or None where there is one level; these)."""
    if "text_config" not in raw:
        return None, dict(raw)
    text = raw["text_config"]
    around = {key: value for key, value in raw.items() if key not in NOT_AROUND}
    if not isinstance(text, Mapping):
        raise UserError(f"config.json: text_config is {describe(text)}; it is an object")
    if text.get("model_type", cls.text_type) != cls.text_type:
        raise UserError(
            f"config.json: text_config.model_type={spell(text['model_type'])!r}; that of"
            f" {cls.architecture} is {cls.text_type!r}"
        )
    text = dict(text)
    text.pop("architectures", None)
    # transformers goes by the one on top, and leaves its default below when it writes.
    default = hf_defaults(cls.model_type).get("tie_word_embeddings", False)
    tied = around.get("tie_word_embeddings", text.get("tie_word_embeddings", default))
    if text.get("tie_word_embeddings") is True and tied is not True:
        raise UserError(
            f"config.json: tie_word_embeddings is {describe(tied)} on top and true in text_config;"
            " make them the same"
        )
    text["tie_word_embeddings"] = around["tie_word_embeddings"] = tied
    unknown = around.get("language_model_only")
    if unknown not in (None, False):
        raise UserError(
            f"config.json: language_model_only={describe(unknown)} is not supported; only false"
        )
    return around, text
