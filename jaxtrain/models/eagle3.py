"""Eagle3 (Li et al. 2025, arXiv:2503.01840): a draft of one layer that reads its own states.

    the target's state of a token, fc ─┐
                                       ├─ pair ──> layer ──> state ──> norm, head ──> guess
    embedding of the next token ───────┘
              then K - 1 times: that state in the place of the target's, and the guess behind it

Pair c is made of the state of token c - 1 and the embedding of token c; it has the position of the
state, and its guess is what follows token c. In step 0 the states are the target's; in step i those
of the draft's step i - 1, one token further on. A query of step i sees the pairs of step 0 up to
its own and, of the steps 1 to i, those of its own row: just what there will be while decoding.

In a packed row pair c stands in the place of token c, and its state is that of `prev[c]`. So a pair
is of one branch, even behind a fork, and what it sees is exact.

Shapes: B rows, T tokens, D features, F captured features of a token, L steps of the unroll, N heads
on K key-value heads of H dims, S slots of a cache, P ids that the draft can say.
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

from jaxtrain.batch import Batch
from jaxtrain.distributed.sharding import constrain
from jaxtrain.errors import UserError
from jaxtrain.huggingface.config import read_fields, write_fields
from jaxtrain.huggingface.config_checks import check_value
from jaxtrain.huggingface.ops import DraftVocabulary, ParameterEntry, TensorRef, Transpose
from jaxtrain.layers.attention import Attention, AttentionOptions
from jaxtrain.layers.embed import Embed
from jaxtrain.layers.kv_cache import KV
from jaxtrain.layers.linear import Linear
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.mlp import GatedMLP
from jaxtrain.layers.norm import RMSNorm
from jaxtrain.layers.rope import Angles, angles
from jaxtrain.layers.sharded_attention import attend, attend_cached
from jaxtrain.layers.stack import REMAT
from jaxtrain.models.decoder import DecoderOptions, EmbeddingAndHead
from jaxtrain.models.draft import BaseDraftConfig, Draft

BEHIND = "eagle_aux_hidden_state_layer_ids"
DRAFT_FIELDS = {"length", "capture", "num_target_layers", "mask_token_id"}
"""Fields that a config.json has in another form, or not at all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(BaseDraftConfig):
    """`hidden_size` is the target's, whose embedding the draft reads."""

    architecture: ClassVar[str] = "LlamaForCausalLMEagle3"
    model_type: ClassVar[str] = "llama"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "norm_before_residual": (False,),
        "norm_before_fc": (False,),
    }

    draft_vocab_size: int
    """P; as large as vocab_size where nothing is left out."""
    length: int = 7
    """Steps that it was trained for, and tokens that it guesses."""

    @property
    def prunes(self) -> bool:
        """True if the draft's vocabulary is smaller than the target's."""
        return self.draft_vocab_size < self.vocab_size

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """Read a config.json, also one that SpecForge wrote if it names the layers."""
        untied = {**raw, "tie_word_embeddings": False}  # who says true stores a head of P rows, too
        eagle = untied.pop("eagle_config", None) or {}
        behind = untied.pop(BEHIND, None)
        if not isinstance(eagle, dict):
            raise UserError("config.json: eagle_config is no object; write {} or remove it")
        stated = eagle.get(BEHIND) or behind
        layers = stated if isinstance(stated, list) else []
        if eagle.get(BEHIND) is None:
            layers = [layer - 1 for layer in layers if type(layer) is int]
        if not layers or not all(type(layer) is int for layer in layers):
            raise UserError(
                "config.json: eagle_config.eagle_aux_hidden_state_layer_ids does not list the"
                " layers of the target whose output the draft reads; write them there, from 0"
            )
        if not eagle.get("use_aux_hidden_state", True):
            raise UserError(
                "config.json: eagle_config.use_aux_hidden_state is false, as for EAGLE 1 and 2;"
                " only drafts that read several layers of the target are supported"
            )
        if not untied.get("use_sliding_window"):
            untied.pop("max_window_layers", None)
        untied.setdefault("draft_vocab_size", untied.get("vocab_size"))
        untied.setdefault("target_hidden_size", untied.get("hidden_size"))
        fields: dict[str, Any] = {"capture": tuple(layers)}
        for key, name in (("ttt_length", "length"), ("num_target_layers", "num_target_layers")):
            if eagle.get(key) is not None:
                check_value(f"eagle_config.{key}", eagle[key], int)
                fields[name] = eagle[key]
        config = cls(**{**read_fields(cls, untied), **fields})
        config.check()
        return config

    def to_hf(self) -> dict[str, Any]:
        """Write a config.json for SGLang, which counts the captured layers themselves
        (eagle_config), and for vLLM, which counts the layers behind them."""
        raw = {key: value for key, value in write_fields(self).items() if key not in DRAFT_FIELDS}
        raw["auto_map"] = {"AutoModel": f"eagle3.{self.architecture}"}
        raw["target_hidden_size"] = self.target_hidden_size
        raw[BEHIND] = [layer + 1 for layer in self.capture]
        raw["eagle_config"] = {
            "use_aux_hidden_state": True,
            BEHIND: list(self.capture),
            "num_target_layers": self.num_target_layers,
            "ttt_length": self.length,
        }
        return raw

    @override
    def check(self) -> None:
        super().check()
        if self.num_hidden_layers != 1:
            raise UserError(f"{self.num_hidden_layers} layers: an Eagle3 draft has one")
        if self.hidden_size != self.target_hidden_size:
            raise UserError(
                f"hidden_size {self.hidden_size}: an Eagle3 draft reads the target's embedding,"
                f" which has {self.target_hidden_size} features"
            )
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise UserError(
                f"draft_vocab_size {self.draft_vocab_size}: a draft says at least one and at most"
                f" all {self.vocab_size} tokens of the target"
            )
        if not 1 <= self.length <= 64:
            raise UserError(f"length {self.length}: a draft guesses from 1 to 64 tokens")


