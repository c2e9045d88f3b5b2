"""DFlash (Chen et al. 2026): a draft that guesses a block of tokens in one pass.

    captured states [C * D] ── fc, hidden_norm ──> context, the same for all layers
    token, mask, mask, ...  ── target's embedding ──> block ── layers ──> norm ── target's head

Queries are the block's alone; keys and values are those of the context before the block and of the
block itself, which is seen both ways. Tensors are named as in z-lab's, SGLang's and vLLM's code.

Shapes: B rows, T packed tokens, A blocks of K places, Q = A * K, F = C * D captured features.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtrain_kernels import Context
from typing_extensions import override

from jaxtrain.batch import ANCHOR, NEXT, Batch
from jaxtrain.distributed.sharding import constrain
from jaxtrain.errors import UserError
from jaxtrain.huggingface.config import read_fields, write_fields
from jaxtrain.huggingface.files import describe, spell
from jaxtrain.huggingface.ops import ParameterEntry, TensorRef, Transpose
from jaxtrain.layers.block_attention import BlockAttention, DraftContext, block_context
from jaxtrain.layers.linear import Linear
from jaxtrain.layers.mixer import Decoding, LayerSpec
from jaxtrain.layers.norm import RMSNorm
from jaxtrain.layers.rope import Angles, angles
from jaxtrain.layers.stack import DecodingStates, Stack, StackInputs
from jaxtrain.models.blocks import AttentionSpec, BlockSpec
from jaxtrain.models.decoder import DecoderCache, DecoderOptions, EmbeddingAndHead
from jaxtrain.models.draft import DRAFT_FIELDS, BaseDraftConfig, Draft
from jaxtrain.models.naming import with_prefix
from jaxtrain.models.windows import windowed_layers

KEYS = ("block_size", "dflash_config", "num_target_layers", "auto_map", "is_causal")
"""Keys of config.json that no decoder has."""
MAX_BLOCK = 2**10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(BaseDraftConfig):
    architecture: ClassVar[str] = "DFlashDraftModel"
    model_type: ClassVar[str] = "qwen3"

    mask_token_id: int
    block_size: int
    """K: the token that is known, and K - 1 guesses."""
    attention_bias: bool = False
    """On all four projections."""
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 0
    layer_types: tuple[str, ...] | None = None

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """Read a config.json as jaxtrain, z-lab and SpecForge write it."""
        inner = raw.get("dflash_config")
        if not isinstance(inner, Mapping):
            raise UserError(
                f"config.json: dflash_config is {describe(inner)}; a DFlash draft has an object"
                " with mask_token_id and target_layer_ids"
            )
        supported = ("mask_token_id", "target_layer_ids", "causal", "use_swa")
        for key, value in inner.items():
            if key not in supported[:2] and value not in (None, False):
                raise UserError(
                    f"config.json: dflash_config.{spell(key)} is {describe(value)}, which is not"
                    " supported; drafts of this code have none"
                )
        if raw.get("is_causal"):
            raise UserError("config.json: is_causal is true; blocks of a DFlash draft are not")
        capture, mask = inner.get("target_layer_ids"), inner.get("mask_token_id")
        if not (
            isinstance(capture, list)
            and capture
            and all(type(layer) is int and 0 <= layer < 2**12 for layer in capture)
        ):
            raise UserError(
                f"config.json: dflash_config.target_layer_ids is {describe(capture)}; it is a list"
                " of layers of the target, from 0"
            )
        size, layers = raw.get("block_size"), raw.get("num_target_layers")
        for key, value, most in (
            ("block_size", size, MAX_BLOCK),
            ("dflash_config.mask_token_id", mask, 2**24),
            *([] if layers is None else [("num_target_layers", layers, 2**12)]),
        ):
            if type(value) is not int or not 0 <= value <= most:
                raise UserError(
                    f"config.json: {key} is {describe(value)}; it is a number up to {most}"
                )
        plain = {key: value for key, value in raw.items() if key not in KEYS}
        if "sliding_attention" in (raw.get("layer_types") or ()):
            plain["use_sliding_window"] = True  # else transformers forgets the window
        values = {key: v for key, v in read_fields(cls, plain).items() if key not in DRAFT_FIELDS}
        config = cls(
            **values,
            capture=tuple(capture),
            target_hidden_size=values["hidden_size"],
            num_target_layers=layers,
            mask_token_id=mask,
            block_size=size,
        )
        config.check()
        return config

    def to_hf(self) -> dict[str, Any]:
        """Return the content of a config.json that z-lab's code, SGLang and vLLM read."""
        raw = {key: value for key, value in write_fields(self).items() if key not in DRAFT_FIELDS}
        return raw | {
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "block_size": self.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.capture),
            },
            "num_target_layers": self.num_target_layers,
            "layer_types": list(self.layer_types or ["full_attention"] * self.num_hidden_layers),
            "use_sliding_window": "sliding_attention" in (self.layer_types or ()),
            "attention_dropout": 0.0,
            "dtype": "float32",  # saving.save writes what it is
        }

    @override
    def check(self) -> None:
        super().check()
        if self.block_size < 2:
            raise UserError(f"config.json: block_size is {self.block_size}; it is at least 2")

    def layers(self) -> tuple[LayerSpec, ...]:
        return windowed_layers(self.num_hidden_layers, self.layer_types, self.sliding_window)

    def block_spec(self, kind: str) -> BlockSpec:
        bias = self.attention_bias
        attention = AttentionSpec(
            layer=BlockAttention, qkv_bias=bias, out_bias=bias, qk_norm="head"
        )
        return BlockSpec(attention)


