"""The balance of a mixture of experts: metrics of any task, and a loss where the config asks."""

import dataclasses

from jaxtrain.losses.balance import COMPONENT, with_balance
from jaxtrain.tasks import Task


def add_balance(task: Task, coef: float) -> Task:
    """`task` with the router's metrics and, with `coef` above 0, that much of its balance loss.

    Changes nothing for a dense model.
    """
    loss = with_balance(task.loss, train=coef > 0)
    return dataclasses.replace(
        task, loss=loss, coef={**task.coef, COMPONENT: coef} if coef > 0 else task.coef
    )