class Midlayer(nnx.Module):
    """The one layer of the draft. The residual is the incoming state, without a norm."""

    def __init__(self, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        init = options.layer_init(config, rngs)
        width = config.hidden_size

        def norm() -> RMSNorm:
            return RMSNorm(width, eps=config.rms_norm_eps, param_dtype=init.param_dtype)

        self.embed_norm, self.hidden_norm, self.mlp_norm = norm(), norm(), norm()
        self.attention = Attention(
            width,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_size,
            AttentionOptions(num_in=2 * width, impl=options.attention_impl),
            init=init,
        )
        self.mlp = GatedMLP(
            width, config.intermediate_size, activation=config.hidden_act, init=init
        )

    def project(
        self, embedded_BTD: jax.Array, state_BTD: jax.Array, turns: Angles
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return query, key and value of pairs."""
        pair = [self.embed_norm(embedded_BTD), self.hidden_norm(state_BTD)]
        return self.attention.project(jnp.concatenate(pair, axis=-1), turns)

    def finish(self, state_BTD: jax.Array, out_BTNH: jax.Array) -> jax.Array:
        """Return the next state from the state of a pair and the output of its heads."""
        state_BTD = state_BTD + self.attention.project_out(out_BTNH)
        return state_BTD + self.mlp(self.mlp_norm(state_BTD))


class Eagle3Cache(NamedTuple):
    """State of the tokens that were read."""

    pairs: KV
    """[B, S + K, K, H]: pair c - 1 of step 0 in slot c - 1. The last K slots are scratch."""
    pending: jax.Array
    """[B, D] state of the last token, whose pair waits for the next one."""
    length: jax.Array
    """int32 [B] tokens that were read: there is one pair less."""


class Model(Draft):
    """`kept` is a table: it is stored with the weights, and nothing trains it."""

    def __init__(self, config: Config, options: DecoderOptions, rngs: nnx.Rngs):
        init = options.layer_init(config, rngs)
        width = config.hidden_size
        self.fc = Linear(config.num_captured, width, axes=("embed", None), init=init)
        self.midlayer = Midlayer(config, options, rngs)
        self.norm = RMSNorm(width, eps=config.rms_norm_eps, param_dtype=init.param_dtype)
        self.lm_head = Embed(config.draft_vocab_size, width, init=init)
        ids_P = jnp.arange(config.draft_vocab_size, dtype=jnp.int32)
        self.kept = nnx.Param(ids_P, axes=(None,)) if config.prunes else None
        frequency, factor = config.encodings()["default"]
        self.encoding = (tuple(frequency.tolist()), factor)
        self.capture = config.capture
        self.num_drafted = config.length
        self.vocab_size = config.vocab_size
        self.remat = options.remat
        self.stored: tuple[tuple[str, str], ...] = ()

    @property
    def head_table(self) -> Embed:
        """Table of the draft's head, with rows for the ids of its vocabulary."""
        return self.lm_head

    @property
    def compute_dtype(self) -> Any:
        """Dtype of activations and matmuls."""
        return self.fc.dtype

    @property
    def follows_trees(self) -> bool:
        """True: packed documents and branches compute what they would alone."""
        return True

    def kept_ids(self) -> jax.Array:
        """Return int32 [P]: ids of the draft's vocabulary, ascending."""
        if self.kept is None:
            return jnp.arange(self.vocab_size, dtype=jnp.int32)
        return self.kept[...]

    def head(self) -> jax.Array:
        """Return the draft's output projection [P, D], in the param dtype."""
        return self.lm_head.embedding[...]

    def logits(self, state: jax.Array) -> jax.Array:
        """[..., D] normed states -> [..., P] of the kept ids, in at least float32."""
        wide = jnp.promote_types(state.dtype, jnp.float32)
        head_PD = self.head().astype(state.dtype)
        return jnp.einsum("...D,PD->...P", state, head_PD, preferred_element_type=wide)

    def unroll(
        self,
        target: EmbeddingAndHead,
        captured_BTF: jax.Array,
        batch: Batch,
        next_BT: jax.Array,
        length: int,
    ) -> list[jax.Array]:
        """Normed states [B, T, D] of the pairs of rows [B, T] in each of `length` steps: row c of
        step i guesses what follows the i-th token behind c.

        captured_BTF: the target's states of the tokens. next_BT: int32, the token that follows on
        the branch that was chosen, -1 where there is none: row c means nothing from the step on
        that has no token left, nor at a root. `batch.since` is not looked at: drafts are causal.
        """
        prev_BT = jnp.maximum(batch.prev, 0)
        fused_BTD = self.fc(captured_BTF.astype(self.compute_dtype))
        state_BTD = jnp.take_along_axis(fused_BTD, prev_BT[:, :, None], axis=1)
        index_T = jnp.arange(next_BT.shape[1], dtype=jnp.int32)
        own_BT = jnp.broadcast_to(index_T, next_BT.shape)
        first_BT = jnp.where(batch.prev >= 0, batch.until, 0)  # nobody sees a root: it has no pair
        graph, params = nnx.split((self.midlayer, self.norm))

        def step(params, state_BTD, keys, values, tokens_BT, number):
            midlayer, norm = nnx.merge(graph, params)
            embedded_BTD = target.embed(tokens_BT).astype(self.compute_dtype)
            turns = self._turns(jnp.maximum(batch.positions - 1, 0) + number)
            q_BTNH, k_BTKH, v_BTKH = midlayer.project(embedded_BTD, state_BTD, turns)
            keys, values = (*keys, k_BTKH), (*values, v_BTKH)
            later = len(keys) - 1
            since_BS = jnp.concatenate([own_BT] * (later + 1), axis=1)
            until_BS = jnp.concatenate([first_BT, *[own_BT + 1] * later], axis=1)
            context = Context(until_BS, since_BS, own_BT, since_BS)
            k_BSKH, v_BSKH = (jnp.concatenate(x, axis=1) for x in (keys, values))
            out_BTNH = attend(q_BTNH, k_BSKH, v_BSKH, context, impl=midlayer.attention.impl)
            state_BTD = midlayer.finish(state_BTD, out_BTNH)
            return state_BTD, norm(state_BTD), k_BTKH, v_BTKH

        if self.remat != "none":
            step = jax.checkpoint(step, policy=REMAT[self.remat])
        place_BT, keys, values, normed = own_BT, (), (), []
        for number in range(length):
            tokens_BT = jnp.take_along_axis(batch.tokens, jnp.maximum(place_BT, 0), axis=1)
            state_BTD, normed_BTD, k_BTKH, v_BTKH = step(
                params, state_BTD, keys, values, tokens_BT, number
            )
            keys, values = (*keys, k_BTKH), (*values, v_BTKH)
            normed.append(normed_BTD)
            place_BT = follow(next_BT, place_BT)
        return normed

    def step_flops(self, batch: Batch, tokens: int, spans: np.ndarray) -> float:
        """Count the layer and the head in every step, and the target's head once."""
        layer = sum(
            leaf.size for leaf in jax.tree.leaves(nnx.state(self.midlayer)) if leaf.ndim > 1
        )
        mixing = self.midlayer.attention.mixing_flops(LayerSpec(), spans)
        unrolled = self.num_drafted * (6.0 * layer * tokens + 3.0 * mixing)
        (P, D), V = self.lm_head.embedding.get_value().shape, self.vocab_size
        guesses = sum(int(np.count_nonzero(weights)) for weights in batch.weights.values())
        heads = guesses * D * (6.0 * P * self.num_drafted + 2.0 * V + (2.0 * P if P < V else 0.0))
        return unrolled + 6.0 * self.fc.kernel.get_value().size * tokens + heads

    def unstack(self) -> Self:
        """Return the model itself: its one layer is not stacked."""
        return self

    @override
    def init_cache(self, rows: int, slots: int, dtype: Any = None) -> Eagle3Cache:
        dtype = self.compute_dtype if dtype is None else jnp.dtype(dtype)
        attention = self.midlayer.attention
        heads = (attention.num_kv_heads, attention.head_dim)
        shape = (rows, slots + self.num_drafted, *heads)
        width = self.norm.scale[...].shape[-1]
        return place(
            Eagle3Cache(
                KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)),
                jnp.zeros((rows, width), dtype),
                jnp.zeros(rows, jnp.int32),
            )
        )

    @override
    def grow_cache(self, cache: Eagle3Cache, rows: int, slots: int) -> Eagle3Cache:
        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(new.astype(old.dtype), old, (0,) * old.ndim)

        return place(jax.tree.map(put, cache, self.init_cache(rows, slots, cache.pairs.k.dtype)))

    @override
    def insert(
        self, cache: Eagle3Cache, rows_R: jax.Array, filled: Eagle3Cache, source_R: jax.Array
    ) -> Eagle3Cache:
        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            part = tuple(slice(size) for size in new.shape[1:])
            return old.at[(rows_R, *part)].set(new[source_R].astype(old.dtype), mode="drop")

        return place(jax.tree.map(put, cache, filled))

    def read(
        self,
        cache: Eagle3Cache,
        target: EmbeddingAndHead,
        tokens_BT: jax.Array,
        states_BTF: jax.Array,
        counts_B: jax.Array,
    ) -> Eagle3Cache:
        """Append keys and values of the pairs of step 0, which need no attention."""
        dtype, length_B = self.compute_dtype, cache.length
        counts_B = counts_B.astype(jnp.int32)
        fused_BTD = self.fc(states_BTF.astype(dtype))
        before_BTD = jnp.concatenate(
            [cache.pending[:, None].astype(dtype), fused_BTD[:, :-1]], axis=1
        )
        token_T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
        pair_BT = length_B[:, None] + token_T - 1
        embedded_BTD = target.embed(tokens_BT).astype(dtype)
        turns = self._turns(jnp.maximum(pair_BT, 0))
        _, k_BTKH, v_BTKH = self.midlayer.project(embedded_BTD, before_BTD, turns)
        counts = (token_T < counts_B[:, None]) & (pair_BT >= 0)
        pairs = put_pairs(cache.pairs, k_BTKH, v_BTKH, jnp.where(counts, pair_BT, -1))
        last_B1 = jnp.maximum(counts_B - 1, 0)[:, None]
        last_BD = jnp.take_along_axis(fused_BTD, last_B1[:, :, None], axis=1)[:, 0]
        pending_BD = jnp.where(counts_B[:, None] > 0, last_BD, cache.pending)
        return place(
            Eagle3Cache(pairs, pending_BD.astype(cache.pending.dtype), length_B + counts_B)
        )

    @override
    def propose(
        self, cache: Eagle3Cache, target: EmbeddingAndHead, token_B: jax.Array
    ) -> jax.Array:
        first_B = jnp.maximum(cache.length - 1, 0)
        kept_P, dtype = self.kept_ids(), self.compute_dtype

        def step(carry, number):
            pairs, state_BD, token_B = carry
            place_B1 = first_B[:, None] + number
            embedded_B1D = target.embed(token_B[:, None]).astype(dtype)
            state_B1D = state_BD[:, None].astype(dtype)
            turns = self._turns(place_B1)
            q_B1NH, k_B1KH, v_B1KH = self.midlayer.project(embedded_B1D, state_B1D, turns)
            pairs = put_pairs(pairs, k_B1KH, v_B1KH, place_B1)
            out_B1NH = attend_cached(q_B1NH, *pairs, place_B1 + 1, jnp.zeros_like(place_B1))
            state_BD = self.midlayer.finish(state_B1D, out_B1NH)[:, 0]
            best_B = self.logits(self.norm(state_BD)).argmax(-1)
            token_B = kept_P[best_B]
            return (pairs, state_BD.astype(cache.pending.dtype), token_B), token_B

        numbers = jnp.arange(self.num_drafted, dtype=jnp.int32)
        start = (cache.pairs, cache.pending, token_B.astype(jnp.int32))
        _, guessed_KB = jax.lax.scan(step, start, numbers)
        return guessed_KB.T

    def _turns(self, positions_BT: jax.Array) -> Angles:
        frequency, factor = self.encoding
        return angles(positions_BT, jnp.asarray(frequency), factor, self.compute_dtype)


