"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): a head guesses the token
after the next one.

    final state of a token, norm ────┐
                                     ├─ fc ──> block ──> norm, the model's head ──> guess
    embedding of the next token, norm┘

Pair c is made of the state of the token before c and the embedding of token c; it has the position
of the state, and its guess is what follows token c. In a packed row pair c stands in the place of
token c, and its state is that of `prev[c]`: so each child of a node has a pair of its own, and
branches and documents are exactly what they would be alone.

Shapes: B rows, T tokens, D features.
"""

import dataclasses
from collections.abc import Collection
from typing import Any, NamedTuple, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtrain_kernels import Context
from typing_extensions import override

from jaxtrain.batch import Batch
from jaxtrain.errors import UserError
from jaxtrain.layers.linear import Linear
from jaxtrain.layers.mixer import place_new
from jaxtrain.layers.rope import angles
from jaxtrain.layers.stack import DecodingStates, Stack, StackInputs
from jaxtrain.models.decoder import (
    CachedStack,
    DecoderCache,
    DecoderOptions,
    EmbeddingAndHead,
)
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.draft import Draft
from jaxtrain.models.families import family
from jaxtrain.models.mtp_form import MTPForm

NUM_DRAFTED = 2
"""Tokens that a head guesses when it drafts: the second one from its own state."""


@dataclasses.dataclass(frozen=True)
class MTPHead:
    """The head of a config whose model has one; see `with_head`."""

    form: MTPForm
    inner: Any
    """DecoderConfig of a model with the head's blocks as its layers."""
    drawn: bool = False
    """True if the folder has no head, so that it is initialized at random."""
    copies: tuple[tuple[str, str], ...] = ()
    """(tensor, parameter) of the folder's copies of the embedding and the head."""
    others: tuple[str, ...] = ()
    """Beginnings of the names of the folder's further heads, which are carried along."""

    def build(
        self, config: DecoderConfig, options: DecoderOptions, rngs: nnx.Rngs
    ) -> "PredictionHead":
        """Build the head of a Decoder."""
        return PredictionHead(config, options, rngs)


class PredictionHead(CachedStack):
    """The head of a Decoder, whose embedding and output projection it borrows.

    As a CachedStack it has the states of pairs."""

    def __init__(self, config: DecoderConfig, options: DecoderOptions, rngs: nnx.Rngs):
        head, init = config.mtp, options.layer_init(config, rngs)
        width, inner = config.hidden_size, head.inner

        def norm() -> Any:
            return config.norm(width, eps=config.rms_norm_eps, param_dtype=init.param_dtype)

        self.embed_norm, self.hidden_norm, self.norm = norm(), norm(), norm()
        self.fc = Linear(2 * width, width, axes=("embed", None), init=init)
        # No family's blocks depend on the model that they are in.
        make_block = family(inner).Model.make_block
        self.stack = Stack(
            inner.layers(),
            lambda kind, rngs: make_block(cast(Any, None), kind, inner, options, rngs),
            remat=options.remat,
            scan=False,
            rngs=rngs,
        )
        self.encodings = tuple(
            (name, tuple(frequency.tolist()), factor)
            for name, (frequency, factor) in inner.encodings().items()
        )
        self.copies = tuple(name for name, _ in head.copies)
        self.hidden_first, self.feeds_normed = head.form.hidden_first, head.form.feeds_normed

    @property
    def compute_dtype(self) -> Any:
        """Dtype of activations and matmuls."""
        return self.fc.dtype

    def __call__(
        self,
        hidden_BTD: jax.Array,
        embedded_BTD: jax.Array,
        context: Context,
        cache: DecodingStates | None = None,
    ) -> tuple[jax.Array, jax.Array, tuple[Any, ...]]:
        """Return (final-normed states [B, T, D] of pairs, states that a further pair reads, states
        of the layers after them; none without a cache). context: of the pairs."""
        pair = [self.embed_norm(embedded_BTD), self.hidden_norm(hidden_BTD)]
        x_BTD = self.fc(jnp.concatenate(pair[::-1] if self.hidden_first else pair, axis=-1))
        assert context.positions is not None
        cos_sin = {
            name: angles(context.positions, jnp.asarray(frequency), factor, self.compute_dtype)
            for name, frequency, factor in self.encodings
        }
        outputs, states = self.stack(x_BTD, StackInputs(context, cos_sin), cache)
        normed_BTD = self.norm(outputs.hidden)
        return normed_BTD, normed_BTD if self.feeds_normed else outputs.hidden, states

    def read_rows(self, model: EmbeddingAndHead, hidden_BTD: jax.Array, batch: Batch) -> jax.Array:
        """Return the final-normed states [B, T, D] of the pairs of packed rows, of the model's
        hidden states of a batch [B, T]; a root has none, and what stands in its place means
        nothing."""
        before_BT = jnp.maximum(batch.prev, 0)
        state_BTD = jnp.take_along_axis(hidden_BTD, before_BT[:, :, None], axis=1)
        until_BT = jnp.where(batch.prev >= 0, batch.until, 0)  # nobody sees a root
        positions_BT = jnp.maximum(batch.positions - 1, 0)
        context = Context(until_BT, None, positions_BT, positions_BT, batch.prev)
        return self(state_BTD, model.embed(batch.tokens), context)[0]


