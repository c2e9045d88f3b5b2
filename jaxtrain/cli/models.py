"""The verb models: supported families; a model's layers, and the memory that training it takes."""

import collections
import json
from pathlib import Path
from typing import Any, get_args

from jaxtrain.arguments import Parser, expand_path, require_exists

TESTED = (
    "Tests compare each family with transformers on tiny random models; docs/models.md lists what"
    " they cover. Of published weights SmolLM2-135M-Instruct (llama) has been run."
)
TOKENS = 2048
"""Tokens of a row where none are asked for."""
ADAPTED = "bfloat16"
"""model.param_dtype beside an adapter, as in the configs that come with jaxtrain."""
METHODS: dict[str, tuple[dict[str, str], str]] = {
    "SFT": ({}, ""),
    "SFT, LoRA": ({"kind": "lora"}, ""),
    "SFT, QLoRA": ({"kind": "lora", "quantize": "nf4"}, ""),
    "DPO": ({}, "reference"),
    "DPO, LoRA": ({"kind": "lora"}, "reference"),
    "GRPO": ({}, "sampler"),
    "GRPO, LoRA": ({"kind": "lora"}, "sampler"),
}
"""{method: (section adapter, what else takes memory)}."""


def run_models(argv: list[str]) -> int:
    """List the supported model families; or, for a model folder or a config.json: whether it is
    supported, its layers, and what SFT, DPO and GRPO of it take of one device's memory. Exit
    code 2 where it is not supported."""
    from jaxtrain.config import ModelConfig

    remats = get_args(ModelConfig.model_fields["remat"].annotation)
    parser = Parser("jaxtrain models", description=run_models.__doc__)
    parser.add_argument("path", nargs="?", type=expand_path, help="model folder, or a config.json")
    parser.add_argument(
        "--tokens", type=int, help="of a row; default 2048, or the model's longest text if shorter"
    )
    parser.add_argument("--rows", type=int, default=1, help="of a forward pass; default 1")
    parser.add_argument("--remat", default="full", choices=remats, help="model.remat; default full")
    parser.add_argument("--json", action="store_true", help="one object instead of text")
    args = parser.parse_args(argv)
    if args.path is None:
        families = list_families()
        print(json.dumps(families, indent=1) if args.json else render_families(families))
        return 0
    require_exists("models", args.path)
    facts = describe_model(args.path, args.tokens, args.rows, args.remat)
    print(json.dumps(facts, indent=1) if args.json else render_model(facts))
    return 0 if facts["supported"] else 2


def list_families() -> list[dict[str, Any]]:
    """Return [{"family", "model_type", "architectures", "about"}], built in or installed."""
    from jaxtrain import plugins
    from jaxtrain.models import ARCHITECTURES
    from jaxtrain.models.families import find_family

    installed = (entry.name for entry in plugins.list_entry_points("models"))
    architectures = collections.defaultdict(list)
    for name in dict.fromkeys((*ARCHITECTURES, *installed)):
        architectures[find_family(name)].append(name)
    return [
        {
            "family": module.__name__.rpartition(".")[2],
            "model_type": getattr(module.Config, "text_type", module.Config.model_type),
            "architectures": names,
            "about": " ".join((module.__doc__ or "").split("\n\n")[0].split()),
        }
        for module, names in sorted(architectures.items(), key=lambda item: item[0].__name__)
    ]


def render_families(families: list[dict[str, Any]]) -> str:
    """Render the list for people."""
    import textwrap

    lines = []
    for entry in families:
        lines.append(f"{entry['family']:<18}{', '.join(entry['architectures'])}")
        lines += textwrap.wrap(entry["about"], 96, initial_indent="    ", subsequent_indent="    ")
    return "\n".join([*lines, "", *textwrap.wrap(TESTED, 96)])


