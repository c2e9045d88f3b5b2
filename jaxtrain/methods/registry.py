"""Lookup of the method that task.kind names, and of its `core.task.Task`."""

import dataclasses
import sys

from jaxtrain import plugins
from jaxtrain.config import Config
from jaxtrain.config.methods import KINDS
from jaxtrain.core.task import Method, Task
from jaxtrain.distributed.mesh import is_main_process, require_host_memory

METHODS = {kind: entry.method for kind, entry in KINDS.items()}


def find_method(config: Config) -> Method:
    """Return the method that task.kind names, built in or from a plugin."""
    return plugins.find("tasks", config.task.kind, METHODS, key="task.kind", modules=True)


def make_task(config: Config) -> Task:
    """Build the config's task; raises UserError for an invalid config before any weight is read."""
    task = place_frozen(find_method(config).make(config), config)
    if config.model.remat == "offload":
        require_host_memory(task.mesh, 'model.remat "offload"')
    refresh = config.rollout.draft_refresh
    if refresh is None or config.rollout.draft is None:
        return task
    from jaxtrain.methods.drafts.refresh import with_refresh

    refresh_config = config.model_copy(update={"task": refresh.task})
    return with_refresh(task, config, find_method(refresh_config))


def place_frozen(task: Task, config: Config) -> Task:
    """Return the task with the models that only score batches where parallel.frozen puts them."""
    if config.parallel.frozen == "device":
        return task
    require_host_memory(task.mesh, 'parallel.frozen "host"')
    roles = {
        name: dataclasses.replace(role, on_host=True)
        for name, role in task.roles.items()
        if not role.in_loss and role.weights in ("own", "start")
    }
    if not roles and is_main_process():
        print(
            'warning: parallel.frozen "host" moves nothing: this run has no model with weights of'
            " its own that only scores batches",
            file=sys.stderr,
            flush=True,
        )
    return dataclasses.replace(task, roles={**task.roles, **roles})
