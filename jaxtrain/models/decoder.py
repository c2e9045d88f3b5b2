"""The decoder base class: options, the pass from tokens to hidden states, the cache.

Shapes: B rows, T tokens, D model, L layers, V vocab, R rows to fill.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtrain_kernels import Context

from jaxtrain.batch import IMAGE_SLOT, ROUTED, Batch
from jaxtrain.layers.embed import (
    BiasedHead,
    Embed,
    SeenImages,
    begin_images,
    capped,
    pad_for_bias,
    take_features,
)
from jaxtrain.layers.expert_transport import Transport
from jaxtrain.layers.linear import LayerInit
from jaxtrain.layers.mixer import IMAGES, Decoding, ImageContext, SharedSlots, State, place_new
from jaxtrain.layers.moe import use_transport
from jaxtrain.layers.noise import RowNoise, add_embedding_noise, set_rng_bits, token_rng_bits
from jaxtrain.layers.norm import RMSNorm
from jaxtrain.layers.rope import angles, place_images
from jaxtrain.layers.routes import by_layer, flatten_routes, has_routers
from jaxtrain.layers.score import Score
from jaxtrain.layers.stack import DecodingStates, Stack, StackInputs, StackOutput
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.scores import ScoreHead


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderOptions:
    """Storage and execution options; they change results by rounding only."""

    param_dtype: str = "float32"
    dtype: str = "float32"
    """Dtype of activations and matmuls."""
    remat: str = "none"
    """A key of layers.stack.REMAT."""
    scan_layers: bool = True
    attention_impl: str = "auto"
    experts_impl: str = "auto"
    transport: Transport = Transport()
    """How tokens reach experts of other devices."""
    exact: Any = None
    """A `layers.exact.ExactOps`: numbers of a token do not depend on its batch; None: fast."""
    only_layer: Any = None
    """Index of the one layer to build; `only` of layers.stack.Stack."""

    def layer_init(self, config: DecoderConfig, rngs: nnx.Rngs) -> LayerInit:
        """Return how the parameters of the model's layers are created."""
        std, param_dtype = config.initializer_range, jnp.dtype(self.param_dtype)
        return LayerInit(rngs, std, param_dtype, jnp.dtype(self.dtype))


class DecoderCache(NamedTuple):
    """Per-layer state of the tokens read so far."""

    states: tuple[State, ...]
    """One pytree per layer, opaque to all others; its arrays are [B, ...]."""
    length: jax.Array
    """int32 [B]: tokens seen so far, and so the position of the next one."""


class TrialTokens(NamedTuple):
    """Tokens that were read speculatively, some of which may be taken back by `Decoder.commit`."""

    states: tuple[State, ...]
    """States returned by the layers, in a form of their own; see `Mixer.trials`."""
    tokens: jax.Array
    """int32 [B, T]."""
    start: jax.Array
    """int32 [B]: tokens seen before."""


class Decoded(NamedTuple):
    """Outputs for tokens read behind a cache."""

    hidden: jax.Array
    """[B, T, D], final-normed."""
    cache: Any
    """Cache, or Trial."""
    captured: jax.Array | None = None
    """[B, T, C D]: the outputs of the layers that were asked for, side by side in that order."""
    routed: jax.Array | None = None
    """int32 [B, T, R] of a mixture of experts: the experts that each token went to, as in the
    stream ROUTED."""


def make_score(head: ScoreHead, num_features: int, init: LayerInit) -> Score:
    """Build the layer of a score head."""
    return Score(num_features, len(head.labels), use_bias=head.per == "token", init=init)


