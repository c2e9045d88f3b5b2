"""The verb `export`: a checkpoint of a run as a Hugging Face folder."""

from pathlib import Path

from jaxtrain.errors import UserError
from jaxtrain.run.belongings import require_replaceable
from jaxtrain.train.trained import open_trained


def export_command(run: Path, output: Path, step: int | None, dtype: str | None) -> None:
    """The verb `export`: what the task of a run exports, of a checkpoint."""
    require_replaceable(output)  # before anything is read
    config, task, held = open_trained(str(run), [], step, frozen=False)
    if held.step == 0:
        raise UserError(f"export: {run} is not a run's output_dir")
    task.export(held, config, output, dtype)
    what = "" if held.roles.parts.adapter is None else "the adapter of "
    print(f"{what}step {held.step} of {run} is now in {output}")