def spread_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers of a target of `num_layers`, evenly from 1 to the third last (the middle one,
    if one): z-lab's build_target_layer_ids. A small target may have some of them twice."""
    if count == 1:
        return (num_layers // 2,)
    first, last = 1, num_layers - 3
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))


class GuessBlocks(NamedTuple):
    """The guesses of rows."""

    hidden: jax.Array
    """[B, A, K, D], normed: what the target's head reads."""
    index: jax.Array
    """int32 [B, A, K] row index of the token that each place stands for, the anchor first; -1 where
    there is none."""


class Model(Draft):
    def __init__(self, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        init = options.layer_init(config, rngs)
        width, eps = config.hidden_size, config.rms_norm_eps
        norm = {"eps": eps, "param_dtype": init.param_dtype}
        self.fc = Linear(config.num_captured, width, axes=("mlp", "embed"), init=init)
        self.hidden_norm = RMSNorm(width, **norm)
        self.stack = Stack(
            config.layers(),
            lambda kind, rngs: config.block_spec(kind).build(config, options, rngs),
            remat=options.remat,
            scan=options.scan_layers,
            rngs=rngs,
        )
        self.norm = RMSNorm(width, **norm)
        ((frequency, factor),) = config.encodings().values()
        self.frequency, self.factor = tuple(frequency.tolist()), factor
        self.stored: tuple[tuple[str, str], ...] = ()
        self.capture, self.block_size = config.capture, config.block_size
        self.vocab_size = config.vocab_size
        self.mask_token_id, self.num_drafted = config.mask_token_id, config.block_size - 1

    @property
    def compute_dtype(self) -> Any:
        """Dtype of activations and matmuls."""
        return self.fc.dtype

    def hidden(
        self, target: EmbeddingAndHead, batch: Batch, states_BTF: jax.Array, num_blocks: int
    ) -> GuessBlocks:
        """The blocks of rows [B, T] that begin where the stream ANCHOR says, at most `num_blocks` a
        row, and go on along NEXT. states_BTF: the captured states of the row's tokens."""
        B, T = batch.tokens.shape
        anchors_BA = find_anchors(batch.streams[ANCHOR], num_blocks)
        index_BAK = chain(anchors_BA, batch.streams[NEXT], self.block_size)
        real_BA1 = anchors_BA[:, :, None] < T
        known_BA1 = jnp.minimum(anchors_BA, T - 1)[:, :, None]
        place_K = jnp.arange(self.block_size, dtype=jnp.int32)

        def at_anchor(x_BT: jax.Array) -> jax.Array:
            return jnp.take_along_axis(x_BT[:, :, None], known_BA1, axis=1)

        token_BAK = jnp.where(
            (place_K == 0) & real_BA1, at_anchor(batch.tokens), jnp.int32(self.mask_token_id)
        )
        start_BA1 = jnp.where(real_BA1, at_anchor(batch.positions), 0)
        positions_BQ = (start_BA1 + place_K).reshape(B, -1)
        context = block_context(
            anchors_BA, batch.until, self.block_size, positions_BQ, batch.positions
        )
        draft_context = self._draft_context(states_BTF, batch.positions)
        x_BQD = self._run(target, token_BAK.reshape(B, -1), context, side_context=draft_context)
        return GuessBlocks(x_BQD.reshape(B, -1, self.block_size, x_BQD.shape[-1]), index_BAK)

    def step_flops(self, batch: Batch, tokens: int, spans: np.ndarray) -> float:
        """Count the blocks through the layers, the target's head without its own gradient, and the
        context's keys and values. Windows are ignored."""
        anchors = np.asarray(batch.streams[ANCHOR]) > 0
        count, K = int(anchors.sum()), self.block_size
        per_block, context, pairs = 0.0, self.fc.kernel.get_value().size, 0.0
        seen = int(np.asarray(batch.positions)[anchors].sum()) + count * K
        for _, node in nnx.iter_graph(self.stack):
            if isinstance(node, Linear):
                per_block += node.kernel.get_value().size
            if isinstance(node, BlockAttention):
                context += node.k.kernel.get_value().size + node.v.kernel.get_value().size
                pairs += 4.0 * node.num_heads * node.head_dim * len(self.stack.specs) * K * seen
        head = 4.0 * self.vocab_size * self.norm.scale.get_value().size * count * (K - 1)
        return 6.0 * (per_block * count * K + context * tokens) + 3.0 * pairs + head

    @override
    def read(
        self,
        cache: DecoderCache,
        target: EmbeddingAndHead,
        tokens_BT: jax.Array,
        states_BTF: jax.Array,
        counts_B: jax.Array,
    ) -> DecoderCache:
        start_B = cache.length
        decoding = Decoding(start_B, start_B + counts_B)
        token_T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
        draft_context = self._draft_context(states_BTF, start_B[:, None] + token_T)
        states = tuple(
            block.mixer.place_state(block.mixer.read(draft_context, spec, state, decoding))
            for (spec, block), state in zip(self.stack.singles(), cache.states, strict=True)
        )
        return DecoderCache(states, decoding.end)

    @override
    def propose(
        self, cache: DecoderCache, target: EmbeddingAndHead, token_B: jax.Array
    ) -> jax.Array:
        B, K = len(token_B), self.block_size
        rest_BK = jnp.full((B, K - 1), self.mask_token_id, jnp.int32)
        token_BK = jnp.concatenate([token_B[:, None].astype(jnp.int32), rest_BK], axis=1)
        positions_BK = cache.length[:, None] + jnp.arange(K, dtype=jnp.int32)
        context = Context(jnp.zeros((B, K), jnp.int32), None, positions_BK, positions_BK)
        decoding = Decoding(cache.length, cache.length + K)
        states = DecodingStates(cache.states, decoding)
        x_BKD = self._run(target, token_BK, context, states)
        return jnp.argmax(target.logits(x_BKD[:, 1:]), axis=-1).astype(jnp.int32)

    def _draft_context(self, states_BTF: jax.Array, positions_BT: jax.Array) -> DraftContext:
        """The context of all layers."""
        x_BTF = constrain(states_BTF.astype(self.compute_dtype), "rows", "length", "act_mlp")
        x_BTD = self.hidden_norm(self.fc(x_BTF))
        return DraftContext(
            constrain(x_BTD, "rows", "length", "features"), self._angles(positions_BT)
        )

    def _angles(self, positions_BT: jax.Array) -> Angles:
        return angles(positions_BT, self.frequency, self.factor, self.compute_dtype)

    def _run(
        self,
        target: EmbeddingAndHead,
        token_BQ: jax.Array,
        context: Context,
        cache: DecodingStates | None = None,
        side_context: DraftContext | None = None,
    ) -> jax.Array:
        x_BQD = target.embed(token_BQ).astype(self.compute_dtype)
        cos_sin = {"default": self._angles(context.positions)}
        inputs = StackInputs(context, cos_sin, side_context=side_context)
        outputs, _ = self.stack(x_BQD, inputs, cache)
        return self.norm(outputs.hidden)


def find_anchors(anchor_BT: jax.Array, num_blocks: int) -> jax.Array:
    """int32 [B, A] row indices of the tokens where a block begins, ascending; T in empty places."""
    T = anchor_BT.shape[1]

    def of_row(anchor_T: jax.Array) -> jax.Array:
        return jnp.nonzero(anchor_T > 0, size=num_blocks, fill_value=T)[0].astype(jnp.int32)

    return jax.vmap(of_row)(anchor_BT)


def chain(anchors_BA: jax.Array, next_BT: jax.Array, block_size: int) -> jax.Array:
    """int32 [B, A, block_size] row indices of the anchors and of what follows each; -1 beyond the
    end and in empty places."""
    T = next_BT.shape[1]
    here_BA = jnp.where(anchors_BA < T, anchors_BA, -1)
    places = [here_BA]
    for _ in range(block_size - 1):
        after_BA = jnp.take_along_axis(next_BT, jnp.maximum(here_BA, 0), axis=1)
        here_BA = jnp.where(here_BA >= 0, after_BA, -1)
        places.append(here_BA)
    return jnp.stack(places, axis=2)


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and the tensors of a draft folder that it is made of."""
    layers = range(config.num_hidden_layers)
    return [
        ParameterEntry("fc.kernel", Transpose(TensorRef("fc.weight"))),
        ParameterEntry("hidden_norm.scale", TensorRef("hidden_norm.weight")),
        ParameterEntry("norm.scale", TensorRef("norm.weight")),
        *with_prefix(config.block_spec("block").names(config, "block", layers), ""),
    ]
