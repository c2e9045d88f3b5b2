"""Supervised fine-tuning and pre-training: the weights of the batch say which tokens train."""

from functools import partial
from typing import Any

from jaxtrain.config import Config, SFTTask
from jaxtrain.core.assemble import assemble
from jaxtrain.core.roles import Role
from jaxtrain.core.task import POLICY, Task, of_policy
from jaxtrain.data.sequences import Sequences
from jaxtrain.losses.nll import nll_loss
from jaxtrain.tasks.offline import OfflineData, check_packing

Section = SFTTask


def open_data(config: Config, tokenizer: Any) -> OfflineData:
    """Documents, conversations, prompts with answers."""
    return OfflineData(config, Sequences(config.data, tokenizer))


def make(config: Config) -> Task:
    """Token-mean negative log-likelihood."""
    parts = assemble(config)
    check_packing(config, parts.architecture)
    return Task(
        roles={POLICY: Role(parts)},
        loss=of_policy(partial(nll_loss, impl=config.model.logp)),
        coef={"nll": 1.0},
        data=open_data(config, parts.tokenizer),
    )
