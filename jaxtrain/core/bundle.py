"""From a Config to the parts that every verb needs: tokenizer, architecture, mesh, model.

All checks that need no weights happen first, so that a mistake costs seconds.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from jaxtrain.adapters.attach import attach, draw_trained, split_trained
from jaxtrain.adapters.fused import NAME as FUSED
from jaxtrain.adapters.fused import find_tensors
from jaxtrain.adapters.peft import adapter_entries, load_trained, read_adapter
from jaxtrain.adapters.spec import Adapter, LoRASpec, choose_slots, find_linears
from jaxtrain.adapters.storage import find_stored, quantize_params
from jaxtrain.config import AdapterConfig, Config, ModelConfig, ParallelConfig
from jaxtrain.core.new_tokens import grow_tables
from jaxtrain.data.chat.added_tokens import add_tokens
from jaxtrain.data.chat.template import load_tokenizer, set_template
from jaxtrain.distributed.compile_cache import keep_compiled
from jaxtrain.distributed.feed import row_shards
from jaxtrain.distributed.mesh import is_main_process, make_mesh, split_devices
from jaxtrain.distributed.sharding import shardings
from jaxtrain.errors import UserError
from jaxtrain.huggingface.config_checks import TASK
from jaxtrain.huggingface.files import read_object
from jaxtrain.huggingface.generation import find_problem
from jaxtrain.huggingface.packed import open_folder
from jaxtrain.huggingface.tokenizer import find_differences
from jaxtrain.layers.expert_transport import Transport
from jaxtrain.layers.fp8 import Fp8Product, use_fp8
from jaxtrain.models import build, families, loading
from jaxtrain.models.naming import score_paths
from jaxtrain.models.parameters import Params, Rebuild, name_path, split_model
from jaxtrain.models.scores import ScoreHead
from jaxtrain.text_safety import show


@dataclass(frozen=True)
class ModelBundle:
    """What a config becomes before any weight is allocated."""

    tokenizer: Any
    architecture: Any
    """The model family's own Config."""
    mesh: jax.sharding.Mesh
    folder: Path | None
    """Where the weights lie; None for a random start."""
    options: dict[str, Any]
    """Keyword arguments of build.abstract, build.init and loading.load; with `part` some parameters of the
    model are all there is."""
    adapter: Adapter | None = None
    """What is trained, where that is not everything."""
    product: Fp8Product | None = None
    """What the Linears of the layers multiply by; None: in the dtype that they compute in."""
    row_tokens: int = 0
    """Of the longest text that models will see; 0: not known."""


def build_model_bundle(
    config: Config,
    reserved: int = 0,
    score: ScoreHead | None = None,
    key: str = "rollout.devices",
) -> ModelBundle:
    """What section `model` trains: model, tokenizer and mesh, checked against each other; raises
    UserError.

    reserved: devices, the last ones, that are left out of the mesh, as `key` says. score: the head
    that the method trains in the place of the language model's.
    """
    if config.run.compile_cache:
        keep_compiled()
    folder, raw = find_architecture(config.model)
    if folder is not None and is_main_process() and (problem := find_problem(folder)):
        print(f"warning: {problem}", file=sys.stderr, flush=True)
    architecture = choose_head(families.config_from_hf(raw, config.model.family, folder), score)
    check_kind(config.task.kind, raw, "model.path")
    if folder is None or config.model.init == "random":
        architecture.check_drawn()
    tokenizer = find_tokenizer(config.model)
    architecture, new = grow_tables(config, architecture, tokenizer)
    if score is not None:
        architecture = name_padding(architecture, tokenizer)
    architecture = architecture.for_rows(config.data.sequence_len)
    check_fit(config, architecture, tokenizer)
    return ModelBundle(
        row_tokens=config.data.sequence_len,
        tokenizer=tokenizer,
        architecture=architecture,
        mesh=make_mesh(split_devices(reserved, key)[0], **config.parallel.axes()),
        folder=folder if config.model.init == "pretrained" else None,
        options={**model_options(config.model), "transport": transport_of(config.parallel)},
        adapter=make_adapter(config.adapter, architecture, new),
        product=make_product(config.model),
    )