def with_head(
    config: DecoderConfig, tensors: Collection[str] | None, key: str = "model.mtp.train"
) -> DecoderConfig:
    """Return the config of a model with its multi-token prediction head.

    tensors: names of the folder's; None: all weights are drawn. A folder without a head gets a
    drawn one. Raises UserError, naming `key`, for a family whose head is not computed here, for
    several heads, and for a model that scores texts.
    """
    form, count = config.mtp_form, config.num_predicted
    if config.score is not None:
        raise UserError(f"{key}: a model that scores texts predicts no tokens; remove it")
    if form is None:
        raise UserError(
            f"{key}: {config.architecture} has no multi-token prediction head that is computed here"
            " (docs/speculative.md lists the families that have one); remove it"
        )
    if (count or 0) > 1:
        raise UserError(
            f"{key}: config.json says {form.count_key}={count}, and only models with one head are"
            " supported; remove it, and the heads are copied as they are"
        )
    names = frozenset(tensors or ())
    drawn = tensors is None or not any(name.startswith(form.root) for name in names)
    table = "embed.embedding"
    copies = tuple(
        (form.root + name, table if config.tie_word_embeddings else param)
        for name, param in form.copies
        if form.root + name in names
    )
    beginnings = {
        form.further + name.removeprefix(form.further).split(".")[0] + "."
        for name in names
        if form.further and name.startswith(form.further)
    }
    others = tuple(sorted(beginnings - {form.root}))
    inner, drawn = config.inner_config(names), drawn and tensors is not None
    head = MTPHead(form, inner, drawn, copies, others)
    return dataclasses.replace(config, mtp=head, **config.count_heads())


class HeadPart(nnx.Module):
    """The head alone, under the paths that it has in the whole model."""

    def __init__(self, config: DecoderConfig, options: DecoderOptions, rngs: nnx.Rngs):
        self.mtp = PredictionHead(config, options, rngs)


class HeadCache(NamedTuple):
    """State of the tokens that were read."""

    pairs: DecoderCache
    """Cache of the pairs, one less than tokens."""
    pending: jax.Array
    """[B, D] state of the last token, whose pair waits for the next one."""
    length: jax.Array
    """int32 [B]: tokens."""


