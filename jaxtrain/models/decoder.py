"""What the decoders share: sizes, options, the walk from tokens to hidden states, the cache.

Shapes: B rows, T tokens, S cache slots, D model, L layers, K kv heads, H head dim, V vocab.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtrain_kernels import Context

from jaxtrain.batch import Batch
from jaxtrain.errors import UserError
from jaxtrain.hf.config import read_fields, write_fields
from jaxtrain.layers.attention import LayerCache
from jaxtrain.layers.embed import Embed
from jaxtrain.layers.mlp import ACTIVATIONS
from jaxtrain.layers.norm import RMSNorm
from jaxtrain.layers.rope import angles, frequencies
from jaxtrain.layers.stack import Stack


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The config.json attributes that all decoders have; a family adds its own."""

    architecture: ClassVar[str]
    model_type: ClassVar[str]
    mixes_by_attention_only: ClassVar[bool] = True
    """Whether no layer but attention passes anything between tokens. A family with recurrent or
    convolution layers sets it to False: it cannot train trees with shared prefixes."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    hidden_act: str
    max_position_embeddings: int
    initializer_range: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: tuple[tuple[str, Any], ...]
    """Hugging Face's rope_parameters as sorted items."""
    kept: tuple[tuple[str, str], ...] = ()
    """Attributes that are only carried along (token ids, ...), as (key, JSON)."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """From the content of a config.json; UserError for anything that would be ignored."""
        config = cls(**read_fields(cls, raw))
        config.check()
        return config

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json, for transformers 4 and 5."""
        return write_fields(self)

    def check(self) -> None:
        """UserError where the sizes do not fit together."""
        if self.hidden_act not in ACTIVATIONS:
            raise UserError(
                f"config.json: hidden_act={self.hidden_act!r}; supported: {sorted(ACTIVATIONS)}"
            )
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if kv_heads < 1 or heads % kv_heads:
            raise UserError(
                f"config.json: num_attention_heads={heads} must be a multiple of "
                f"num_key_value_heads={kv_heads}"
            )
        if self.head_dim is None and self.hidden_size % heads:
            raise UserError(
                f"config.json: hidden_size={self.hidden_size} must be a multiple of "
                f"num_attention_heads={heads} where head_dim is not given"
            )
        if self.head_size % 2:
            raise UserError(f"config.json: head_dim={self.head_size} must be even for rotation")
        frequencies(self.head_size, dict(self.rope))
        self.windows()

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer; None sees everything."""
        return (None,) * self.num_hidden_layers

    def kinds(self) -> tuple[str, ...]:
        """Kind of each layer; all are "block" where they have the same parameters."""
        return ("block",) * self.num_hidden_layers

    @property
    def experts_per_token(self) -> tuple[int, int] | None:
        """(experts that a token goes to, experts) of a mixture of experts; None for dense."""
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is stored and run; nothing here changes what it computes but by rounding."""

    param_dtype: str = "float32"
    dtype: str = "float32"
    """Of activations and matmuls."""
    remat: str = "none"
    """none | full | dots | save_attention: see layers.stack.REMAT."""
    scan_layers: bool = True
    attention_impl: str = "auto"

    def layer_options(self, config: DecoderConfig, rngs: nnx.Rngs) -> dict[str, Any]:
        """The keyword arguments that every layer with weights takes."""
        return {
            "init_std": config.initializer_range,
            "param_dtype": jnp.dtype(self.param_dtype),
            "dtype": jnp.dtype(self.dtype),
            "rngs": rngs,
        }


class Cache(NamedTuple):
    """Keys and values of S slots a row; the token at position p of a row lies in slot p."""

    k: jax.Array
    """[L, B, S, K, H]; v the same."""
    v: jax.Array
    length: jax.Array
    """int32 [B]: slots filled so far, and so the position of the next token."""