def build_auxiliary_bundle(
    model: ModelConfig, bundle: ModelBundle, key: str, score: ScoreHead | None = None
) -> ModelBundle:
    """Another model on the mesh of the trained one, without adapter, such as a teacher; UserError
    where it reads other tokens. key: the section that names it. score: as for `build_model_bundle`, but the
    folder must have such a head."""
    folder, raw = find_architecture(model)
    check_kind(None, raw, key)
    architecture = choose_head(families.config_from_hf(raw, model.family, folder), score, key)
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
    """Microsteps per optimizer step, from the accumulation or the global batch size."""
    rows = config.data.micro_batch_size * row_shards(mesh)
    wanted = config.data.global_batch_size
    if wanted is None:
        return config.optim.gradient_accumulation_steps
    if wanted % rows:
        raise UserError(
            f"data.global_batch_size {wanted} is not a multiple of {rows}, the rows of one forward"
            f" pass (data.micro_batch_size {config.data.micro_batch_size} on {row_shards(mesh)}"
            " row shards); change one of them"
        )
    return wanted // rows


def find_tokenizer(model: ModelConfig) -> Any:
    """The tokenizer that the model section names, with its chat template; what transformers changed
    about it is told on standard error."""
    name = model.tokenizer or model.path
    assert name is not None, "the config has one of the two"
    tokenizer = load_tokenizer(name)
    if is_main_process() and (difference := find_differences(tokenizer)):
        print(f"warning: {difference}", file=sys.stderr, flush=True)
    special = model.special_tokens
    add_tokens(tokenizer, model.added_tokens, special.additional_special_tokens, special.roles())
    if model.chat_template is not None:
        set_template(tokenizer, model.chat_template)
    return tokenizer


def model_options(model: ModelConfig) -> dict[str, Any]:
    """The config's strings as the model builders take them."""
    return {
        "param_dtype": model.param_dtype,
        "dtype": model.compute_dtype,
        "remat": model.remat,
        "scan_layers": model.scan_layers,
        "attention_impl": model.attention,
        "experts_impl": model.experts,
    }


def make_product(model: ModelConfig) -> Fp8Product | None:
    """What key matmul asks for; UserError where the devices have no FP8 to multiply in."""
    if model.matmul == "default":
        return None
    device = jax.devices()[0]
    if device.platform == "gpu":
        able = float(getattr(device, "compute_capability", 0)) >= 8.9
    else:
        able = device.platform == "cpu"  # where the same numbers are computed in float32: for tests
    if not able:
        raise UserError(
            f"model.matmul {model.matmul!r} needs GPUs with FP8 (Ada, Hopper and later), found"
            f" {device.device_kind}; remove it"
        )
    scale = "row" if model.matmul == "fp8_row" else "tensor"
    return Fp8Product(scale, model.matmul_gradients)


def transport_of(parallel: ParallelConfig) -> Transport:
    """How tokens reach experts of other devices."""
    return Transport(
        parallel.expert_transport,
        parallel.expert_buffer,
        parallel.expert_chunks,
        parallel.expert_wide_sums,
    )


def make_adapter(
    section: AdapterConfig, architecture: Any, new: Sequence[int] = ()
) -> Adapter | None:
    """What section `adapter` trains of this architecture; None trains everything. new: ids of
    tokens whose rows are trained where their table is not."""
    if section.kind == "none":
        return None
    tables = {"embed.embedding"} if section.train_embeddings else set()
    scores = set(score_paths(architecture))
    tensors = find_tensors(architecture) if section.quantize == FUSED else {}
    if section.train_head and not scores:
        tables.add("embed.embedding" if architecture.tie_word_embeddings else "lm_head.embedding")
    if section.path is None:
        slots = choose_slots(
            find_linears(architecture),
            section.targets(),
            LoRASpec(section.rank, section.alpha, section.rslora, section.kind == "dora"),
            section.rank_pattern,
            section.alpha_pattern,
        )
        full = tuple(sorted(tables | scores))
        names = [name for name in list_tables(architecture) if f"{name}.embedding" not in full]
        made = Adapter(
            slots,
            full,
            section.dtype,
            dropout=section.dropout or 0.0,
            quantize=section.quantize,
            tensors=tensors,
            rows=dict.fromkeys(names, tuple(new)) if new else {},
        )
        adapter_entries(architecture, made)  # what could not be exported is refused now
        return made
    found = read_adapter(section.path, architecture, section.dtype)
    dropout = found.dropout if section.dropout is None else section.dropout
    if dropout >= 1:
        raise UserError(
            f"adapter.path {section.path!r} has lora_dropout {dropout}, which leaves nothing to"
            " learn from; set adapter.dropout below 1"
        )
    found = dataclasses.replace(found, dropout=dropout, quantize=section.quantize, tensors=tensors)
    for name in list_tables(architecture):
        if f"{name}.embedding" not in found.full and set(new) - set(found.rows.get(name, ())):
            raise UserError(
                f"adapter.path {section.path!r} has no rows for the tokens that section model adds,"
                " and fixes what is trained; leave them out, or merge it (jaxtrain merge) and"
                " train a new adapter on that"
            )
    if any(slot.dora != (section.kind == "dora") for slot in found.slots.values()):
        raise UserError(
            f"adapter.kind is {section.kind} but adapter.path {section.path!r} holds"
            f" {'lora' if section.kind == 'dora' else 'dora'}; change adapter.kind"
        )
    own = {"rank", "alpha", "rslora", "target", "rank_pattern", "alpha_pattern"}
    given = sorted(own & set(section.model_dump(exclude_defaults=True)))
    if given or not tables <= set(found.full):
        raise UserError(
            f"adapter.{(given or ['train_embeddings and train_head'])[0]} is fixed by adapter.path"
            f" {section.path!r}; remove it"
        )
    return found


