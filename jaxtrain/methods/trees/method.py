"""Tree training: every token of a branching trajectory once, with the loss of its branches.

The loss is SFT's; what differs is what rows of data become, and the weights of shared tokens.
"""

from functools import partial
from typing import Any

from jaxtrain.config import Config
from jaxtrain.core.bundle import build_model_bundle
from jaxtrain.core.losses.nll import nll_loss
from jaxtrain.core.roles import Role
from jaxtrain.core.task import POLICY, Task, of_policy
from jaxtrain.methods.offline import OfflineData, check_packing
from jaxtrain.methods.trees.config import TreeTask
from jaxtrain.methods.trees.data import Trees
from jaxtrain.models.capabilities import require_trees

Section = TreeTask


def open_data(config: Config, tokenizer: Any) -> OfflineData:
    """Branching trajectories, thoughts as side leaves, grouped trials."""
    assert isinstance(config.task, TreeTask)
    return OfflineData(config, Trees(config.task, config.data, tokenizer))


def make(config: Config) -> Task:
    """Negative log-likelihood over trees, or over their branches as task.mode says."""
    parts = build_model_bundle(config)
    check_trees(config, parts.architecture)
    return Task(
        roles={POLICY: Role(parts)},
        loss=of_policy(partial(nll_loss, impl=config.model.logp)),
        coef={"nll": 1.0},
        data=open_data(config, parts.tokenizer),
    )


def check_trees(config: Config, architecture: Any) -> None:
    """Refuse a model whose layers do not follow the branches of a tree, where any is packed.

    Held-out data are whole trees in every mode.
    """
    assert isinstance(config.task, TreeTask)
    if config.task.mode == "tree":
        reason = 'task.mode "tree" packs branches that share a prefix'
        fix = 'set task.mode to "grouped" and data.packing to false, which has the same loss'
        require_trees(architecture, reason, fix)
    if config.data.eval_datasets:
        reason = 'data.eval_datasets with task.kind "tree" (they are evaluated as whole trees)'
        require_trees(architecture, reason, "remove data.eval_datasets")
    check_packing(config, architecture)
