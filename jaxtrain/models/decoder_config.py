"""DecoderConfig: the attributes of a config.json that all decoders share."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Self

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.huggingface.config import read_fields, write_fields
from jaxtrain.huggingface.ops import HEADS
from jaxtrain.layers.mixer import IMAGES, LayerSpec
from jaxtrain.layers.mlp import ACTIVATIONS
from jaxtrain.layers.norm import RMSNorm
from jaxtrain.layers.rope import frequencies
from jaxtrain.models.scores import ScoreHead


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The config.json attributes that all decoders have; a family adds its own."""

    architecture: ClassVar[str]
    model_type: ClassVar[str]
    also: ClassVar[tuple[str, ...]] = ()
    """Further architectures whose folders the family reads."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """{field: attribute of config.json} for fields with another name."""
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Attributes of folders that have no effect or only one supported value, with the allowed
    values; empty: any. They are carried along in `fixed_attributes`."""
    rope_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of rope_parameters that the family reads besides those of their type."""
    rope_by_kind: ClassVar[bool] = False
    """True if rope_parameters are {kind of layer_types: parameters}."""
    modules_in_memory: ClassVar[Mapping[str, str]] = {}
    """{last part of a module's name in folders: what transformers calls it once it is loaded}."""
    experts_swapped: ClassVar[bool] = False
    """True if PEFT takes the inputs of the parameters that hold all experts for their outputs."""
    inputs_first: ClassVar[bool] = False
    """True if folders hold the matrices of layers as [in, out] (GPT-2)."""
    newer: ClassVar[bool] = False
    """True if transformers 4 does not have the family: files have no rope_theta or rope_scaling."""
    norm: ClassVar[type[RMSNorm]] = RMSNorm
    """Norm before attention and MLP, and behind the last layer."""
    final_norm_name: ClassVar[str] = "norm"
    """Name of the norm behind the last layer in folders."""
    prefix: ClassVar[str] = "model."
    """Beginning of the names of the text's tensors; a field where folders differ."""
    activations: ClassVar[Collection[str]] = tuple(ACTIVATIONS)
    """Allowed values of hidden_act."""
    guesses: ClassVar[bool] = False
    """True for drafts, which guess for a target model and generate nothing alone."""
    carries: ClassVar[tuple[str, ...]] = ()
    """Name prefixes of tensors that no layer has and that every export copies, such as a vision
    tower."""
    goes_stale: ClassVar[tuple[str, ...]] = ()
    """Prefixes in `carries` of tensors that depend on hidden states, which training changes."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads, rounded down."""
    hidden_act: str
    max_position_embeddings: int
    initializer_range: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: tuple[tuple[str, Any], ...]
    """Hugging Face's rope_parameters as sorted items; none where nothing is rotated."""
    carried_attributes: tuple[tuple[str, str], ...] = ()
    """Attributes that exports carry along unchanged (token ids, ...), as (key, JSON)."""
    fixed_attributes: tuple[tuple[str, str], ...] = ()
    """Attributes of `fixed` that the folder has, as (key, JSON)."""
    unread_attributes: tuple[tuple[str, str], ...] = ()
    """Attributes of the folder that neither transformers nor the family knows, as (key, JSON);
    exports carry them along."""
    row_tokens: int = 0
    """See `for_rows`; 0: as many as max_position_embeddings says."""
    grown: int = 0
    """Number of rows at the end of the vocabulary that the folder lacks; each is initialized to the
    mean of the others."""
    score: ScoreHead | None = None
    """Score head in place of the language model head; None: a language model."""
    vision: Any = None
    """models.vision.VisionConfig of the tower for images; None: text alone."""
    mtp: Any = None
    """models.mtp.MTPHead of the multi-token prediction head that is a part of the model; None: it
    has none, even if the folder has one."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """Read the content of a config.json. Raises UserError for attributes that change the
        network in a way that the family does not compute."""
        config = cls(**read_fields(cls, raw))
        config.check()
        return config

    def fit(self, tensors: Collection[str]) -> Self:
        """Return the config for a folder that holds tensors of these names, if they have several
        naming schemes."""
        return self

    def to_hf(self) -> dict[str, Any]:
        """Return the content of a config.json for transformers 4 and 5."""
        raw = write_fields(self)
        return raw if self.score is None else {**raw, **self.score.to_hf(self.architecture)}

    def check(self) -> None:
        """Raise UserError if the sizes do not fit together."""
        if self.hidden_act not in self.activations:
            raise UserError(
                f"config.json: hidden_act={self.hidden_act!r}; supported:"
                f" {sorted(self.activations)}"
            )
        if self.head_bias and self.tie_word_embeddings:
            raise UserError(
                "config.json: tie_word_embeddings=true is not supported where the head has a bias"
            )
        self.check_heads()
        self.encodings()
        if self.rope_by_kind:
            self.check_rope_kinds()
        else:
            self.layers()

    def check_heads(self) -> None:
        """Raise UserError if the sizes of attention do not fit together."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if kv_heads < 1 or heads % kv_heads:
            raise UserError(
                f"config.json: num_attention_heads={heads} must be a multiple of "
                f"num_key_value_heads={kv_heads}"
            )
        if self.rope and self.head_size % 2:
            raise UserError(f"config.json: head_dim={self.head_size} must be even for rotation")

    def check_rope_kinds(self) -> None:
        """Raise UserError if a kind of layer has no position encoding, or one that depends on the
        length of texts."""
        encodings = dict(self.rope)
        for kind in sorted({spec.rope for spec in self.layers()} - {"none"}):
            if kind not in encodings:
                raise UserError(
                    f"config.json: rope_parameters has {', '.join(encodings) or 'nothing'}, but no"
                    f" {kind}, which layer_types names"
                )
            if dict(encodings[kind]).get("rope_type") == "longrope":
                raise UserError(
                    f"config.json: rope_parameters.{kind}: rope_type='longrope' is supported only"
                    " where all layers have one position encoding"
                )

    def check_drawn(self) -> None:
        """Raise UserError if random weights would leave out a part of the folder."""

    def for_rows(self, tokens: int) -> Self:
        """Return the config of a run with texts of at most so many tokens, if that changes the
        computation: LongRoPE has one table for short texts and one for long ones, dynamic NTK one
        for each length beyond max_position_embeddings."""
        return dataclasses.replace(self, row_tokens=tokens) if self._short_length else self

    @property
    def _short_length(self) -> int | None:
        """Length of the longest short text; None if short and long texts do not differ."""
        rope = dict(self.rope)
        if self._stretches:
            return self.max_position_embeddings
        if rope.get("rope_type") != "longrope":
            return None
        return rope["original_max_position_embeddings"]

    @property
    def _stretches(self) -> bool:
        """True if texts beyond max_position_embeddings get longer waves."""
        return dict(self.rope).get("rope_type") == "dynamic" and "alpha" not in self.rope_keys

    @property
    def longest(self) -> int:
        """Number of tokens of the longest row that is computed as the model would."""
        if self.row_tokens and self.row_tokens <= (self._short_length or 0):
            return min(self._short_length, self.max_position_embeddings)
        if self.row_tokens and self._stretches:
            return int(self.max_position_embeddings * dict(self.rope)["factor"])
        return self.max_position_embeddings

    @property
    def longest_said(self) -> str:
        """Name and value of the attribute that sets `longest`, for messages."""
        if self.longest < self.max_position_embeddings:
            return (
                f"original_max_position_embeddings {self.longest} (a data.sequence_len above it"
                " takes the table of long texts)"
            )
        if self.longest > self.max_position_embeddings:
            stretch = dict(self.rope)["factor"]
            return f"max_position_embeddings {self.max_position_embeddings} x factor {stretch}"
        return f"max_position_embeddings {self.max_position_embeddings}"

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def layers(self) -> tuple[LayerSpec, ...]:
        """Return the spec of each layer; by default all are alike."""
        return (LayerSpec(),) * self.num_hidden_layers

    def block_spec(self, kind: str) -> Any:
        """Return the models.blocks.BlockSpec of the layers of a kind, where `Model` is a
        SpecDecoder."""
        raise NotImplementedError(f"{type(self).__module__} has a Model of its own")

    def layers_by_kind(self) -> dict[str, list[int]]:
        """Return {kind: its layers}: how parameters are stacked."""
        layers: dict[str, list[int]] = {}
        for layer, spec in enumerate(self.layers()):
            layers.setdefault(spec.kind, []).append(layer)
        return dict(sorted(layers.items()))

    def encodings(self) -> dict[str, tuple[np.ndarray, float]]:
        """Return `rope.frequencies` of each position encoding that layers() names; a layer with
        another name rotates nothing."""
        tables = dict(self.rope) if self.rope_by_kind else {"default": self.rope}
        return {
            name: frequencies(
                self.head_size,
                dict(rope),
                self.rope_keys,
                self.max_position_embeddings,
                self.row_tokens,
            )
            for name, rope in tables.items()
        }

    @property
    def rope_axes(self) -> tuple[int, ...] | None:
        """Axis that each frequency turns by where there are images: 0 time, 1 row, 2 column; None:
        all by the position."""
        return None

    @property
    def media_tokens(self) -> Mapping[int, str]:
        """{id of a placeholder token for an image or a video: its key in config.json}; not text to
        train on."""
        return {}

    @property
    def image_blocks(self) -> bool:
        """True if the tokens of an image see all of it, later ones too."""
        return any(spec.mask == IMAGES for spec in self.layers())

    @property
    def never_drawn(self) -> tuple[int, ...]:
        """Tokens of images and videos that no answer holds, where the model reads images."""
        return () if self.vision is None else tuple(sorted(self.media_tokens))

    @property
    def embedding_scale(self) -> float:
        """Factor of embeddings at the input of the layers."""
        return 1.0

    @property
    def norms_embeddings(self) -> bool:
        """True if the last norm stands before the first layer, too."""
        return False

    @property
    def logit_scale(self) -> float:
        """Factor of logits."""
        return 1.0

    @property
    def logit_softcap(self) -> float | None:
        """Soft cap c of logits, c tanh(logits / c); None: no cap."""
        return None

    @property
    def first_position(self) -> int | None:
        """Row of the first position in a table of learned positions; None: there is no table."""
        return None

    @property
    def head_bias(self) -> bool:
        """True if the output projection has a bias."""
        return False

    @property
    def table_copies(self) -> dict[str, str]:
        """Parameters of which folders may hold copies, by the names of these tensors."""
        tied = self.score is None and self.tie_word_embeddings
        copies = dict.fromkeys(HEADS, "embed.embedding") if tied else {}
        return copies if self.mtp is None else {**copies, **dict(self.mtp.copies)}

    @property
    def mtp_form(self) -> Any:
        """models.mtp_form.MTPForm of the family's multi-token prediction heads; None: it has none
        that is computed here."""
        return None

    @property
    def num_predicted(self) -> int | None:
        """Number of multi-token prediction heads by config.json; None: it has no such key."""
        return None

    def inner_config(self, tensors: Collection[str]) -> Self:
        """Return the config of a model whose layers are the blocks of a multi-token prediction
        head. tensors: names of the folder's."""
        return dataclasses.replace(self, num_hidden_layers=1)

    def count_heads(self) -> dict[str, Any]:
        """Return the fields that state one multi-token prediction head in config.json."""
        return {}

    @property
    def experts_per_token(self) -> tuple[int, int] | None:
        """(experts of a token, experts) of a mixture of experts; None for dense models."""
        return None
