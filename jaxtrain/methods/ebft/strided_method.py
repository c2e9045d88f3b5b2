"""EBFT inside of documents: blocks drawn at many places of a text, rewarded for looking like it.

    rows, as SFT reads them ── methods/ebft/blocks.py ──> where blocks begin, and the forest of both
    prepare, by the current weights       one program, nothing comes back to the host
       policy ── methods/ebft/branch_sampler.py ──> the blocks' tokens, by run.seed and the step
       frozen network ── methods/ebft/block_rewards.py ──> rewards, advantages
    step      the policy reads the forest once ── methods/ebft/strided_loss.py ──> loss

N draws of A blocks of a text share its tokens: a row of T tokens becomes T + A N G.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from typing_extensions import override

from jaxtrain.batch import Batch
from jaxtrain.config import Config
from jaxtrain.core.bundle import build_model_bundle
from jaxtrain.core.roles import Role
from jaxtrain.core.scorer import Scorer
from jaxtrain.core.task import POLICY, Round, Task, of_policy
from jaxtrain.distributed.feed import feed, place_of, put, put_rows
from jaxtrain.methods.ebft.block_rewards import BlockRewardOptions, judge
from jaxtrain.methods.ebft.blocks import (
    CE,
    RL,
    BlockPositions,
    BlockStrides,
    count_documents,
    lay_blocks,
)
from jaxtrain.methods.ebft.branch_sampler import SamplingOptions, branches, draw_blocks
from jaxtrain.methods.ebft.config import EBFTStridedTask
from jaxtrain.methods.ebft.features import FEATURES, feature_role
from jaxtrain.methods.ebft.strided_data import BlockSequences
from jaxtrain.methods.ebft.strided_loss import (
    ADVANTAGE,
    NAMES,
    NUMBERS,
    StridedLossOptions,
    strided_loss,
)
from jaxtrain.methods.offline import OfflineData
from jaxtrain.models.capabilities import require_trees
from jaxtrain.models.parameters import Params, Rebuild

Section = EBFTStridedTask


def open_data(config: Config, tokenizer: Any) -> "StridedData":
    """Documents, conversations, prompts with answers: those with room for a block."""
    return StridedData(config, tokenizer)


def make(config: Config) -> Task:
    """The policy, the frozen network, and the loss of the blocks."""
    task = config.task
    assert isinstance(task, EBFTStridedTask)
    bundle = build_model_bundle(config)
    option = 'task.kind "ebft_strided" lets blocks branch off inside of a text'
    require_trees(bundle.architecture, option, 'use task.kind "ebft"')
    features = feature_role(task.features, config, bundle)
    depth = features.bundle.architecture.num_hidden_layers
    require_trees(
        features.bundle.architecture, option, "choose another network", "task.features.network"
    )
    data = StridedData(config, bundle.tokenizer)
    draws = BlockSampling(
        config.run.seed,
        data.strides,
        SamplingOptions(task.n_samples, task.generate_max_len, task.temperature, task.top_p),
        BlockRewardOptions(
            layers=task.features.find_layers(depth),
            samples=task.n_samples,
            length=task.generate_max_len,
            pooling=task.features.pooling,
            whitening=task.features.whitening,
            alignment=task.features.alignment_coef,
            diversity=task.features.diversity_coef,
            estimator=task.advantage,
        ),
    )
    scored = StridedLossOptions(
        data.sizes, task.temperature if task.tempered_logp else 1.0, train_ce=task.ce_coef > 0
    )
    return Task(
        roles={POLICY: Role(bundle), FEATURES: features},
        loss=of_policy(partial(strided_loss, numbers=scored, impl=config.model.logp)),
        coef={RL: task.rl_coef, CE: task.ce_coef},
        data=data,
        prepare=draws.prepare,
        prepared={ADVANTAGE: np.float32, NUMBERS: np.dtype((np.float32, (1 + len(NAMES),)))},
        prepared_length=data.strides.grown,
    )


def read_strides(task: EBFTStridedTask) -> BlockStrides:
    """Return the positions at which blocks begin."""
    return BlockStrides(
        stride=task.stride,
        context=task.context_length,
        length=task.generate_max_len,
        samples=task.n_samples,
        prefix=task.min_completion_prefix,
        trained_only=task.blocks == "trained",
    )


class StridedData(OfflineData):
    """`core.task.Data` of rows with room for blocks."""

    def __init__(self, config: Config, tokenizer: Any):
        task = config.task
        assert isinstance(task, EBFTStridedTask)
        self.strides = read_strides(task)
        recipe = BlockSequences(
            config.data,
            tokenizer,
            self.strides,
            keep_short=task.ce_coef > 0,
            mask_thinking=task.mask_thinking,
            dtype=np.float64 if config.model.compute_dtype == "float64" else np.float32,
        )
        super().__init__(config, recipe)

    @property
    def sizes(self) -> dict[int, tuple[int, int]]:
        """{U: (T, drawn tokens)} of every length that rows can have."""
        sizes: dict[int, tuple[int, int]] = {}
        size = self.strides.samples * self.strides.length
        for length in sorted({*self.config.data.length_buckets, self.row_tokens}):
            sizes[self.strides.grown(length)] = (length, self.strides.most(length) * size)
        return sizes

    @override
    def describe(self, console: Console) -> None:
        super().describe(console)
        length, grown = self.row_tokens, self.strides.grown(self.row_tokens)
        console.print(
            f"blocks: at most {self.strides.most(length):,} in a row, {self.strides.samples} draws"
            f" of {self.strides.length} tokens each: a row of {length:,} tokens becomes {grown:,}"
        )


class BlockSampling:
    """`Task.prepare`: blocks drawn and judged by the weights of the moment."""

    def __init__(
        self,
        seed: int,
        strides: BlockStrides,
        drawing: SamplingOptions,
        judging: BlockRewardOptions,
    ):
        self.seed, self.strides = seed, strides
        self.drawing, self.judging = drawing, judging

    def prepare(self, round: Round, scorer: Scorer) -> Round:
        """The noise is a function of run.seed, the step and the row's number in it; that of
        held-out batches is always the same."""
        about = [self.seed, 0] if round.held_out else [self.seed, 1, round.version]
        batches, counts = [], np.zeros(3, np.int64)
        for number, batch in enumerate(round.batches):
            noise = np.random.default_rng([*about, number]).integers(0, 2**32, 2, np.uint32)
            forest, spots = lay_blocks(batch, self.strides)
            counts += count_documents(batch, spots)
            batches.append(self.fill(batch, forest, spots, noise, scorer))
        blocks, _, without = (float(count) for count in counts)
        metrics = {"ebft/num_blocks": blocks, "ebft/documents_without_blocks": without}
        return round._replace(batches=batches, metrics={**round.metrics, **metrics})

    def fill(
        self, batch: Batch, forest: Batch, spots: BlockPositions, noise: np.ndarray, scorer: Scorer
    ) -> Batch:
        """The forest [M, B, U] with what the policy says in its blocks, and what that is worth."""
        held = scorer.snapshot()
        roles, mesh = held.roles, held.roles.bundle.mesh
        draw = make_draw(
            roles.rebuild(POLICY),
            roles.rebuild(FEATURES),
            self.drawing,
            self.judging,
            None if mesh.size == 1 else mesh,
        )
        tokens, advantage, numbers = draw(
            held.params(POLICY),
            held.params(FEATURES),
            _bare(batch, mesh),
            _bare(forest, mesh),
            BlockPositions(*(put_rows(x, mesh) for x in spots)),
            put(noise, mesh),
        )
        streams = {ADVANTAGE: advantage, NUMBERS: numbers}
        return forest._replace(tokens=tokens, streams=streams)


def _bare(batch: Batch, mesh: Any) -> Batch:
    return feed(batch._replace(weights={}, streams={}, denoms={}, owner=None), mesh)


@functools.lru_cache(maxsize=8)
def make_draw(
    policy: Rebuild,
    features: Rebuild,
    drawing: SamplingOptions,
    judging: BlockRewardOptions,
    mesh: Any,
) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    """Compiled once (parameters of both, documents [M, B, T], forest [M, B, U], BlockPositions,
    noise) -> (tokens [M, B, U], streams ADVANTAGE and NUMBERS); placed as batches are."""

    def of_micro(policy_params: Params, feature_params: Params, arrays):
        documents, forest, spots, keys_B = arrays
        (B, U), A = forest.tokens.shape, spots.predictor.shape[1]
        drawn = draw_blocks(policy(policy_params), documents, forest, spots, keys_B, drawing)
        step_G = jnp.arange(drawing.length, dtype=jnp.int32)
        first_BM = branches(spots, drawing)
        rows_B1, at_BMG = jnp.arange(B)[:, None], first_BM[:, :, None] + step_G
        at_BMG = jnp.where(first_BM[:, :, None] < U, at_BMG, U).reshape(B, -1)

        def put_at(positions: jax.Array, values: jax.Array) -> jax.Array:
            empty = jnp.zeros((B, U, *values.shape[2:]), values.dtype)
            return empty.at[rows_B1, positions].set(values, mode="drop")

        tokens = forest.tokens.at[rows_B1, at_BMG].set(drawn.reshape(B, -1), mode="drop")
        forest = forest._replace(tokens=tokens)
        truth = spots.truth.reshape(B, A, drawing.length)
        judged = judge(features(feature_params), forest, spots.start, truth, judging)
        advantage = jnp.repeat(judged.advantage.reshape(B, -1), drawing.length, axis=1)
        real_BA = (spots.start < U).astype(judged.reward.dtype)
        squares = (judged.advantage**2).mean(-1) * real_BA
        mean = judged.advantage.mean(-1) * real_BA
        numbers = (jnp.ones_like(real_BA), *judged[1:])
        return (
            tokens,
            put_at(at_BMG, advantage.astype(jnp.float32)),
            put_at(spots.start, jnp.stack(numbers, -1).astype(jnp.float32)),
            jnp.stack([squares.sum(), mean.sum(), real_BA.sum()]),
        )

    def run(policy_params, feature_params, documents, forest, spots, noise):
        key = jax.random.wrap_key_data(noise)
        M, B = documents.tokens.shape[:2]
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(M * B)).reshape(M, B)
        draw_micro = partial(of_micro, policy_params, feature_params)
        tokens, advantage, numbers, sums = jax.lax.map(draw_micro, (documents, forest, spots, keys))
        squares, mean, count = sums.sum(0) / jnp.maximum(sums[:, 2].sum(), 1.0)
        deviation = jnp.sqrt(jnp.maximum(squares - mean**2, 0.0))
        spread = deviation.astype(jnp.float32) * numbers[..., :1]
        numbers = jnp.concatenate([numbers, spread], -1)
        if mesh is None:
            return tokens, advantage, numbers
        return tuple(
            jax.lax.with_sharding_constraint(x, place_of(x.shape, mesh))
            for x in (tokens, advantage, numbers)
        )

    return jax.jit(run)
