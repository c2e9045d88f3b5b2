"""The verb `quantize`: a run's model, or any folder's, in few bits for vLLM and transformers."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.arguments import Parser, add_overrides, expand_path, require_run
from jaxtrain.errors import UserError

if TYPE_CHECKING:
    from jaxtrain.core.roles import ModelSnapshot
    from jaxtrain.methods.reopen import Trained
    from jaxtrain.models.decoder_config import DecoderConfig


def run_quantize(argv: list[str]) -> None:
    """Write a model with its matrices in fp8, int8 or int4 (compressed-tensors), as vLLM and
    transformers load it; with held-out loss before and after, of a run with eval data."""
    parser = Parser("jaxtrain quantize", description=run_quantize.__doc__)
    parser.add_argument(
        "source",
        type=expand_path,
        help="a run's output_dir, a Hugging Face or PEFT folder, or a Hub id",
    )
    add_overrides(parser)
    parser.add_argument("--scheme", choices=("fp8", "int8", "int4"), required=True)
    parser.add_argument(
        "--group", type=int, default=128, help="of int4: numbers that share a scale (default 128)"
    )
    parser.add_argument(
        "--layout",
        choices=("compressed-tensors", "torchao"),
        default="compressed-tensors",
        help="of the folder's tensors: as vLLM and transformers read them (default), or as"
        " transformers does with torchao (fp8 and int8 of dense models)",
    )
    parser.add_argument(
        "--tables",
        choices=("none", "head", "all"),
        default="none",
        help="also quantize an untied head, or head and embeddings (torchao); default none",
    )
    parser.add_argument(
        "--output", type=expand_path, help="default, of a run: RUN/quantized-SCHEME"
    )
    parser.add_argument("--step", type=int, help="of a run; default: the newest checkpoint")
    parser.add_argument("--base", help="of a PEFT folder: folder or Hub id it belongs to")
    parser.add_argument("--no-eval", action="store_true", help="do not compute held-out loss")
    args = parser.parse_intermixed_args(argv)
    quantize_command(args)


KEPT = (
    # Recurrent layers: an error there stays in the state. As in llm-compressor's own recipes.
    *("*.linear_attn.*", "*.mamba.*", "*.conv.*", "*.mixer.in_proj", "*.mixer.out_proj"),
    # Small ones that vLLM holds in full.
    *("*.fc1_latent_proj", "*.fc2_latent_proj", "*.shared_expert_gate", "*.indexer.*"),
)
"""Modules that stay as they are, beside routers, norms, embeddings and the head."""
CALIBRATED = """\
Rounded to nearest, without data. Calibrated on texts (GPTQ; AWQ likewise) it may lose less:
{made}  pip install llmcompressor
  python -c 'from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier
oneshot(model="{model}", dataset="open_platypus", num_calibration_samples=512,
        recipe=GPTQModifier(targets="Linear", scheme="{scheme}", ignore=["lm_head"]),
        output_dir="{output}-gptq")'"""
VLLM_GROUPS = (32, 64, 128)
PRESETS = {"int8": "W8A8", "int4": "W4A16"}
"""llm-compressor's names of the schemes that calibration does something for."""


def quantize_command(args: argparse.Namespace) -> None:
    """Write the folder, tell its size, and the held-out loss of a run that has data for it."""
    from jaxtrain.huggingface.quantize import Layout, quantize_folder
    from jaxtrain.methods.reopen import holds_run, open_trained
    from jaxtrain.runs.run_files import replace_folder, require_replaceable

    source: Path = args.source
    is_run = (source / "checkpoints").is_dir() or holds_run(source / "config.json")
    output = args.output or (source / f"quantized-{args.scheme}" if is_run else None)
    if output is None:
        problem = "is no run" if source.exists() else "does not exist"
        raise UserError(
            f"quantize: {source} {problem}; of a model name where to write with --output"
        )
    if args.group < 1:
        raise UserError(f"--group {args.group} is no size of a group; 128, 64 or 32 are usual")
    torchao = args.layout == "torchao"
    if torchao and args.scheme == "int4":
        raise UserError(
            "quantize: --layout torchao has fp8 and int8; torchao packs int4 for one kind of device"
        )
    if args.tables == "all" and not torchao:
        raise UserError(
            "quantize: transformers loads no embeddings that compressed-tensors has quantized; add"
            " --layout torchao, or --tables head"
        )
    if not is_run and args.step is not None:
        raise UserError(f"quantize: --step is of a run's checkpoints, and {source} is no run")
    require_run("quantize", source, args.overrides, is_run)
    require_replaceable(output)
    trained = None
    if is_run:
        trained = open_trained(
            str(source), [*args.overrides], args.step, all_roles=not args.no_eval
        )
    adapter = trained is not None and trained.snapshot.roles.bundle.adapter is not None
    model = source / ("merged" if adapter else "model") if is_run else source
    with plain_folder(args, trained, output.parent) as plain:
        family = None if trained is None else trained.config.model.family
        names = choose_matrices(plain, family) | list_tables(plain, family, args.tables)
        if torchao and any(".experts." in name for name in names):
            raise UserError(
                "quantize: transformers would leave experts in torchao's layout at random values;"
                " remove --layout torchao"
            )
        with replace_folder(output) as unfinished:
            summary = quantize_folder(
                plain,
                unfinished,
                args.scheme,
                args.group,
                names,
                layout=Layout(args.layout, args.tables == "all"),
            )
        print(
            f"{summary.matrices} matrices of {source} in {args.scheme},"
            f" {summary.before / 1e6:.1f} ->"
            f" {summary.after / 1e6:.1f} MB: {output}"
        )
        for note in list_notes(args.scheme, args.group, names):
            print(note)
        if trained is not None and not args.no_eval:
            tell_loss(trained, model, output)
        elif not args.no_eval:
            print(
                "held-out loss: jaxtrain eval --config FILE model.path="
                f"{output}, and the same with {source}"
            )
    if args.scheme in PRESETS:
        export_command = (
            f"  jaxtrain {'merge' if adapter else 'export'} {source}\n" if is_run else ""
        )
        print(
            CALIBRATED.format(
                model=model, scheme=PRESETS[args.scheme], output=output, made=export_command
            )
        )


