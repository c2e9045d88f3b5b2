"""Supervised fine-tuning and pre-training: the weights of the batch select the trained tokens."""

from functools import partial
from typing import Any

from jaxtrain.config import Config
from jaxtrain.core.bundle import build_model_bundle
from jaxtrain.core.losses.nll import nll_loss
from jaxtrain.core.roles import Role
from jaxtrain.core.task import POLICY, Task, of_policy
from jaxtrain.data.sequences import Sequences
from jaxtrain.methods.offline import OfflineData, check_packing, open_images
from jaxtrain.methods.sft.config import SFTTask
from jaxtrain.models.capabilities import follows_trees

Section = SFTTask


def open_data(config: Config, tokenizer: Any) -> OfflineData:
    """Documents, conversations, prompts with answers."""
    return _open(config, tokenizer, follows=True)


def _open(config: Config, tokenizer: Any, *, follows: bool) -> OfflineData:
    share = config.data.share_prefixes
    note = ""
    if share and not follows:
        note = (
            "the model has layers that do not follow trees: turns of a conversation whose chat"
            " template rewrites history are samples of their own (data.share_prefixes)"
        )
    images = open_images(config, tokenizer, config.data.sequence_len)
    recipe = Sequences(config.data, tokenizer, trees=share and follows, images=images)
    return OfflineData(config, recipe, note)


def make(config: Config) -> Task:
    """Token-mean negative log-likelihood."""
    bundle = build_model_bundle(config)
    check_packing(config, bundle.architecture)
    follows = follows_trees(bundle.architecture)
    return Task(
        roles={POLICY: Role(bundle)},
        loss=of_policy(partial(nll_loss, impl=config.model.logp)),
        compiles_ahead=True,
        coef={"nll": 1.0},
        data=_open(config, bundle.tokenizer, follows=follows),
    )