def list_tables(architecture: Any) -> list[str]:
    """Paths of the tables that have a row a token: the embedding, and a head of its own."""
    own = not architecture.tie_word_embeddings and architecture.score is None
    return ["embed", "lm_head"] if own else ["embed"]


def abstract_params(
    bundle: ModelBundle, mesh: jax.sharding.Mesh | None = None
) -> tuple[dict[str, Any], Rebuild]:
    """Parameter shapes with their places on the parts' mesh, or on another, and what makes a model
    of such a dict.

    Nothing is allocated. The model that is rebuilt remembers how parts.folder stored its tensors,
    so that an export keeps their dtypes.
    """
    model = build.abstract(bundle.architecture, **bundle.options)
    if bundle.product is not None:
        model = use_fp8(model, bundle.product)
    if bundle.folder is not None:
        model = loading.remember(model, bundle.folder)
    if bundle.adapter is not None:
        model = attach(model, bundle.adapter)
    shapes, rebuild = split_model(model)
    placed = jax.tree_util.tree_leaves_with_path(shardings(nnx.state(model), mesh or bundle.mesh))
    places = {name_path(path): place for path, place in placed}
    adapter = bundle.adapter
    full = {} if adapter is None else dict.fromkeys(adapter.full, adapter.dtype)
    return {
        path: jax.ShapeDtypeStruct(shape.shape, full.get(path, shape.dtype), sharding=places[path])
        for path, shape in shapes.items()
    }, rebuild


def open_base(bundle: ModelBundle, seed: int) -> Params:
    """The weights of the model without adapters, on the mesh: loaded, or random by the seed."""
    quantize = "none" if bundle.adapter is None else bundle.adapter.quantize
    shapes = {} if quantize == "none" else abstract_params(bundle)[0]
    options = {"by_layer": find_stored(shapes, quantize) if shapes else (), **bundle.options}
    if bundle.folder is not None:
        found = loading.read_params(
            bundle.folder, bundle.mesh, bundle.architecture, seed, **options
        )
    elif quantize == "none" and "part" not in bundle.options:
        model = build.init(bundle.architecture, seed, mesh=bundle.mesh, **bundle.options)
        return split_model(model)[0]
    else:
        found = build.draw_params(bundle.architecture, seed, mesh=bundle.mesh, **options)
    if not shapes or bundle.adapter is None:
        return dict(found)
    source = None
    if bundle.folder is not None:
        source = open_folder(bundle.folder), loading.stored_entries(bundle.architecture)
    return quantize_params(found, shapes, quantize, source, bundle.adapter.tensors)


def open_params(bundle: ModelBundle, seed: int) -> Params:
    """All weights that a fresh run starts from: the base, and adapters drawn or loaded."""
    base = open_base(bundle, seed)
    if bundle.adapter is None:
        return base
    shapes, _ = split_trained(abstract_params(bundle)[0], bundle.adapter)
    return {**base, **start_adapter(bundle, shapes, base, seed)}


def read_start(folder: str, bundle: ModelBundle, key: str) -> Adapter:
    """The parts' adapter, starting from another folder, which `key` names; UserError where that one
    trains anything else."""
    assert bundle.adapter is not None, "the config says that there is one"
    found = read_adapter(folder, bundle.architecture, bundle.adapter.dtype)
    trained = [(dict(one.slots), one.full, dict(one.rows)) for one in (found, bundle.adapter)]
    if trained[0] != trained[1]:
        raise UserError(
            f"{key} {folder!r} has other matrices, ranks or alphas than section adapter; all"
            " policies are alike: set adapter.rank, alpha and target to those of the folder"
        )
    return dataclasses.replace(bundle.adapter, source=found.source)


