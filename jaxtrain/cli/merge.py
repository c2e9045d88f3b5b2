"""The verb `merge`: a run's adapter, or a PEFT folder, folded into its base's weights."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from jaxtrain.arguments import Parser, add_overrides, expand_path, require_exists, require_run
from jaxtrain.errors import UserError

if TYPE_CHECKING:
    from jaxtrain.adapters.merge import MergeReport


def run_merge(argv: list[str]) -> None:
    """Fold an adapter into the weights of its base: a full Hugging Face model folder."""
    parser = Parser("jaxtrain merge", description=run_merge.__doc__)
    parser.add_argument("source", type=expand_path, help="a run's output_dir or a PEFT folder")
    add_overrides(parser)
    parser.add_argument(
        "--base", type=os.path.expanduser, help="folder or Hub id; default: what the adapter names"
    )
    parser.add_argument("--output", type=expand_path, help="default: SOURCE/merged")
    parser.add_argument("--step", type=int, help="of a run; default: the newest checkpoint")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as the base")
    parser.add_argument(
        "--quantize",
        choices=("none", "nf4", "nf4_fused", "int8", "mxfp4"),
        default="none",
        help="of a PEFT folder: adapter.quantize of its training (of Axolotl's with"
        " quantize_moe_experts: nf4_fused); a run knows its own",
    )
    args = parser.parse_intermixed_args(argv)
    merge_command(
        args.source,
        args.base,
        args.output,
        args.step,
        args.dtype,
        args.quantize,
        overrides=args.overrides,
    )


def merge_command(
    source: Path,
    base: str | None,
    output: Path | None,
    step: int | None,
    dtype: str | None,
    quantize: str = "none",
    overrides: Sequence[str] = (),
) -> None:
    """Write a full Hugging Face folder from a run with an adapter, or from a PEFT folder."""
    output = output or source / "merged"
    report, base = merge_source(source, base, output, step, dtype, quantize, overrides)
    print(f"{report.changed} tensors of {base} changed; the merged model is in {output}")


def merge_source(
    source: Path,
    base: str | None,
    output: Path,
    step: int | None,
    dtype: str | None,
    quantize: str = "none",
    overrides: Sequence[str] = (),
) -> "tuple[MergeReport, str]":
    """The work of it: what changed, and of which base."""
    from jaxtrain.adapters.peft import write_peft
    from jaxtrain.adapters.peft_folder import CONFIG, open_peft
    from jaxtrain.core.architecture import find_folder
    from jaxtrain.methods.reopen import open_trained
    from jaxtrain.runs.base_record import require_same_base
    from jaxtrain.runs.run_files import require_replaceable

    require_exists("merge", source)  # before anything is read
    require_replaceable(output)
    if (source / CONFIG).is_file():
        base = base or open_peft(source).config.get("base_model_name_or_path")
        if not base:
            raise UserError(f"{source / CONFIG} names no base model; give it with --base FOLDER")
        require_run("merge", source, overrides, False)
        return merge(base, source, output, dtype, quantize), base
    is_run = (source / "checkpoints").is_dir()
    trained = open_trained(str(source), [*overrides], step, frozen=False) if is_run else None
    parts = None if trained is None else trained.snapshot.roles.bundle
    if trained is None or parts is None or parts.adapter is None:
        raise UserError(
            f"merge: {source} is neither a run with an adapter nor a PEFT folder; a run that"
            " trained all weights needs only: jaxtrain export"
        )
    named = base is not None
    base = base or (trained.config.model.path if parts.folder else None)
    if base is None:
        raise UserError(
            f"merge: the base of {source} has random weights; name the folder to merge into with"
            " --base"
        )
    if not named:
        require_same_base(
            source,
            find_folder(base, weights=True),
            "put them back, name their folder with model.path=FOLDER, or, to merge into others on"
            " purpose, name these with --base",
        )
    with tempfile.TemporaryDirectory() as temporary:
        write_peft(trained.snapshot.params(), parts.architecture, parts.adapter, temporary, base)
        parts.tokenizer.save_pretrained(temporary)
        quantize, model = parts.adapter.quantize, trained.config.model
        carried = dict(parts.architecture.carried_attributes)
        keys = {f"{role}_id": int(carried[f"{role}_id"]) for role in model.special_tokens.roles()}
        report = merge(base, Path(temporary), output, dtype, quantize, model.family, keys)
        return report, base


def merge(
    base: str,
    adapter: Path,
    output: Path,
    dtype: str | None,
    quantize: str,
    family: str | None = None,
    keys: Mapping[str, int] = MappingProxyType({}),
) -> "MergeReport":
    """Merge an adapter's folder into a base, which may be of the Hub."""
    from jaxtrain.adapters.merge import merge_adapter
    from jaxtrain.core.architecture import find_folder
    from jaxtrain.core.export import find_ends
    from jaxtrain.data.chat.template import load_tokenizer
    from jaxtrain.huggingface.generation import write_generation
    from jaxtrain.huggingface.safetensors import RoundingLoss
    from jaxtrain.runs.run_files import replace_folder

    with replace_folder(output) as unfinished:
        folder = find_folder(base, weights=True)
        report = merge_adapter(
            folder, adapter, unfinished, dtype, quantize=quantize, family=family, keys=keys
        )
        if report.lost >= RoundingLoss.NOTED:
            print(
                f"warning: rounding the merged tensors to their dtype moved them by"
                f" {report.lost:.0%} of what the adapter changes (root mean squares); keep it with"
                " jaxtrain merge --dtype float32, or serve the adapter beside its base"
            )
        scores = any("Classification" in name for name in read_architectures(unfinished))
        if not scores and (adapter / "tokenizer_config.json").is_file():
            # The adapter was trained with another template than the base's, perhaps, and answers
            # end as that one ends them.
            write_generation(unfinished, unfinished, find_ends(load_tokenizer(str(unfinished))))
        return report


def read_architectures(folder: Path) -> list[str]:
    """Names of config.json; of any family, also one that nothing here trains."""
    from jaxtrain.huggingface.files import read_object

    architectures = read_object(folder / "config.json").get("architectures")
    return (
        [name for name in architectures if isinstance(name, str)]
        if isinstance(architectures, list)
        else []
    )
