"""The methods, by task.kind: what each is stands in its file here, as a `core.task.Task`."""

from jaxtrain import plugins
from jaxtrain.config import Config
from jaxtrain.core.task import Method, Task
from jaxtrain.tasks.refresh import with_refresh

METHODS = {
    "sft": "jaxtrain.tasks.sft",
    "tree": "jaxtrain.tasks.tree",
    "reward_model": "jaxtrain.tasks.reward_model",
    "rl": "jaxtrain.tasks.rl",
    "ebft": "jaxtrain.tasks.ebft",
    "distillation": "jaxtrain.tasks.distillation",
    "preference": "jaxtrain.tasks.preference",
    "dflash": "jaxtrain.tasks.dflash",
    "eagle3": "jaxtrain.tasks.eagle3",
    "diffusion": "jaxtrain.tasks.diffusion",
    "ebft_strided": "jaxtrain.tasks.ebft_strided",
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
