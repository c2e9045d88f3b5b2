"""The verb `export`: a run's checkpoint, or any Hugging Face folder, as a Hugging Face folder."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.arguments import Parser, add_overrides, expand_path, require_run
from jaxtrain.errors import UserError

if TYPE_CHECKING:
    from jaxtrain.methods.reopen import Trained


def run_export(argv: list[str]) -> None:
    """Write a checkpoint, or a Hugging Face folder anew, as a Hugging Face model folder."""
    parser = Parser("jaxtrain export", description=run_export.__doc__)
    parser.add_argument(
        "source", type=expand_path, help="a run's output_dir, a Hugging Face folder or a Hub id"
    )
    add_overrides(parser)
    parser.add_argument("--output", type=expand_path, help="default, of a run: RUN/model")
    parser.add_argument("--step", type=int, help="of a run; default: the newest checkpoint")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: as loaded"
    )
    parser.add_argument("--max-shard-size", help="of a weights file: 500MB, 2GiB; default 5GB")
    parser.add_argument(
        "--gguf",
        choices=("q8_0", "q4_0", "q4_k", "f16", "bf16"),
        help="one GGUF file for llama.cpp instead of a folder; matrices in this type",
    )
    args = parser.parse_intermixed_args(argv)
    if args.gguf is not None:
        export_gguf_command(args.source, args.output, args.step, args.gguf, args.overrides)
        return
    limit = args.max_shard_size
    export_command(args.source, args.output, args.step, args.dtype, limit, args.overrides)


UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def export_command(
    source: Path,
    output: Path | None,
    step: int | None,
    dtype: str | None,
    max_shard_size: str | None = None,
    overrides: Sequence[str] = (),
) -> None:
    """Write what the task of a run exports of a checkpoint, or a model folder anew: cast to
    `dtype`, in shards of at most `max_shard_size` ("500MB")."""
    from jaxtrain.adapters.peft_folder import CONFIG
    from jaxtrain.core.architecture import find_folder
    from jaxtrain.huggingface.copy import copy_folder
    from jaxtrain.huggingface.files import read_object
    from jaxtrain.huggingface.safetensors import MAX_SHARD_BYTES
    from jaxtrain.methods.reopen import holds_run, open_trained
    from jaxtrain.models.families import rename_architectures
    from jaxtrain.runs.run_files import replace_folder, require_replaceable

    limit = MAX_SHARD_BYTES if max_shard_size is None else read_size(max_shard_size)
    is_run = (source / "checkpoints").is_dir() or holds_run(source / "config.json")
    require_run("export", source, overrides, is_run)
    if is_run:
        output = output or source / "model"
        require_replaceable(output)  # before anything is read
        trained = open_trained(str(source), [*overrides], step, frozen=False, all_policies=True)
        export_run(trained, source, output, dtype, None if max_shard_size is None else limit)
        return
    if step is not None:
        raise UserError(f"export: --step is of a run's checkpoints, and {source} is no run")
    if (source / CONFIG).is_file():
        raise UserError(f"export: {source} is an adapter; jaxtrain merge makes a model of it")
    if output is None:
        problem = "is no run" if source.exists() else "does not exist"
        raise UserError(f"export: {source} {problem}; of a model name where to write with --output")
    require_replaceable(output)
    folder = find_folder(str(source), weights=True)
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(
            f"export: {folder} has no config.json; expected a Hugging Face model folder"
        )
    keys = rename_architectures(read_object(file))
    warn_misfits(folder)
    with replace_folder(output) as unfinished:
        copy_folder(folder, unfinished, dtype, limit, keys=keys)
    print(f"{source} is now in {output}")


def warn_misfits(folder: Path) -> None:
    """Print which tensors of a folder do not fit its config.json, if the family is known."""
    from jaxtrain.models import families, loading

    try:
        config = families.read_config(folder)
    except UserError:  # a family or a feature that copying needs nothing of
        return
    try:
        loading.check_folder(folder, config)
    except UserError as error:
        print(f"warning: {error}\n  They are copied as they are.", file=sys.stderr)


def export_gguf_command(
    source: Path, output: Path | None, step: int | None, kind: str, overrides: Sequence[str] = ()
) -> None:
    """Write a model folder, or a checkpoint of a run (its adapter merged), as one GGUF file."""
    from jaxtrain.cli.quantize import plain_folder
    from jaxtrain.data.chat.template import load_tokenizer
    from jaxtrain.methods.reopen import holds_run, open_trained
    from jaxtrain.models.gguf import export_gguf

    is_run = (source / "checkpoints").is_dir() or holds_run(source / "config.json")
    output = output or (source / f"model-{kind}.gguf" if is_run else None)
    if output is None or output.suffix != ".gguf":
        raise UserError("export --gguf: name the file to write with --output FILE.gguf")
    if output.exists():
        raise UserError(f"export --gguf: {output} exists; remove it, or name another file")
    require_run("export", source, overrides, is_run)
    trained = open_trained(str(source), [*overrides], step, frozen=False) if is_run else None
    output.parent.mkdir(parents=True, exist_ok=True)
    args = argparse.Namespace(source=source, base=None, step=step, overrides=overrides)
    with plain_folder(args, trained, output.parent) as folder:
        export_gguf(folder, output, kind, load_tokenizer(str(folder)))
    print(f"{source} is now in {output}, {output.stat().st_size / 1e6:.1f} MB")


def export_run(
    trained: Trained, run: Path, output: Path, dtype: str | None, limit: int | None
) -> None:
    """Write a checkpoint of a run; of several policies an adapter each, in folders of their names.
    limit: bytes of a shard, if they are to be others than usual."""
    from jaxtrain.core.export import export_policies
    from jaxtrain.huggingface.copy import copy_folder
    from jaxtrain.runs.run_files import replace_folder

    config, task, snapshot, policies = trained
    if policies:
        export_policies(task.export, policies, config, output, dtype)
        print(f"the adapters of step {snapshot.step} of {run} are now in {output}")
        return
    adapter = snapshot.roles.bundle.adapter is not None
    if limit is None or adapter:
        task.export(snapshot, config, output, dtype)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            exported = Path(temporary) / "model"
            task.export(snapshot, config, exported, dtype)
            with replace_folder(output) as unfinished:
                copy_folder(exported, unfinished, None, limit)
    print(f"{'the adapter of ' if adapter else ''}step {snapshot.step} of {run} is now in {output}")


def read_size(text: str) -> int:
    """Bytes of "5GB", "500 MiB" or "1000000"; UserError for anything else."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]{0,3})", text.strip())
    unit = UNITS.get(match.group(2).upper()) if match else None
    size = int(float(match.group(1)) * unit) if match and unit else 0
    if size < 1:
        raise UserError(f"--max-shard-size {text!r} is no size; write 5GB, 500MB, 2GiB or bytes")
    return size
