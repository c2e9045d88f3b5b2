"""The methods, by task.kind: what each is stands in its file here, as a `core.task.Task`."""

from jaxtrain import plugins
from jaxtrain.config import Config
from jaxtrain.core.task import Method, Task
from jaxtrain.methods.drafts.refresh import with_refresh

METHODS = {
    "sft": "jaxtrain.methods.sft.method",
    "tree": "jaxtrain.methods.trees.method",
    "reward_model": "jaxtrain.methods.reward_model.method",
    "rl": "jaxtrain.methods.rl.method",
    "ebft": "jaxtrain.methods.ebft.method",
    "distillation": "jaxtrain.methods.distillation.method",
    "preference": "jaxtrain.methods.preference.method",
    "dflash": "jaxtrain.methods.drafts.dflash_method",
    "eagle3": "jaxtrain.methods.drafts.eagle3_method",
    "diffusion": "jaxtrain.methods.diffusion.method",
    "ebft_strided": "jaxtrain.methods.ebft.strided_method",
}


def find_method(config: Config) -> Method:
    """The method that task.kind names: one of these, or one from outside."""
    return plugins.find("tasks", config.task.kind, METHODS, key="task.kind", modules=True)


def make_task(config: Config) -> Task:
    """The config's task; raises UserError for what cannot run, before any weight is read."""
    task = find_method(config).make(config)
    refresh = config.rollout.draft_refresh
    if refresh is None or config.rollout.draft is None:
        return task
    taught = config.model_copy(update={"task": refresh.task})
    return with_refresh(task, config, find_method(taught))
