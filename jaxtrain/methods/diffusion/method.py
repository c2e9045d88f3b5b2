"""Masked diffusion (LLaDA, arXiv:2502.09992): masked tokens are predicted from both sides.

    rows ─> a document for each answer                   data.py
         ─> prepare: masked tokens, `since`              masks.py, by seed and step
    step: bidirectional model ──> loss                   loss.py
    answers: masks, unmasked pass by pass                generation/local/diffusion_sampler.py

`since` of the batch lets every token see its whole document, and no other. Documents share no
prefixes, because the states of a prefix depend on the tokens after it.
"""

import dataclasses
import sys
from functools import partial
from typing import Any

import numpy as np

from jaxtrain.config import Config
from jaxtrain.core.architecture import keep_task
from jaxtrain.core.bundle import ModelBundle, build_model_bundle
from jaxtrain.core.roles import Role
from jaxtrain.core.scorer import Scorer
from jaxtrain.core.task import POLICY, Round, Task, of_policy
from jaxtrain.data.chat.template import end_of_turn_ids
from jaxtrain.distributed.mesh import is_main_process
from jaxtrain.errors import UserError
from jaxtrain.generation.local.diffusion_sampler import Unmasking, UnmaskingSampler
from jaxtrain.methods.diffusion.config import WRITING, DiffusionTask
from jaxtrain.methods.diffusion.data import SingleAnswers
from jaxtrain.methods.diffusion.loss import COMPONENT, diffusion_loss
from jaxtrain.methods.diffusion.mask_token import MaskToken, choose_mask_token
from jaxtrain.methods.diffusion.masks import RATIO, TARGET, Noise, mask, mask_held_out
from jaxtrain.methods.offline import OfflineData
from jaxtrain.models.capabilities import require_both_sides

Section = DiffusionTask


def open_data(config: Config, tokenizer: Any) -> OfflineData:
    """Open documents, conversations, and prompts with answers, with a document per answer."""
    task = config.task
    assert isinstance(task, DiffusionTask)
    ends = end_of_turn_ids(tokenizer)
    recipe = SingleAnswers(config.data, tokenizer, ends, task.padding, task.split_turns)
    return OfflineData(config, recipe)


def make(config: Config) -> Task:
    """Build the task of masked diffusion."""
    task = config.task
    assert isinstance(task, DiffusionTask)
    bundle = build_model_bundle(config)
    require_both_sides(
        bundle.architecture, f'task.kind "{task.kind}" fills in what is masked from both sides'
    )
    bundle, mask_token = with_mask(config, task, bundle)
    noise = Noise(
        mask_id=mask_token.id,
        schedule=task.noise_schedule,
        low=max(task.min_mask_ratio, task.eps),
        high=task.max_mask_ratio,
        stratified=task.stratified,
        weighted=task.importance_weighting,
        normalize=task.normalize,
        component=COMPONENT,
    )
    how = Unmasking(
        mask_token.id,
        task.shift,
        task.steps,
        task.block_length,
        task.confidence,
        task.threshold,
        task.cache,
    )
    data = open_data(config, bundle.tokenizer)
    data.note = mask_token.note
    return Task(
        roles={POLICY: Role(bundle)},
        loss=of_policy(partial(diffusion_loss, shift=task.shift, impl=config.model.logp)),
        coef={COMPONENT: 1.0},
        data=data,
        prepare=partial(mask_round, noise=noise, seed=config.run.seed, draws=task.held_out_draws),
        prepared={TARGET: np.int32, RATIO: np.float32},
        sampler=partial(UnmaskingSampler, how=how, most_rows=task.most_rows),
    )


def mask_round(round: Round, scorer: Scorer, *, noise: Noise, seed: int, draws: int) -> Round:
    """Mask a round, seeded by run.seed and the step. A held-out batch is repeated with several
    masks, the same in every evaluation."""
    if round.held_out:
        masked = [batch for b in round.batches for batch in mask_held_out(b, noise, seed, draws)]
        return round._replace(batches=masked)
    seeds = ([seed, round.version, round.part, index] for index in range(len(round.batches)))
    drawn = [mask(b, noise, s) for b, s in zip(round.batches, seeds, strict=True)]
    metrics = {**round.metrics, **(drawn[0].metrics if drawn else {})}
    return round._replace(batches=[batch.batch for batch in drawn], metrics=metrics)


def with_mask(
    config: Config, task: DiffusionTask, bundle: ModelBundle
) -> tuple[ModelBundle, MaskToken]:
    """Add a mask token to tokenizer, embedding and exports; return the bundle and the token."""
    rows = bundle.architecture.vocab_size
    mask_token = choose_mask_token(bundle.tokenizer, rows, task.mask_token_id, task.mask_token)
    architecture = bundle.architecture
    if grown := mask_token.rows - rows:
        if bundle.adapter is not None:
            raise UserError(
                f"{mask_token.note}, which an adapter's base does not have; name a token that is"
                " there as task.mask_token_id, or train without adapter"
            )
        architecture = dataclasses.replace(architecture, vocab_size=mask_token.rows, grown=grown)
    elif bundle.adapter is not None and not config.adapter.train_embeddings and is_main_process():
        print(
            f"note: the embedding of the mask token ({mask_token.id}) stays as it is; with"
            " adapter.train_embeddings it is trained",
            file=sys.stderr,
        )
    description = {"kind": task.kind, "shift": task.shift, "mask_token_id": mask_token.id}
    changed = task.model_dump(exclude_defaults=True)
    description |= {key: changed[key] for key in WRITING if key in changed}
    architecture = keep_task(architecture, description, mask_token_id=mask_token.id)
    return dataclasses.replace(bundle, architecture=architecture), mask_token