def describe_model(path: Path, tokens: int | None, rows: int, remat: str) -> dict[str, Any]:
    """Return what `render_model` shows of a folder or of a config.json. tokens: of a row; None:
    TOKENS, or the model's longest text if shorter. UserError for a path that has none, for numbers
    below 1, and for rows that the model cannot read."""
    from jaxtrain.errors import UserError
    from jaxtrain.huggingface.files import read_object
    from jaxtrain.models import families

    for name, number in (("--tokens", tokens), ("--rows", rows)):
        if number is not None and number < 1:
            raise UserError(f"models: {name} {number} must be at least 1")
    try:
        config = (
            families.read_config(path)
            if path.is_dir()
            else families.config_from_hf(read_object(path))
        )
    except UserError as reason:
        if path.is_dir() and not (path / "config.json").is_file():
            raise
        return {"supported": False, "reason": str(reason)}
    if tokens is None:
        tokens = min(TOKENS, config.longest)
    for_rows = config.for_rows(tokens)
    if tokens > for_rows.longest:
        raise UserError(
            f"models: --tokens {tokens} is longer than the model's {for_rows.longest_said}; lower"
            " the first"
        )
    from jaxtrain.models import build
    from jaxtrain.models.draft import BaseDraftConfig

    facts = {
        "supported": True,
        "architecture": config.architecture,
        "family": families.family(config).__name__.rpartition(".")[2],
        "parameters": build.param_count(config),
        "layers": describe_layers(config),
        "carried": list(config.carries),
        "longest": config.longest,
        "step": {"tokens": tokens, "rows": rows, "remat": remat},
    }
    if isinstance(config, BaseDraftConfig) or config.score is not None:
        kind = "guesses for another model" if config.score is None else "scores texts"
        return {**facts, "memory": {}, "not_estimated": f"it {kind}"}
    return {**facts, "memory": estimate_methods(config, tokens, rows, remat)}


def describe_layers(config: Any) -> list[str]:
    """Return "6 x Attention, window 512" for all kinds of layers, and a line on experts."""
    from jaxtrain.models import build

    counts = collections.Counter(
        type(mixer).__name__ + (f", window {spec.window}" if spec.window else "")
        for spec, mixer in build.abstract(config).stack.mixers()
    )
    lines = [f"{count} x {name}" for name, count in counts.items()]
    if config.experts_per_token is not None:
        top, count = config.experts_per_token
        lines.append(f"{top} of {count} experts for a token")
    return lines


def estimate_methods(config: Any, tokens: int, rows: int, remat: str) -> dict[str, Any]:
    """Return {method: {what: GiB on one device}, or {"reason"}}."""
    from jaxtrain.errors import UserError

    memory: dict[str, Any] = {}
    for name, (adapter, beside) in METHODS.items():
        try:
            memory[name] = estimate_method(config, adapter, beside, tokens, rows, remat)
        except UserError as reason:
            memory[name] = {"reason": str(reason)}
    return memory


def estimate_method(
    config: Any, section: dict[str, str], beside: str, tokens: int, rows: int, remat: str
) -> dict[str, float]:
    """Return {what: GiB on one device}, as `--dry-run` computes it with default keys, and under
    "trained" the number of weights that are.

    beside: "reference", a copy of the start where there is no adapter to switch off; "sampler", the
    local engine's weights and its cache for the answers of a batch, of `tokens` each.
    """
    import jax

    from jaxtrain.cli.estimate import bytes_per_device, read_bundle_work
    from jaxtrain.config import AdapterConfig, ModelConfig, OptimConfig
    from jaxtrain.core.adapter import make_adapter
    from jaxtrain.core.bundle import ModelBundle, model_options
    from jaxtrain.core.optimizer import build_schedule
    from jaxtrain.core.roles import Role, Roles, open_optimizer
    from jaxtrain.core.step import abstract_state
    from jaxtrain.distributed.mesh import make_mesh
    from jaxtrain.methods.reference_model import REFERENCE, find_reference
    from jaxtrain.runs.estimate.estimate import GIB, Sizes, StepRows
    from jaxtrain.runs.estimate.estimate import memory as count_memory

    dtype = {"param_dtype": ADAPTED} if section else {}
    model = ModelConfig(path="config.json", remat=remat, **dtype)  # pyright: ignore[reportArgumentType]
    adapter = make_adapter(AdapterConfig(**section), config)  # pyright: ignore[reportArgumentType]
    mesh = make_mesh(jax.devices()[:1])
    bundle = ModelBundle(
        tokenizer=None,
        architecture=config.for_rows(tokens),
        mesh=mesh,
        folder=None,
        options=model_options(model),
        adapter=adapter,
    )
    roles = {"policy": Role(bundle)}
    if beside == "reference":
        roles[REFERENCE] = Role(bundle, find_reference("auto", adapter))
    with jax.set_mesh(mesh):
        opened, optim = Roles(roles), OptimConfig()
        optimizer, _ = open_optimizer(optim, build_schedule(optim, 100), opened)
        trained = opened.trained_shapes
        state = abstract_state(trained, optimizer, opened.copy_shapes)
        entries = sum(value.size for value in trained.values())
        slots = bytes_per_device(state.opt_state) / max(entries, 1)
        work = read_bundle_work(bundle, trained.keys(), slots)
        parts = count_memory(work, Sizes(mesh.shape), StepRows(tokens, rows), buffer=1.0)
        untrained = {**opened.frozen_shapes, **opened.copy_shapes}
        size = bytes_per_device({path: v for path, v in untrained.items() if "/" in path})
        if beside == "sampler":
            size += count_sampler(bundle, trained, tokens)
    return {**parts, **({beside: size / GIB} if size else {}), "trained": float(entries)}