@contextmanager
def plain_folder(args: argparse.Namespace, trained: Trained | None, beside: Path) -> Iterator[Path]:
    """The Hugging Face folder with all weights: the one that is named, or one for the time being in
    the folder `beside`."""
    from jaxtrain.adapters.peft_folder import CONFIG
    from jaxtrain.cli.merge import merge_source
    from jaxtrain.core.architecture import find_folder
    from jaxtrain.huggingface.files import read_object
    from jaxtrain.huggingface.quantize import require_plain

    source: Path = args.source
    if trained is None and not (source / CONFIG).is_file():
        folder = find_folder(str(source), weights=True)
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder} holds no config.json; expected a Hugging Face model folder")
        yield folder
        return
    if trained is None or trained.snapshot.roles.bundle.adapter is not None:
        base = args.base or (None if trained is None else trained.config.model.path)
        if base is not None and (file := Path(base) / "config.json").is_file():
            require_plain(read_object(file), Path(base))
    try:
        beside.mkdir(parents=True, exist_ok=True)
        holder = tempfile.TemporaryDirectory(prefix=".quantize-", dir=beside)
    except OSError as error:
        raise UserError(
            f"{beside} cannot be written: {error.strerror or error}; name another place with"
            " --output"
        ) from None
    with holder as temporary:
        exported = Path(temporary) / "model"
        if trained is None or trained.snapshot.roles.bundle.adapter is not None:
            merge_source(source, args.base, exported, args.step, None, overrides=args.overrides)
        else:
            trained.task.export(trained.snapshot, trained.config, exported, None)
        yield exported


def choose_matrices(folder: Path, family: str | None = None) -> set[str]:
    """The tensors of a folder that are quantized: matrices of attention, MLPs and experts. family:
    as model.family. UserError for a family that vLLM could not load so."""
    from jaxtrain.adapters.spec import find_linears
    from jaxtrain.huggingface.files import read_object
    from jaxtrain.huggingface.quantize import require_plain
    from jaxtrain.models import DRAFTS, families, loading

    raw = read_object(folder / "config.json")
    require_plain(raw, folder)
    config = families.read_config(folder, family)
    if config.architecture in DRAFTS:
        raise UserError(
            f"quantize: {config.architecture} is a draft, small beside its target; quantize that"
        )
    loading.check_folder(folder, config)
    names = {
        f"{module}.weight" if not module.endswith(".weight") else module
        for path, linear in find_linears(config).items()
        if linear.preset is not None and not path.startswith("vision.")
        for module in linear.modules
        if not any(fnmatchcase(module, pattern) for pattern in KEPT)
    }
    check_experts(config)
    if config.inputs_first:
        raise UserError(
            f"quantize: {config.architecture} holds its matrices as [in, out], and no layout has a"
            " form for these"
        )
    if not names:
        raise UserError(f"quantize: {config.architecture} has no matrices to quantize")
    return names


def list_tables(folder: Path, family: str | None, tables: str) -> set[str]:
    """Return the tensors of the head ("head") or of it and the embeddings ("all"); UserError for a
    head that is the table of embeddings, unless both are asked for."""
    from jaxtrain.huggingface.packed import open_folder
    from jaxtrain.models import families

    if tables == "none":
        return set()
    config = families.read_config(folder, family)
    params = ("lm_head.embedding", *(("embed.embedding",) if tables == "all" else ()))
    names = {
        name
        for entry in families.family(config).names(config)
        if entry.param in params
        for name in entry.op.shapes((config.vocab_size, config.hidden_size))
    }
    if tables == "all":  # a head that is stored again must stay equal to the embeddings
        names |= config.table_copies.keys() & open_folder(folder).tensors.keys()
    if not names:
        raise UserError(
            f"quantize: the head of {config.architecture} in {folder} is its table of embeddings;"
            " remove --tables head, or quantize both by --layout torchao --tables all"
        )
    return names