class HeadDraft(Draft):
    """The head as a draft of its model, with the interface of models.draft: it reads its own state
    and guess to guess further ahead."""

    def __init__(self, head: PredictionHead, num_layers: int):
        """num_layers: layers of the model, of which it reads the last."""
        self.head, self.capture = head, (num_layers - 1,)
        self.num_drafted = NUM_DRAFTED
        self.stored: tuple[tuple[str, str], ...] = ()

    @property
    def compute_dtype(self) -> Any:
        """Dtype of activations and matmuls."""
        return self.head.compute_dtype

    def unstack(self) -> Self:
        """Return this draft with its blocks stored separately."""
        self.head.unstack()
        return self

    @override
    def step_flops(self, batch: Batch, tokens: int, spans: np.ndarray) -> float:
        raise AssertionError("a head trains beside its model, not as a draft")

    @override
    def init_cache(self, rows: int, slots: int, dtype: Any = None) -> HeadCache:
        pairs = self.head.init_cache(rows, slots + self.num_drafted, dtype)
        width = self.head.norm.scale[...].shape[-1]
        return HeadCache(
            pairs, jnp.zeros((rows, width), self.compute_dtype), jnp.zeros(rows, jnp.int32)
        )

    @override
    def grow_cache(self, cache: HeadCache, rows: int, slots: int) -> HeadCache:
        extra = rows - len(cache.length)
        return HeadCache(
            self.head.grow_cache(cache.pairs, rows, slots + self.num_drafted),
            jnp.pad(cache.pending, ((0, extra), (0, 0))),
            jnp.pad(cache.length, (0, extra)),
        )

    @override
    def insert(
        self, cache: HeadCache, rows_R: jax.Array, filled: HeadCache, source_R: jax.Array
    ) -> HeadCache:
        return HeadCache(
            self.head.insert(cache.pairs, rows_R, filled.pairs, source_R),
            cache.pending.at[rows_R].set(filled.pending[source_R], mode="drop"),
            cache.length.at[rows_R].set(filled.length[source_R], mode="drop"),
        )

    @override
    def read(
        self,
        cache: HeadCache,
        target: EmbeddingAndHead,
        tokens_BT: jax.Array,
        states_BTF: jax.Array,
        counts_B: jax.Array,
    ) -> HeadCache:
        T = tokens_BT.shape[1]
        hidden_BTD = target.norm(states_BTF).astype(self.compute_dtype)
        before_BTD = jnp.concatenate([cache.pending[:, None], hidden_BTD[:, :-1]], axis=1)
        # The first token of a text has no pair: its row begins with the second one.
        first_B = (cache.length == 0).astype(jnp.int32)
        index_BT = jnp.minimum(jnp.arange(T, dtype=jnp.int32) + first_B[:, None], T - 1)
        before_BTD = jnp.take_along_axis(before_BTD, index_BT[:, :, None], axis=1)
        paired_BT = jnp.take_along_axis(tokens_BT, index_BT, axis=1)
        start_B = cache.pairs.length
        end_B = start_B + jnp.maximum(counts_B - first_B, 0)
        context, decoding = place_new(start_B, end_B, T)
        decoding_states = DecodingStates(cache.pairs.states, decoding)
        _, _, states = self.head(before_BTD, target.embed(paired_BT), context, decoding_states)
        last_B11 = jnp.maximum(counts_B - 1, 0)[:, None, None]
        last_BD = jnp.take_along_axis(hidden_BTD, last_B11, axis=1)[:, 0]
        pending_BD = jnp.where(counts_B[:, None] > 0, last_BD, cache.pending)
        return HeadCache(DecoderCache(states, end_B), pending_BD, cache.length + counts_B)

    @override
    def propose(self, cache: HeadCache, target: EmbeddingAndHead, token_B: jax.Array) -> jax.Array:
        states, state_BD, guesses = cache.pairs.states, cache.pending, []
        for number in range(self.num_drafted):
            start_B = cache.pairs.length + number
            context, decoding = place_new(start_B, start_B + 1, 1)
            decoding_states = DecodingStates(states, decoding)
            embedded_B1D = target.embed(token_B[:, None])
            pair = state_BD[:, None], embedded_B1D
            normed, fed, states = self.head(*pair, context, decoding_states)
            state_BD = fed[:, 0]
            token_B = target.logits(normed[:, 0]).argmax(-1).astype(jnp.int32)
            guesses.append(token_B)
        return jnp.stack(guesses, axis=1)