def count_sampler(bundle: Any, trained: Any, tokens: int) -> int:
    """Return the bytes of what the local engine copies of the weights, and of its cache."""
    import jax
    import numpy as np

    from jaxtrain.config import RolloutConfig
    from jaxtrain.core.weights import abstract_params
    from jaxtrain.generation.local.weights import find_dtypes

    rollout = RolloutConfig()
    answers = min(rollout.max_batch, rollout.prompts_per_step * rollout.group_size)
    shapes, rebuild = abstract_params(bundle)
    model = rebuild(shapes)
    dtypes = {path: shape.dtype for path, shape in shapes.items()} | find_dtypes(model)
    copied = sum(
        shape.size * np.dtype(dtypes[path]).itemsize
        for path, shape in shapes.items()
        if path in trained or dtypes[path] != shape.dtype
    )
    cache = jax.eval_shape(lambda: model.init_cache(answers, tokens))
    return copied + sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def render_model(facts: dict[str, Any]) -> str:
    """Render what is known of a model for people."""
    from jaxtrain.text_safety import escape_control_chars

    if not facts["supported"]:
        return escape_control_chars(f"not supported: {facts['reason']}")
    lines = [
        f"{facts['architecture']} (family {facts['family']}): supported",
        f"  parameters   {facts['parameters']:,}",
        f"  layers       {'; '.join(facts['layers'])}",
        f"  texts        up to {facts['longest']:,} tokens",
    ]
    if facts["carried"]:
        names = ", ".join(f"{name}*" for name in facts["carried"])
        lines.append(f"  copied       {names}: into exports, not trained")
    if "not_estimated" in facts:
        return "\n".join([*lines, "", f"no memory of training: {facts['not_estimated']}"])
    step = facts["step"]
    lines += [
        "",
        f"GiB on one device, estimated for {step['rows']} x {step['tokens']:,} tokens,"
        f" model.remat={step['remat']}, AdamW,",
        f"weights in float32, beside an adapter in {ADAPTED}:",
        f"  {'':<12}{'trained':>16}{'weights':>10}{'gradients':>11}{'optimizer':>11}"
        f"{'beside':>9}{'activations':>13}{'sum':>9}",
    ]
    for name, parts in facts["memory"].items():
        if "reason" in parts:
            lines.append(f"  {name:<12}not possible: {parts['reason']}")
            continue
        gib = collections.defaultdict(float, parts)
        entries = gib.pop("trained")
        beside = gib["reference"] + gib["sampler"]
        state = gib["weights"] + gib["gradients"] + gib["optimizer"] + beside
        total = sum(gib.values())
        lines.append(
            f"  {name:<12}{entries:>16,.0f}{gib['weights']:>10.2f}{gib['gradients']:>11.2f}"
            f"{gib['optimizer']:>11.2f}{beside:>9.2f}{total - state:>13.2f}{total:>9.2f}"
        )
    lines += ["", "beside: DPO's reference; GRPO's local sampler and its cache. docs/scale.md says"]
    lines.append("what the estimate rests on; --dry-run counts a config's own arrays.")
    return escape_control_chars("\n".join(lines))
