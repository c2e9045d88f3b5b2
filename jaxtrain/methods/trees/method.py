"""Tree training: computes every token of a branching trajectory once, with the loss of its
branches.

The loss is that of SFT; the method differs in the trees of rows and the weights of shared tokens.
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
    """Open branching trajectories, thoughts as side leaves, and grouped trials."""
    assert isinstance(config.task, TreeTask)
    return OfflineData(config, Trees(config.task, config.data, tokenizer))


def make(config: Config) -> Task:
    """Build the task: negative log-likelihood over trees, or over branches, by task.mode."""
    task = config.task
    assert isinstance(task, TreeTask)
    bundle = build_model_bundle(config)
    check_trees(config, bundle.architecture)
    return Task(
        roles={POLICY: Role(bundle)},
        loss=of_policy(partial(nll_loss, impl=config.model.logp)),
        compiles_ahead=True,
        coef={"nll": 1.0},
        data=open_data(config, bundle.tokenizer),
        varying_microsteps=task.units_per_step is not None,
    )


def check_trees(config: Config, architecture: Any) -> None:
    """Raise UserError if trees are packed and the layers of the model do not support branches.

    Held-out data are trees in every mode.
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