class Decoder(nnx.Module):
    """Embedding, blocks, final norm and head; `make_block(config, options, rngs)` is the family's.

    `others` makes the blocks of other kinds, where `config.kinds()` names them.
    `stored` is what `build.load` found: the dtype of the folder's tensors, for `build.save`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        options: Options,
        make_block: Callable[[DecoderConfig, Options, nnx.Rngs], nnx.Module],
        rngs: nnx.Rngs,
        others: Mapping[str, Callable[[DecoderConfig, Options, nnx.Rngs], nnx.Module]] = {},
    ):
        common = options.layer_options(config, rngs)
        self.embed = Embed(config.vocab_size, config.hidden_size, **common)
        self.stack = Stack(
            partial(make_block, config, options),
            config.windows(),
            others={kind: partial(make, config, options) for kind, make in others.items()},
            kinds=config.kinds(),
            remat=options.remat,
            scan=options.scan_layers,
            rngs=rngs,
        )
        self.norm = RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, param_dtype=jnp.dtype(options.param_dtype)
        )
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Embed(config.vocab_size, config.hidden_size, **common)
        frequency, self.rope_factor = frequencies(config.head_size, dict(config.rope))
        self.frequency = tuple(frequency.tolist())
        self.stored: tuple[tuple[str, str], ...] = ()
        self.kv_shape = (config.num_key_value_heads, config.head_size)
        self.experts_per_token = config.experts_per_token

    def hidden(
        self, batch: Batch, capture: Sequence[int | str] = ()
    ) -> jax.Array | tuple[jax.Array, dict[int | str, Any]]:
        """Final-normed hidden states [B, T, D] of a Batch [B, T].

        With `capture`, also {layer: output of that layer before the final norm}; layers count
        from 0. "noted" in `capture` adds what the blocks noted, {name: [layers, ...]}: see
        `layers.moe`. Padding gives finite values that mean nothing.
        """
        context = Context(batch.until, batch.since, batch.positions, batch.positions)
        layers = tuple(item for item in capture if item != "noted")
        x_BTD, _, captured, noted = self._run(
            batch.tokens, batch.positions, context, capture=layers
        )
        if "noted" in capture:
            captured["noted"] = noted
        return (x_BTD, captured) if capture else x_BTD

    def head(self) -> jax.Array:
        """Output projection [V, D] in the param dtype; the embedding itself when tied."""
        return (self.embed if self.lm_head is None else self.lm_head).embedding[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> [..., V] in at least float32. For sampling and tests: training uses the
        log-prob kernel, which never holds this array."""
        wide = jnp.promote_types(hidden.dtype, jnp.float32)
        head_VD = self.head().astype(hidden.dtype)
        return jnp.einsum("...D,VD->...V", hidden, head_VD, preferred_element_type=wide)

    def unstack(self) -> "Decoder":
        """This model with every layer stored by itself, for decoding: see `Stack.unstack`."""
        self.stack.unstack()
        return self

    def init_cache(self, batch_size: int, length: int, dtype: Any = None) -> Cache:
        """Empty cache of `length` slots for `batch_size` rows, by default in the compute dtype."""
        dtype = self.embed.dtype if dtype is None else jnp.dtype(dtype)
        shape = (len(self.stack.windows), batch_size, length, *self.kv_shape)
        return Cache(
            jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(batch_size, jnp.int32)
        )

    def decode(
        self, tokens_BT: jax.Array, cache: Cache, counts_B: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]:
        """Final-normed hidden states [B, T, D] of the next T tokens of every row, and the cache.

        Serves prompts and single steps alike. Of a row the first `counts_B` tokens count, by
        default all; what stands behind them is seen by no later token, and its states mean
        nothing. The caller keeps within the cache's length: what lies beyond is not written.
        """
        B, T = tokens_BT.shape
        start_B = cache.length
        end_B = start_B + (T if counts_B is None else counts_B)
        positions_BT = start_B[:, None] + jnp.arange(T, dtype=jnp.int32)
        slots_S = jnp.arange(cache.k.shape[2], dtype=jnp.int32)
        context = Context(
            until=jnp.where(slots_S < end_B[:, None], T, 0).astype(jnp.int32),
            since=jnp.maximum(slots_S - start_B[:, None], 0),
            positions=positions_BT,
            key_positions=jnp.broadcast_to(slots_S, (B, len(slots_S))),
        )
        layers = LayerCache(cache.k, cache.v, layer=0, start=start_B, end=end_B)
        x_BTD, layers, _, _ = self._run(tokens_BT, positions_BT, context, cache=layers)
        return x_BTD, Cache(layers.k, layers.v, end_B)

    def _run(self, tokens_BT, positions_BT, context: Context, *, cache=None, capture=()):
        x_BTD = self.embed(tokens_BT)
        turns = angles(positions_BT, self.frequency, self.rope_factor, x_BTD.dtype)
        x_BTD, cache, captured, noted = self.stack(
            x_BTD, turns, context, cache=cache, capture=capture
        )
        return self.norm(x_BTD), cache, captured, noted