def follow(next_BT: jax.Array, place_BT: jax.Array) -> jax.Array:
    """Return the tokens behind those at `place_BT`; -1 if there is none, or was none before."""
    then_BT = jnp.take_along_axis(next_BT, jnp.maximum(place_BT, 0), axis=1)
    return jnp.where(place_BT >= 0, then_BT, -1)


def put_pairs(pairs: KV, k_BTKH: jax.Array, v_BTKH: jax.Array, slot_BT: jax.Array) -> KV:
    """Write new keys and values into their slots; -1: drop them."""
    (B, S), T = pairs.k.shape[:2], k_BTKH.shape[1]
    beyond_T = S + jnp.arange(T, dtype=jnp.int32)
    slot_BT = jnp.where(slot_BT < 0, beyond_T, slot_BT)
    rows_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]

    def put(all_BSKH: jax.Array, new_BTKH: jax.Array) -> jax.Array:
        new_BTKH = new_BTKH.astype(all_BSKH.dtype)
        return all_BSKH.at[rows_B1, slot_BT].set(new_BTKH, mode="drop", unique_indices=True)

    return KV(put(pairs.k, k_BTKH), put(pairs.v, v_BTKH))


def place(cache: Eagle3Cache) -> Eagle3Cache:
    """Constrain the cache to the current mesh."""
    names = ("rows", None, "kv_heads", None)
    pairs = KV(*(constrain(x, *names) for x in cache.pairs))
    return Eagle3Cache(
        pairs, constrain(cache.pending, "rows", None), constrain(cache.length, "rows")
    )


