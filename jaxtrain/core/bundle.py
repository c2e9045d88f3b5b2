"""ModelBundle: tokenizer, architecture and mesh of the trained model, built from a Config.

All checks that need no weights happen here, so that a mistake costs seconds. Weights follow from a
bundle in core/weights.py.
"""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jaxtrain_kernels import tree_attention
from jaxtrain_kernels.grouped_matmul import moe
from jaxtrain_kernels.logp_gather import BACKENDS as LOGP_BACKENDS

from jaxtrain.config import Config, ModelConfig, ParallelConfig
from jaxtrain.core.architecture import (
    check_kind,
    choose_head,
    find_architecture,
    find_tokenizer,
    grow_tables,
    name_padding,
    read_config,
)
from jaxtrain.distributed.compile_cache import keep_compiled
from jaxtrain.distributed.feed import row_shards
from jaxtrain.distributed.mesh import is_main_process, make_mesh, split_devices
from jaxtrain.errors import UserError
from jaxtrain.huggingface.chat_template import start_worker
from jaxtrain.huggingface.tokenizer import remove_tokens_beyond
from jaxtrain.layers.expert_transport import Transport
from jaxtrain.layers.fp8 import Fp8Product
from jaxtrain.models import families
from jaxtrain.models.scores import ScoreHead
from jaxtrain.text_safety import show


@dataclass(frozen=True)
class ModelBundle:
    """A model as the config describes it, before any weight is allocated."""

    tokenizer: Any
    architecture: Any
    """Config of the model family."""
    mesh: jax.sharding.Mesh
    folder: Path | None
    """Folder of the weights; None for a random start."""
    options: dict[str, Any]
    """Keyword arguments of build.abstract, build.init and loading.load; with `part` the model has
    only some of its parameters."""
    adapter: Any = None
    """The adapters.spec.Adapter that is trained; None trains all weights."""
    product: Fp8Product | None = None
    """FP8 products of the Linears in layers; None: products in the compute dtype."""
    untrained: tuple[str, ...] = ()
    """Beginnings of the paths of parameters that stay as they are, where no adapter is trained."""
    row_tokens: int = 0
    """Tokens of the longest text that models will see; 0: unknown."""


def build_model_bundle(
    config: Config, reserved: int = 0, score: ScoreHead | None = None, key: str = "rollout.devices"
) -> ModelBundle:
    """Build the bundle of section `model`: model, tokenizer and mesh, checked against each other;
    raises UserError.

    reserved: number of devices at the end of the list that `key` keeps out of the mesh. score: the
    head that the method trains instead of the language model's.
    """
    if config.run.compile_cache:
        keep_compiled()
    check_backends(config.model)
    folder, raw = find_architecture(config.model)
    if folder is not None and is_main_process():
        from jaxtrain.huggingface.generation import find_problem

        if problem := find_problem(folder):
            print(f"warning: {problem}", file=sys.stderr, flush=True)
    if config.model.chat_template is None and (source := config.model.tokenizer or folder):
        start_worker(Path(source))
    architecture = choose_head(read_config(config.model, raw, folder), score)
    check_kind(config.task.kind, raw, "model.path")
    if is_main_process():
        families.warn_unread(architecture)
    if folder is None or config.model.init == "random":
        architecture.check_drawn()
    tokenizer = find_tokenizer(config.model)
    architecture, new = grow_tables(config, architecture, tokenizer)
    removed = remove_tokens_beyond(tokenizer, architecture.vocab_size)
    if removed and is_main_process():
        print(
            f"note: {len(removed)} added tokens of the tokenizer, such as {show(removed[0], 40)},"
            f" are beyond the model's vocab_size {architecture.vocab_size}; they are read as text",
            file=sys.stderr,
        )
    if score is not None:
        architecture = name_padding(architecture, tokenizer)
    architecture = architecture.for_rows(config.data.sequence_len)
    if config.model.mtp.train != "none":
        architecture = add_head(config, architecture, folder)
    check_fit(config, architecture, tokenizer)
    # Devices are touched as late as possible: the checks above need none.
    mesh = make_mesh(split_devices(reserved, key)[0], **config.parallel.axes())
    adapter = None
    if config.adapter.kind != "none":
        from jaxtrain.core.adapter import make_adapter

        adapter = make_adapter(config.adapter, architecture, new)
    return ModelBundle(
        row_tokens=config.data.sequence_len,
        tokenizer=tokenizer,
        architecture=architecture,
        mesh=mesh,
        folder=folder if config.model.init == "pretrained" else None,
        options={**model_options(config.model), "transport": make_transport(config.parallel)},
        adapter=adapter,
        untrained=find_untrained(config.model, architecture),
        product=make_product(config.model),
    )


def add_head(config: Config, architecture: Any, folder: Path | None) -> Any:
    """Return the architecture with its multi-token prediction head; UserError where none can be
    trained."""
    from jaxtrain.huggingface.packed import open_folder
    from jaxtrain.models.mtp import with_head

    key = f'model.mtp.train "{config.model.mtp.train}"'
    if config.adapter.kind != "none":
        raise UserError(
            f"{key} trains the head in full, and adapter.kind {config.adapter.kind!r} trains an"
            " adapter alone: remove one of them (a head without training stays as in the folder)"
        )
    drawn = folder is None or config.model.init == "random"
    return with_head(architecture, None if drawn else open_folder(folder).tensors, key)


