"""From task.kind to the method and its `core.task.Task`."""

from jaxtrain import plugins
from jaxtrain.config import Config
from jaxtrain.config.methods import KINDS
from jaxtrain.core.task import Method, Task

METHODS = {kind: entry.method for kind, entry in KINDS.items()}


def find_method(config: Config) -> Method:
    """The method that task.kind names: one of these, or one from outside."""
    return plugins.find("tasks", config.task.kind, METHODS, key="task.kind", modules=True)


def make_task(config: Config) -> Task:
    """The config's task; raises UserError for what cannot run, before any weight is read."""
    task = find_method(config).make(config)
    refresh = config.rollout.draft_refresh
    if refresh is None or config.rollout.draft is None:
        return task
    from jaxtrain.methods.drafts.refresh import with_refresh

    taught = config.model_copy(update={"task": refresh.task})
    return with_refresh(task, config, find_method(taught))
