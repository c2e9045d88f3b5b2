"""Verb capture: the target of a draft says once what its layers put out for all of the data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxtrain.cli.processes import config_parser, read_config, run_together
from jaxtrain.errors import UserError

if TYPE_CHECKING:
    from jaxtrain.config import Config


def run_capture(argv: list[str]) -> int:
    """Write the target's states of all samples of a config's data to task.target.path."""
    args = config_parser("capture").parse_intermixed_args(argv)

    def work(config) -> int:
        capture(config)
        return 0

    return run_together(lambda: read_config(args), lambda config: (config.parallel, None), work)


def capture(config: Config) -> None:
    """Write the states of a config's data where its training will read them; goes on with a capture
    that was interrupted. UserError for a task that reads none from disk."""
    import jax

    from jaxtrain.distributed.mesh import is_main_process
    from jaxtrain.methods.drafts.config import DraftTask
    from jaxtrain.methods.drafts.drafting import DraftData
    from jaxtrain.methods.drafts.stored_states import StoredStates
    from jaxtrain.methods.registry import make_task

    if not isinstance(config.task, DraftTask):
        raise UserError(
            f'task.kind "{config.task.kind}" reads no target states; capture is for "dflash" and'
            ' "eagle3"'
        )
    if config.task.target.source != "disk":
        raise UserError(
            f'task.target.source is "{config.task.target.source}"; set it to "disk" and'
            " task.target.path to the folder that shall hold the states"
        )
    task = make_task(config)
    data = task.data
    assert isinstance(data, DraftData) and isinstance(data.stage, StoredStates)

    def log(text: str) -> None:
        if is_main_process():
            print(text, flush=True)

    data.log = log
    with jax.set_mesh(task.mesh):
        data.stage.capture(data, log)