UNTRAINED = {"none": ("vision.",), "projector": ("vision.tower.",), "all": ()}
"""What model.vision.train leaves as it is, by its value."""


def find_untrained(model: ModelConfig, architecture: Any) -> tuple[str, ...]:
    """Return the beginnings of the paths that model.vision.train leaves as they are; UserError
    where there is nothing to train."""
    if architecture.vision is None and model.vision.train != "none":
        raise UserError(
            f"model.vision.train {model.vision.train!r} is for models that read images;"
            f" {architecture.architecture} has no tower here: remove it"
        )
    return () if architecture.vision is None else UNTRAINED[model.vision.train]


def build_auxiliary_bundle(
    model: ModelConfig, bundle: ModelBundle, key: str, score: ScoreHead | None = None
) -> ModelBundle:
    """Build the bundle of another model on the mesh of the trained one, without adapter, such as a
    teacher; UserError where it reads other tokens. key: the section that names it. score: the head
    that the folder must have."""
    folder, raw = find_architecture(model)
    check_kind(None, raw, key)
    architecture = choose_head(read_config(model, raw, folder), score, key)
    if is_main_process():
        families.warn_unread(architecture, key)
    if score is not None and architecture.score.drawn:
        raise UserError(f"{key} holds {architecture.architecture}, which gives no scores")
    if architecture.vocab_size < len(bundle.tokenizer):
        raise UserError(
            f"{key}: the model has {architecture.vocab_size} tokens, the tokenizer"
            f" {len(bundle.tokenizer)}; choose a model that reads the same tokens"
        )
    return dataclasses.replace(
        bundle,
        architecture=architecture.for_rows(bundle.row_tokens),
        folder=folder if model.init == "pretrained" else None,
        options={**model_options(model), "transport": bundle.options["transport"]},
        adapter=None,
        product=make_product(model),
    )


def count_microsteps(config: Config, mesh: jax.sharding.Mesh) -> int:
    """Return the microsteps per optimizer step, from the accumulation or the global batch size."""
    rows = config.data.micro_batch_size * row_shards(mesh)
    batch_size = config.data.global_batch_size
    if batch_size is None:
        return config.optim.gradient_accumulation_steps
    if batch_size % rows:
        raise UserError(
            f"data.global_batch_size {batch_size} is not a multiple of {rows}, the rows of one"
            f" forward pass (data.micro_batch_size {config.data.micro_batch_size} on"
            f" {row_shards(mesh)} row shards); change one of them"
        )
    return batch_size // rows


def model_options(model: ModelConfig) -> dict[str, Any]:
    """Return the keyword arguments of the model builders."""
    return {
        "param_dtype": model.param_dtype,
        "dtype": model.compute_dtype,
        "remat": model.remat,
        "scan_layers": model.scan_layers,
        "attention_impl": model.attention,
        "experts_impl": model.experts,
    }


def check_backends(model: ModelConfig) -> None:
    """Refuse names of backends that their op does not have."""
    backends = {
        "attention": tree_attention.BACKENDS,
        "logp": LOGP_BACKENDS,
        "experts": moe.BACKENDS,
    }
    for key, names in backends.items():
        if (name := getattr(model, key)) not in ("auto", *names):
            raise UserError(
                f"model.{key} {name!r} is no backend; choose one of auto, {', '.join(names)}"
            )


def make_product(model: ModelConfig) -> Fp8Product | None:
    """Return the FP8 products of key matmul; UserError where the devices have none."""
    if model.matmul == "default":
        return None
    device = jax.devices()[0]
    if device.platform == "gpu":
        capable = float(getattr(device, "compute_capability", 0)) >= 8.9
    else:
        # The CPU computes the same numbers in float32, for tests.
        capable = device.platform == "cpu"
    if not capable:
        raise UserError(
            f"model.matmul {model.matmul!r} needs GPUs with FP8 (Ada, Hopper and later), found"
            f" {device.device_kind}; remove it"
        )
    scale = "row" if model.matmul == "fp8_row" else "tensor"
    return Fp8Product(scale, model.matmul_gradients)


def make_transport(parallel: ParallelConfig) -> Transport:
    """Return how tokens reach experts of other devices."""
    return Transport(
        parallel.expert_transport,
        parallel.expert_buffer,
        parallel.expert_chunks,
        parallel.expert_wide_sums,
    )


def check_fit(config: Config, architecture: Any, tokenizer: Any) -> None:
    """Refuse a tokenizer or a row length that the model cannot take."""
    size = len(tokenizer)
    if size > architecture.vocab_size:
        raise UserError(
            f"model.tokenizer has {size} tokens but the model's vocab_size is"
            f" {architecture.vocab_size}; use the tokenizer that belongs to the model"
        )
    balancing = config.model.find_balancing()
    if balancing is not None and architecture.experts_per_token is None:
        raise UserError(
            f"{balancing} balances experts, but {architecture.architecture} has none; remove it"
        )
    if config.data.sequence_len > architecture.longest:
        raise UserError(
            f"data.sequence_len {config.data.sequence_len} is longer than the model's"
            f" {architecture.longest_said}; lower the first"
        )