class EmbeddingAndHead(nnx.Module):
    """The parts of a language model around its layers, which a draft model borrows from its target:
    `embed`, the final `norm`, the head (`lm_head`; None: the embedding, or `score`)."""

    embed: Embed
    norm: RMSNorm
    lm_head: Embed | None
    score: Score | None
    logit_softcap: float | None = None
    """The attribute of DecoderConfig."""
    exact: Any = None
    """The attribute of DecoderOptions."""
    never_drawn: tuple[int, ...] = ()
    """The attribute of DecoderConfig."""

    def head(self) -> jax.Array:
        """Return the output projection [V, D] in the param dtype; the embedding if tied. With a
        bias it is wider, as the hidden states are."""
        table = self.head_table
        assert table is not None, "a model that scores predicts no tokens"
        return table.table()

    @property
    def head_table(self) -> Embed | None:
        """Table that stores the output projection; None with a score head in its place."""
        if self.score is not None:
            return None
        return self.embed if self.lm_head is None else self.lm_head

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Compute [..., D] -> [..., V] in at least float32; training never has this array."""
        return self.logits_of(self.head(), hidden)

    def logits_of(self, head_VD: jax.Array, hidden: jax.Array) -> jax.Array:
        """Return `logits`, of a head [V, D] in any dtype."""
        wide, head_VD = jnp.promote_types(hidden.dtype, jnp.float32), head_VD.astype(hidden.dtype)
        logits = jnp.einsum("...D,VD->...V", hidden, head_VD, preferred_element_type=wide)
        return capped(logits, self.logit_softcap)


class CachedStack(nnx.Module):
    """A stack of layers with a cache of the tokens it read; activations are in `compute_dtype`."""

    stack: Stack
    carries: tuple[str, ...] = ()
    """The attribute of DecoderConfig."""
    carried_from: str | None = None
    """The folder that holds such tensors."""

    @property
    @abstractmethod
    def compute_dtype(self) -> Any: ...

    def unstack(self) -> Self:
        """Return this model with every layer stored separately, for decoding: see
        `Stack.unstack`."""
        self.stack.unstack()
        return self

    def init_cache(self, rows: int, slots: int, dtype: Any = None) -> DecoderCache:
        """Return an empty cache with room for `slots` tokens a row, by default in the compute
        dtype."""
        dtype = self.compute_dtype if dtype is None else jnp.dtype(dtype)
        states = self.stack.map_states(
            lambda mixer, spec: mixer.init_state(spec, rows, slots, dtype)
        )
        return DecoderCache(states, jnp.zeros(rows, jnp.int32))

    def grow_cache(self, cache: DecoderCache, rows: int, slots: int) -> DecoderCache:
        """Return `cache` with room for more rows or tokens."""
        # Rows and slots keep their indices: callers address both, so mixers pad at the end.
        states = self.stack.map_states(
            lambda mixer, spec, state: mixer.grow_state(spec, state, rows, slots), cache.states
        )
        return DecoderCache(states, jnp.pad(cache.length, (0, rows - len(cache.length))))

    def insert(
        self, cache: DecoderCache, rows_R: jax.Array, filled: DecoderCache, source_R: jax.Array
    ) -> DecoderCache:
        """Return `cache` with some rows replaced by rows of a `filled` one of no more slots; rows
        out of range are dropped."""
        states = self.stack.map_states(
            lambda mixer, _, state, new: mixer.insert_state(state, rows_R, new, source_R),
            cache.states,
            filled.states,
        )
        # Rows that only pad a prefill have an index out of range: they must overwrite nothing.
        return DecoderCache(
            states, cache.length.at[rows_R].set(filled.length[source_R], mode="drop")
        )


class Decoder(EmbeddingAndHead, CachedStack):
    """Embedding, blocks, final norm and head; a family defines its blocks (`make_block`).

    `stored` holds the dtypes of the folder's tensors, from `loading.load` for `saving.save`. With
    `noise`, a RowNoise, `hidden` runs as in training; without it nothing is drawn.
    """

    def __init__(self, config: DecoderConfig, options: DecoderOptions, rngs: nnx.Rngs):
        init = options.layer_init(config, rngs)
        self.embed = Embed(config.vocab_size, config.hidden_size, init=init)
        self.stack = Stack(
            config.layers(),
            lambda kind, rngs: self.make_block(kind, config, options, rngs),
            remat=options.remat,
            scan=options.scan_layers,
            only=options.only_layer,
            rngs=rngs,
        )
        use_transport(self.stack, options.transport, options.experts_impl)
        self.norm = config.norm(
            config.hidden_size, eps=config.rms_norm_eps, param_dtype=jnp.dtype(options.param_dtype)
        )
        head = config.score
        has_head = head is None and not config.tie_word_embeddings
        table = BiasedHead if config.head_bias else Embed
        self.lm_head = table(config.vocab_size, config.hidden_size, init=init) if has_head else None
        self.score = None if head is None else make_score(head, config.hidden_size, init)
        first, width = config.first_position, config.hidden_size
        rows = config.max_position_embeddings + (first or 0)
        self.position_embed = None if first is None else Embed(rows, width, init=init)
        self.first_position = first
        self.encodings = tuple(
            (name, tuple(frequency.tolist()), factor)
            for name, (frequency, factor) in config.encodings().items()
        )
        self.rope_axes = config.rope_axes
        self.image_blocks = config.image_blocks
        self.embedding_scale = config.embedding_scale
        self.norms_embeddings = config.norms_embeddings
        self.logit_scale = config.logit_scale if head is None else 1.0
        self.logit_softcap = config.logit_softcap if head is None else None
        self.stored: tuple[tuple[str, str], ...] = ()
        self.carries = config.carries
        self.experts_per_token = config.experts_per_token if has_routers(self.stack) else None
        self.noise: Any = nnx.data(None)
        # (Images, RowNoise or None) -> features [B, F, D] of images, and those for single layers.
        self.vision = None if config.vision is None else config.vision.build(config, options, rngs)
        self.never_drawn = config.never_drawn
        self.mtp = None if config.mtp is None else config.mtp.build(config, options, rngs)
        if options.exact is not None:
            options.exact.attach(self)

    @abstractmethod
    def make_block(
        self, kind: str, config: DecoderConfig, options: DecoderOptions, rngs: nnx.Rngs
    ) -> nnx.Module:
        """A block of a kind that `config.layers()` names; see `layers.stack.Stack`."""

    def layer_inputs(self, tokens_BT: jax.Array, x_BTD: jax.Array) -> Any:
        """Return the inputs of each layer besides the hidden states, from tokens and their scaled
        embeddings; by default none."""
        return None

    @property
    def compute_dtype(self) -> Any:
        """Dtype of activations and matmuls."""
        return self.embed.dtype

    @property
    def both_sides(self) -> bool:
        """True if in every layer tokens can see all later ones."""
        return all(mixer.both_sides and spec.window is None for spec, mixer in self.stack.mixers())

    @property
    def follows_trees(self) -> bool:
        """True if in every layer packed documents and branches compute what they would alone."""
        return all(mixer.follows_trees for _, mixer in self.stack.mixers())

    @property
    def keeps_packed(self) -> bool:
        """True if `append` can continue from any token of packed rows."""
        return all(mixer.keeps_packed for _, mixer in self.stack.mixers())

    def hidden(self, batch: Batch, capture: Sequence[int] = ()) -> StackOutput:
        """Final-normed hidden states [B, T, D] of a Batch [B, T], times the config's logit_scale,
        with what the blocks noted (see `layers.moe`) and the outputs of the layers in `capture`,
        which count from 0, before the final norm. Padding gives finite values that mean nothing."""
        context = self._context(batch)
        experts = by_layer(self.stack, batch.streams.get(ROUTED))
        rng_bits = None if self.noise is None else self._draw(batch.tokens.shape)
        inputs = self._embed(batch.tokens, context, experts, rng_bits, self.see(batch, context))
        return self._run(*inputs, capture=capture)[0]

    def captured(self, batch: Batch, layers: Sequence[int]) -> jax.Array:
        """Return the outputs [B, T, C * D] of C layers, concatenated, as `hidden` captures them.
        Layers behind the last of them do not run."""
        context = self._context(batch)
        depth = max(layers) + 1
        inputs = self._embed(batch.tokens, context, seen=self.see(batch, context))
        outputs = self._run(*inputs, capture=tuple(layers), depth=depth)[0].captured
        return jnp.concatenate([outputs[layer] for layer in layers], axis=-1)

    def _context(self, batch: Batch) -> Context:
        """Return the mask of a batch."""
        return Context(batch.until, batch.since, batch.positions, batch.positions, batch.prev)

    def init_packed(self, rows: int, slots: int) -> tuple[State, ...]:
        """Return empty states for `append`, in the compute dtype."""
        return self.stack.map_states(
            lambda mixer, spec: mixer.init_packed(spec, rows, slots, self.compute_dtype)
        )

    def append(
        self,
        tokens_BQ: jax.Array,
        states: Sequence[State],
        start: jax.Array | int,
        context: Context,
    ) -> tuple[jax.Array, tuple[State, ...]]:
        """Return (final-normed hidden states [B, Q, D] of tokens in the slots from `start` on; the
        states with them). context: of the Q queries with all slots as keys."""
        rows, length = tokens_BQ.shape
        # Slots, not positions: packed rows go on behind any token, and the context alone says
        # where.
        start_B = jnp.full(rows, start, jnp.int32)
        decoding = Decoding(start_B, start_B + length)
        cache = DecodingStates(states, decoding)
        outputs, states = self._run(*self._embed(tokens_BQ, context), cache)
        return outputs.hidden, states

    def scores(self, hidden: jax.Array) -> jax.Array:
        """Compute [..., D] -> [..., n] of a model with a score head, in at least float32."""
        assert self.score is not None, "a language model has no scores"
        return self.score(hidden)

    def decode(
        self,
        tokens_BT: jax.Array,
        cache: DecoderCache,
        counts_B: jax.Array | None = None,
        *,
        capture: Sequence[int] = (),
        trial: bool = False,
        horizon_B: jax.Array | None = None,
        shared: SharedSlots | None = None,
    ) -> Decoded:
        """Read the next T tokens of every row, and return the cache behind them.

        Serves prompts and single steps alike. In each row the first `counts_B` tokens count, by
        default all; later tokens never see those behind them, whose states are meaningless. The
        caller keeps within the slots of the cache. capture: layers, counted from 0. trial: the
        number of tokens that stay is not known yet; returns TrialTokens in place of the cache.
        horizon_B: the tokens see all those before this position, later ones too, which the cache
        holds from an earlier reading. shared: the prefix that rows of
        the cache have in common, which is then read once.
        """
        T = tokens_BT.shape[1]
        end_B = cache.length + (T if counts_B is None else counts_B)
        context, decoding = place_new(cache.length, end_B, T)
        # Only attention reads these two; the context stays that of plain causal rows.
        decoding = decoding._replace(horizon=horizon_B, shared=shared)
        outputs, states = self._run(
            *self._embed(tokens_BT, context),
            DecodingStates(cache.states, decoding, trial),
            capture=capture,
        )
        # In the caller's order, which is that of a draft's input columns.
        captured = [outputs.captured[layer] for layer in capture]
        return Decoded(
            outputs.hidden,
            # A trial keeps the tokens: recurrent layers must read the accepted ones again, see
            # `commit`.
            TrialTokens(states, tokens_BT, cache.length) if trial else DecoderCache(states, end_B),
            jnp.concatenate(captured, axis=-1) if captured else None,
            flatten_routes(outputs.notes.get("routed")),
        )

    def decode_seen(
        self,
        seen: SeenImages | jax.Array,
        tokens_BT: jax.Array,
        cache: DecoderCache,
        counts_B: jax.Array,
        shared: SharedSlots | None = None,
    ) -> Decoded:
        """Read tokens as `decode` does, where prompts have images. seen: the images among the
        tokens; or, behind images, a token's position less its index, int32 [B]."""
        end_B = cache.length + counts_B
        context, decoding = place_new(cache.length, end_B, tokens_BT.shape[1])
        cached = DecodingStates(cache.states, decoding._replace(shared=shared))
        outputs, states = self._run(*self._embed(tokens_BT, context, seen=seen), cached)
        routed = flatten_routes(outputs.notes.get("routed"))
        return Decoded(outputs.hidden, DecoderCache(states, end_B), None, routed)

    def commit(self, trial: TrialTokens, counts_B: jax.Array) -> DecoderCache:
        """Return the cache after the first `counts_B` of a trial's T tokens, as if no more had been
        read; int32 [B], 0 to T."""
        # Recurrent states cannot step back: such layers read the accepted tokens once more, from
        # the state before the trial. The context has all T tokens, so that shapes stay static;
        # `until` hides the rejected ones.
        end_B = trial.start + counts_B
        context, decoding = place_new(trial.start, end_B, trial.tokens.shape[1])
        _, inputs = self._embed(trial.tokens, context)
        tried = DecodingStates(trial.states, decoding)
        return DecoderCache(self.stack.commit(inputs, tried), end_B)

    def _embed(
        self,
        tokens_BT: jax.Array,
        context: Context,
        experts: jax.Array | None = None,
        rng_bits: jax.Array | None = None,
        seen: SeenImages | jax.Array | None = None,
    ) -> tuple[jax.Array, StackInputs]:
        """Return (scaled embeddings [B, T, D], the stack's other inputs)."""
        x_BTD = scaled(self.embed(tokens_BT), self.embedding_scale)
        if self.position_embed is not None:
            x_BTD += self.position_embed(context.positions + self.first_position)
        if self.norms_embeddings:
            x_BTD = self._by_token(lambda norm, x_BTD: norm(x_BTD), self.norm, x_BTD)
        if rng_bits is not None and self.noise.alpha:
            positions_BT, until_BT = context.positions, context.until
            x_BTD = add_embedding_noise(x_BTD, rng_bits, positions_BT, until_BT, self.noise.alpha)
        positions, side_context, masks = context.positions, None, {}
        if isinstance(seen, jax.Array):
            positions = positions + seen[:, None]
        elif seen is not None:
            features_BTD = take_features(seen.slot, seen.features).astype(x_BTD.dtype)
            x_BTD = jnp.where(seen.slot[..., None] < 0, x_BTD, features_BTD)
            side_context = ImageContext(seen.slot, seen.deep) if seen.deep else None
            if seen.rope is not None:
                positions = seen.rope[..., np.array(self.rope_axes)]
            if seen.since is not None:
                masks = {IMAGES: context._replace(since=seen.since)}
        turn = angles if self.exact is None else self.exact.angles
        cos_sin = {
            name: turn(positions, frequency, factor, self.embed.dtype)
            for name, frequency, factor in self.encodings
        }
        extra = self.layer_inputs(tokens_BT, x_BTD)
        return x_BTD, StackInputs(context, cos_sin, extra, experts, side_context, rng_bits, masks)

    def see(self, batch: Batch, context: Context) -> SeenImages | None:
        """Run the tower on the images of a batch, if it has any."""
        images = batch.images
        if images is None:
            return None
        assert self.vision is not None, "a batch with images for a model of text alone"
        slot_BT, rope, since = batch.streams[IMAGE_SLOT], None, None
        features, deep = self.vision(images, self.noise)
        if self.rope_axes is not None:
            grid = (images.row_col, images.grid, self.vision.merge)
            rope = place_images(context.positions, context.until, slot_BT, *grid)
        if self.image_blocks:
            assert batch.since is None, "blocks of images beside others"
            since = begin_images(slot_BT, images.since, self.vision.merge)
        return SeenImages(slot_BT, features, deep, rope, since)

    def _draw(self, shape: tuple[int, ...]) -> jax.Array:
        """Return random bits [B, T] of the tokens of a training pass, and give them to the modules
        outside of the stack that draw."""
        noise: RowNoise = self.noise
        assert noise.rng_bits_B.shape == shape[:1], f"rows {noise.rng_bits_B.shape} of {shape}"
        rng_bits_BT = token_rng_bits(noise.rng_bits_B, shape[1])
        for part in vars(self).values():
            # The stack gets its bits as an input of its scan; a tower has other rows.
            if isinstance(part, nnx.Module) and part not in (self.stack, self.vision):
                set_rng_bits(part, rng_bits_BT)
        return rng_bits_BT

    def _run(
        self,
        x_BTD: jax.Array,
        inputs: StackInputs,
        cache: DecodingStates | None = None,
        *,
        capture: Sequence[int] = (),
        depth: int | None = None,
    ) -> tuple[StackOutput, tuple[State, ...]]:
        outputs, states = self.stack(x_BTD, inputs, cache, capture=capture, depth=depth)

        # The scale goes into the hidden states: no loss or sampler must know of it.
        def finish(norm: RMSNorm, x_BTD: jax.Array) -> jax.Array:
            hidden_BTD = scaled(norm(x_BTD), self.logit_scale)
            # So does a bias: no kernel has an argument for it.
            biased = isinstance(self.lm_head, BiasedHead)
            return pad_for_bias(hidden_BTD) if biased else hidden_BTD

        hidden_BTD = self._by_token(finish, self.norm, outputs.hidden)
        return outputs._replace(hidden=hidden_BTD), states

    def _by_token(
        self, fn: Callable[[Any, jax.Array], jax.Array], module: nnx.Module, x_BTD: jax.Array
    ) -> jax.Array:
        """Return fn(module, x_BTD), which reads each token alone."""
        exact = self.exact
        return fn(module, x_BTD) if exact is None else exact.module(fn, module, x_BTD)


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Multiply x by a number, in x's dtype."""
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)