def names(config: Config) -> list[ParameterEntry]:
    """Every parameter and its tensor, as SafeAILab, SpecForge, SGLang and vLLM call it."""
    norms = {
        "norm": "norm",
        "midlayer.embed_norm": "midlayer.input_layernorm",
        "midlayer.hidden_norm": "midlayer.hidden_norm",
        "midlayer.mlp_norm": "midlayer.post_attention_layernorm",
    }
    linears = {
        "fc": "fc",
        "midlayer.attention.q": "midlayer.self_attn.q_proj",
        "midlayer.attention.k": "midlayer.self_attn.k_proj",
        "midlayer.attention.v": "midlayer.self_attn.v_proj",
        "midlayer.attention.out": "midlayer.self_attn.o_proj",
        "midlayer.mlp.gate": "midlayer.mlp.gate_proj",
        "midlayer.mlp.up": "midlayer.mlp.up_proj",
        "midlayer.mlp.down": "midlayer.mlp.down_proj",
    }
    entries = [ParameterEntry("lm_head.embedding", TensorRef("lm_head.weight"))]
    entries += [
        ParameterEntry(f"{path}.scale", TensorRef(f"{name}.weight")) for path, name in norms.items()
    ]
    for path, name in linears.items():
        entries.append(ParameterEntry(f"{path}.kernel", Transpose(TensorRef(f"{name}.weight"))))
    if config.prunes:  # vLLM refuses the tables of a draft that says everything
        entries.append(ParameterEntry("kept", DraftVocabulary(config.vocab_size)))
    return entries