def list_notes(scheme: str, group: int, names: Collection[str]) -> Iterator[str]:
    """Yield notes on readers that do not support parts of the folder."""
    if scheme == "int4" and group not in VLLM_GROUPS:
        shown = ", ".join(map(str, VLLM_GROUPS))
        yield f"note: vLLM's kernels for NVIDIA GPUs take groups of {shown}, not of {group}"
    if scheme == "int8" and any(".experts." in name for name in names):
        yield "note: transformers reads experts in fp8 and int4, not in int8"


def check_experts(config: DecoderConfig) -> None:
    """Raise UserError where all experts of a layer are one tensor: no Linear, for which there is a
    layout that vLLM reads."""
    from jaxtrain.adapters.spec import find_linears
    from jaxtrain.huggingface.files import spell
    from jaxtrain.models import families

    entries = {entry.param: entry.op for entry in families.family(config).names(config)}
    for path, linear in find_linears(config).items():
        shapes = entries[f"{path}.kernel"].shapes(linear.shape)
        fused = next((name for name, shape in shapes.items() if len(shape) > 2), None)
        if fused is not None:
            raise UserError(
                f"quantize: {config.architecture} keeps all experts of a layer in one tensor"
                f" ({spell(fused)}), for which compressed-tensors has no layout that vLLM loads for"
                " it; serve it as it is, or with vLLM's own --quantization fp8"
            )


def tell_loss(trained: Trained, model: Path, output: Path) -> None:
    """Held-out loss of what was exported, and of what the new folder stands for. model: the folder
    that export or merge make of the run."""
    import jax

    config, task, snapshot, _ = trained
    if not config.data.eval_datasets:
        print(
            "held-out loss: the run has no eval data; jaxtrain eval --config FILE"
            f" data.eval_datasets.0.path=DATA model.path={output}, and the same with {model}"
        )
        return
    adapter = snapshot.roles.bundle.adapter
    if adapter is not None and len(snapshot.roles.roles) > 1:
        print(
            "held-out loss: not measured, its reference is the base under the adapter; jaxtrain"
            f" eval --config FILE model.path={output} adapter=none takes another one"
        )
        return
    with jax.set_mesh(task.mesh):
        losses = [measure(trained, snapshot), measure(trained, open_again(trained, output))]
    for dataset, before, after in zip(config.data.eval_datasets, *losses, strict=True):
        change = "no trained token"
        if before is not None and after is not None:
            change = f"{before:.6g} -> {after:.6g} (weights rounded, activations not)"
        print(f"held-out loss of {dataset.path} ({dataset.split}): {change}")


def measure(trained: Trained, snapshot: ModelSnapshot) -> list[float | None]:
    """Held-out loss of each dataset of data.eval_datasets; None without trained tokens."""
    from jaxtrain.core.evaluation import HeldOutEvaluation
    from jaxtrain.core.scorer import Scorer

    config, task, *_ = trained
    evaluation = HeldOutEvaluation(config, task, snapshot.roles)
    scorer = Scorer(lambda: snapshot, impl=config.model.logp)
    by_dataset, _ = evaluation.list_numbers(snapshot, scorer)
    return [means.get("loss") for means in by_dataset]


def open_again(trained: Trained, folder: Path) -> ModelSnapshot:
    """The run's models, the trained one with all weights of a folder and without adapter."""
    from jaxtrain.core.roles import ModelSnapshot, Roles
    from jaxtrain.models import families, loading

    config, _, snapshot, _ = trained
    roles, parts = snapshot.roles, snapshot.roles.bundle
    architecture = families.read_config(folder, config.model.family).for_rows(parts.row_tokens)
    if parts.adapter is not None:
        parts = dataclasses.replace(parts, adapter=None, folder=folder, architecture=architecture)
        role = dataclasses.replace(roles.roles[roles.trained], bundle=parts)
        roles = Roles({roles.trained: role})
    tensors = loading.read_params(folder, parts.mesh, architecture, **parts.options)
    shapes = {**roles.copy_shapes, **roles.trained_shapes}
    weights = {path: value.astype(shapes[path].dtype) for path, value in tensors}
    base_weights = {path: value for path, value in snapshot.weights.items() if path not in weights}
    if trained.snapshot.roles.bundle.adapter is not None:
        base_weights = {}
    return ModelSnapshot(roles, {**base_weights, **weights}, snapshot.step)