def start_adapter(
    bundle: ModelBundle, shapes: Mapping[str, Any], base: Params, seed: int
) -> Params:
    """What an adapter trains, as it starts on this base: drawn, or read from its folder. shapes: of
    it, with shardings."""
    assert bundle.adapter is not None, "the config says that there is one"
    if bundle.adapter.source is None:
        return draw_trained(dict(shapes), base, bundle.adapter, seed)
    return load_trained(dict(shapes), bundle.architecture, bundle.adapter)


def find_architecture(model: ModelConfig) -> tuple[Path | None, dict[str, Any]]:
    """(local folder or None, the keys of config.json)."""
    if model.architecture:
        return None, model.architecture
    assert model.path is not None, "the config has one of the two"
    folder = find_folder(model.path, weights=model.init == "pretrained")
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"model.path {model.path!r}: {path} does not exist")
    return folder, read_object(path)


def read_architecture(model: ModelConfig) -> Any:
    """The model family's own Config of what section `model` names, with the head that it has there;
    UserError as in `build_model_bundle`."""
    folder, raw = find_architecture(model)
    return families.config_from_hf(raw, model.family, folder)


def choose_head(found: Any, score: ScoreHead | None, key: str = "model.path") -> Any:
    """The architecture with the head that a method wants, None for the language model's; UserError
    where it has another one, or for a draft."""
    if found.guesses:
        raise UserError(
            f"{key} holds {found.architecture}, a draft model, which guesses for a target and"
            " writes nothing alone; name its target here, and the draft as task.draft.path (to"
            " train it) or with --draft"
        )
    if score is None:
        if found.score is None:
            return found
        name = found.to_hf()["architectures"][0]
        raise UserError(
            f"{key} holds {name}, which scores texts and writes none; train it with task.kind"
            ' "reward_model", score with it by `jaxtrain score`, or name a language model'
        )
    if found.score is None:
        return families.with_score(found, dataclasses.replace(score, drawn=True))
    if (found.score.per, len(found.score.labels)) != (score.per, len(score.labels)):
        wanted = score.to_hf(found.architecture)["architectures"][0]
        raise UserError(
            f"{key} holds {found.to_hf()['architectures'][0]} with {len(found.score.labels)}"
            f" labels; needed is {wanted} with {len(score.labels)}, or a language model, which gets"
            " such a head"
        )
    return found


def check_kind(kind: str | None, raw: Mapping[str, Any], key: str) -> None:
    """UserError for a folder that says another method reads it: as what else it would be taken for,
    its tokens mean nothing. kind: the method's; None: of no method that folders name."""
    named = (raw.get(TASK) or {}).get("kind")
    if named is not None and named != kind:
        raise UserError(
            f"{key} holds a model of task.kind {show(named)}, which predicts no next token; set"
            f" task.kind to it, name another model, or, to train it as a causal one after all, take"
            f" {TASK} out of its config.json"
        )


def keep_task(architecture: Any, section: Mapping[str, Any], **ids: int) -> Any:
    """The architecture with what its exports say of the method that reads them: the section task
    that opens them, and ids of tokens."""
    carried = {**dict(architecture.carried_attributes), TASK: json.dumps(section, sort_keys=True)}
    carried |= {name: str(index) for name, index in ids.items()}
    return dataclasses.replace(architecture, carried_attributes=tuple(carried.items()))


def name_padding(architecture: Any, tokenizer: Any) -> Any:
    """The architecture with the tokenizer's pad token where it names none: transformers finds the
    last token of a text by it."""
    carried = dict(architecture.carried_attributes)
    if carried.get("pad_token_id", "null") == "null" and tokenizer.pad_token_id is not None:
        carried["pad_token_id"] = str(int(tokenizer.pad_token_id))
    return dataclasses.replace(architecture, carried_attributes=tuple(carried.items()))


def find_folder(name: str, weights: bool, key: str = "model.path") -> Path:
    """A local folder as it is, or a Hub repository's snapshot. key: what names it."""
    if Path(name).is_dir():
        return Path(name)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(
            f"{key} {name!r} is not a folder here; give a folder with config.json and"
            " safetensors, or a Hub id such as Qwen/Qwen3-0.6B"
        )
    patterns = ["*.json", "*.jinja", "*.txt", *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{key} {name!r} is not a folder here and could not be read from the Hugging"
            f" Face Hub: {reason}"
        ) from None


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
