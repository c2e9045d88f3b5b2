"""Draft models: small networks that guess a target's next tokens from the outputs of its layers.

    target layers ── captured states [.., C * D] ──> draft ── K guesses ──> the target verifies them

A draft borrows the target's embedding (and its head, unless it has one) and is trained and stored
without them. Draft families have Config, Model and names() like decoder families, so they are
built, loaded and saved the same way.

Shapes: B rows, T tokens, D the target's features, C captured layers, K guesses, R rows to fill.
"""

import dataclasses
from abc import abstractmethod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.batch import Batch
from jaxtrain.errors import UserError
from jaxtrain.layers.embed import Embed
from jaxtrain.models.decoder import CachedStack, DecoderOptions, EmbeddingAndHead
from jaxtrain.models.decoder_config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseDraftConfig(DecoderConfig):
    """Attributes of all drafts besides the sizes of their layers."""

    guesses: ClassVar[bool] = True

    capture: tuple[int, ...]
    """Layers of the target whose output the draft reads, in this order, counted from 0."""
    target_hidden_size: int
    """D."""
    num_target_layers: int | None = None
    """Number of layers of the target; None if exports of the family do not store it."""
    mask_token_id: int | None = None
    """Token that replaces guessed ones, in families that read one."""

    @property
    def num_captured(self) -> int:
        """C * D: features of what the draft reads of a token."""
        return len(self.capture) * self.target_hidden_size


DRAFT_FIELDS = ("capture", "target_hidden_size", "num_target_layers", "mask_token_id")
"""Fields of BaseDraftConfig that are not attributes of a decoder's config.json."""


class TargetEmbeddingAndHead(EmbeddingAndHead):
    """The parts that drafts borrow from a target whose layers are elsewhere; parameters keep the
    paths that they have in the whole model."""

    carries: tuple[str, ...] = ()
    """Empty: it is never exported."""

    def __init__(self, config: DecoderConfig, options: DecoderOptions, rngs: nnx.Rngs):
        init = options.layer_init(config, rngs)
        self.embed = Embed(config.vocab_size, config.hidden_size, init=init)
        self.norm = config.norm(
            config.hidden_size, eps=config.rms_norm_eps, param_dtype=jnp.dtype(options.param_dtype)
        )
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Embed(config.vocab_size, config.hidden_size, init=init)
        self.score = None
        self.stored: tuple[tuple[str, str], ...] = ()


class Draft(CachedStack):
    """A draft model; `target` is always a Decoder or its TargetEmbeddingAndHead.

    Its cache is opaque to callers: that of a `CachedStack` or of the family. `stored` holds the
    dtypes of the folder's tensors, from `loading.load` for `saving.save`.
    """

    stored: tuple[tuple[str, str], ...]
    capture: tuple[int, ...]
    """As in DraftConfig."""
    num_drafted: int
    """K, the tokens that `propose` guesses."""
    head_table: Embed | None = None
    """Table of an output projection of its own; None: it uses the target's."""
    experts_per_token: tuple[int, int] | None = None
    """As in DecoderConfig: no draft has experts."""

    @abstractmethod
    def step_flops(self, batch: Batch, tokens: int, spans: np.ndarray) -> float:
        """Return the FLOPs of a training step besides those of the target's layers, without
        recomputation. batch: on the host, with `tokens` tokens besides padding; spans int [tokens]:
        how many tokens see each. Reads shapes only."""

    @abstractmethod
    def read(
        self,
        cache: Any,
        target: EmbeddingAndHead,
        tokens_BT: jax.Array,
        states_BTF: jax.Array,
        counts_B: jax.Array,
    ) -> Any:
        """Return the cache after the target has read tokens_BT, in each row the first counts_B; the
        others leave no trace. states_BTF [B, T, C * D]: the captured states of the same tokens."""

    @abstractmethod
    def propose(self, cache: Any, target: EmbeddingAndHead, token_B: jax.Array) -> jax.Array:
        """Return int32 [B, K]: the likeliest tokens behind token_B, which was drawn and which the
        target has not read. Rows that have read nothing return arbitrary ids of the vocabulary."""


def check_target(draft: BaseDraftConfig, target: DecoderConfig, key: str = "task.draft") -> None:
    """Raise UserError if a draft does not fit this target. key: the section or option that names
    the draft."""
    draft_width, target_width = draft.target_hidden_size, target.hidden_size
    if draft_width != target_width:
        raise UserError(
            f"{key} reads states of {draft_width} features, the target (model) has hidden_size"
            f" {target_width}; choose the draft of this target"
        )
    if draft.vocab_size != target.vocab_size:
        raise UserError(
            f"{key} has a vocabulary of {draft.vocab_size} tokens, the target (model) of"
            f" {target.vocab_size}; choose the draft of this target"
        )
    plain = (target.embedding_scale, target.logit_scale, target.logit_softcap) == (1.0, 1.0, None)
    if not plain or target.head_bias:
        raise UserError(
            f"{key} reads the target's embedding and head as they are, but {target.architecture}"
            " scales embeddings or logits, or has a bias on its head; no draft can stand beside it"
        )
    check_capture(draft.capture, target.num_hidden_layers, key)
    if draft.num_target_layers not in (None, target.num_hidden_layers):
        raise UserError(
            f"{key} was made for a target of {draft.num_target_layers} layers, the target (model)"
            f" has {target.num_hidden_layers}; choose the draft of this target"
        )
    mask = draft.mask_token_id
    if mask is not None and not 0 <= mask < target.vocab_size:
        raise UserError(
            f"{key}.mask_token_id {mask} is outside of the target's embedding, which has"
            f" {target.vocab_size} rows"
        )


def check_capture(capture: tuple[int, ...], num_layers: int, key: str = "task.draft") -> None:
    """Raise UserError unless the captured layers are distinct layers of the target."""
    setting = f"{key}.target_layers {list(capture)}"
    if not capture:
        raise UserError(f"{setting} is empty; name at least one layer of the target, from 0")
    if outside := [layer for layer in capture if not 0 <= layer < num_layers]:
        raise UserError(
            f"{setting}: the target has {num_layers} layers, which count from 0, so that there is"
            f" no layer {outside[0]}"
        )
    if len(set(capture)) < len(capture):
        twice = next(layer for layer in capture if capture.count(layer) > 1)
        raise UserError(
            f"{setting} names layer {twice} twice (a target of {num_layers} layers); set"
            f" {key}.target_layers to different layers from 0 to {num_layers - 1}"
        )
