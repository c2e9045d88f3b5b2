"""The verb `export`: a checkpoint of a run as a Hugging Face folder."""

from pathlib import Path

from jaxtrain.core.export import export_params
from jaxtrain.core.trained import open_trained
from jaxtrain.errors import UserError


def export_command(run: Path, output: Path, step: int | None, dtype: str | None) -> None:
    """The verb `export`: a checkpoint of a run as a Hugging Face folder."""
    trained = open_trained(str(run), [], step, frozen=False)
    if trained.step == 0:
        raise UserError(f"export: {run} is not a run's output_dir")
    export_params(
        trained.params,
        trained.rebuild,
        trained.parts,
        output,
        config=trained.config,
        step=trained.step,
        dtype=dtype,
    )
    what = "" if trained.parts.adapter is None else "the adapter of "
    print(f"{what}step {trained.step} of {run} is now in {output}")
