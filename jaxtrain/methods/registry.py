"""Lookup of the method that task.kind names, and of its `core.task.Task`."""

from jaxtrain import plugins
from jaxtrain.config import Config
from jaxtrain.config.methods import KINDS
from jaxtrain.core.task import Method, Task

METHODS = {kind: entry.method for kind, entry in KINDS.items()}


def find_method(config: Config) -> Method:
    """Return the method that task.kind names, built in or from a plugin."""
    return plugins.find("tasks", config.task.kind, METHODS, key="task.kind", modules=True)


def make_task(config: Config) -> Task:
    """Build the config's task; raises UserError for an invalid config before any weight is read."""
    task = find_method(config).make(config)
    refresh = config.rollout.draft_refresh
    if refresh is None or config.rollout.draft is None:
        return task
    from jaxtrain.methods.drafts.refresh import with_refresh

    refresh_config = config.model_copy(update={"task": refresh.task})
    return with_refresh(task, config, find_method(refresh_config))
