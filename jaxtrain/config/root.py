"""The whole config, and the rules that span its sections."""

from typing import TYPE_CHECKING, Annotated, Any, get_origin

from pydantic import BaseModel, Discriminator, InstanceOf, SerializeAsAny, model_validator

from jaxtrain.config.adapter import AdapterConfig, find_adapter_conflicts
from jaxtrain.config.base import (
    RESUMABLE,
    Problems,
    Section,
    at_most,
    broken,
    excludes,
    list_places,
    make_absolute,
    requires,
    section_type,
    unread,
    value_of,
)
from jaxtrain.config.data import DataConfig
from jaxtrain.config.env import EnvConfig
from jaxtrain.config.evals import EvalConfig, find_eval_set_conflicts
from jaxtrain.config.limits import PASS_TOKENS, STEP_TOKENS, TOKENS
from jaxtrain.config.methods import DEFAULT_KIND, KINDS, load_section, union_of
from jaxtrain.config.model import (
    OPTIMIZERS,
    SCHEDULES,
    ModelConfig,
    OptimConfig,
    find_width_conflict,
)
from jaxtrain.config.observers import ObserverConfig
from jaxtrain.config.policies import PolicyConfig, find_policy_problems
from jaxtrain.config.rewards import RewardConfig, find_reward_conflicts
from jaxtrain.config.rollout import RolloutConfig
from jaxtrain.config.run import (
    CheckpointConfig,
    LogConfig,
    ParallelConfig,
    RunConfig,
    find_parallel_conflicts,
)
from jaxtrain.config.secrets import redact
from jaxtrain.config.task import SamplingConfig, TaskSection

TASKS: dict[str, type[TaskSection]] = {kind: load_section(kind) for kind in KINDS}
"""The sections of the built-in methods, by task.kind."""
OUTSIDE = "outside"


def find_tag(task: Any) -> str:
    """Return the member of the union `Config.task` that a table or a section belongs to."""
    kind = task.get("kind", DEFAULT_KIND) if isinstance(task, dict) else getattr(task, "kind", None)
    return kind if isinstance(kind, str) and kind in TASKS else OUTSIDE


if TYPE_CHECKING:
    Task = TaskSection
else:
    Task = union_of(
        {**TASKS, OUTSIDE: SerializeAsAny[InstanceOf[TaskSection]]}, Discriminator(find_tag)
    )
"""Section task. `load.validate_config` builds that of a plug-in."""


class Config(Section):
    """Everything that a run depends on."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    adapter: AdapterConfig = AdapterConfig()
    data: DataConfig = DataConfig()
    task: Task = TASKS[DEFAULT_KIND]()
    optim: OptimConfig = OptimConfig()
    parallel: Annotated[ParallelConfig, RESUMABLE] = ParallelConfig()
    eval: Annotated[EvalConfig, RESUMABLE] = EvalConfig()
    sampling: Annotated[SamplingConfig, RESUMABLE] = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    env: EnvConfig = EnvConfig()
    rewards: list[RewardConfig] = []
    policies: dict[str, PolicyConfig] = {}
    checkpoint: Annotated[CheckpointConfig, RESUMABLE] = CheckpointConfig()
    log: Annotated[LogConfig, RESUMABLE] = LogConfig()
    observers: Annotated[list[ObserverConfig], RESUMABLE] = []

    @model_validator(mode="after")
    def check_sections_together(self) -> "Config":
        """Refuse combinations that cannot run, naming both keys and a fix."""
        if problems := list(find_conflicts(self)):
            raise Problems(problems)
        return self

    def absolute(self) -> dict[str, Any]:
        """The config as JSON in which relative paths of what is there are absolute, so that it
        means the same in any working directory. With secrets."""
        table = self.model_dump(mode="json")
        for key, value in list_places(self):
            *parents, name = key.split(".")
            node: Any = table
            for part in parents:
                node = node[int(part) if isinstance(node, list) else part]
            node[int(name) if isinstance(node, list) else name] = make_absolute(key, value)
        return table

    def saved(self) -> dict[str, Any]:
        """The config as JSON for whatever keeps or shows it: without secrets."""
        return redact(self.model_dump(mode="json"))


def is_resumable(key: str, kind: str) -> bool:
    """Return whether a key such as "rewards.0.timeout" may differ when a run is resumed."""
    section: type[BaseModel] | None = Config
    parts = iter(key.split("."))
    for part in parts:
        field = section.model_fields.get(part) if section is not None else None
        if field is None:
            return False
        if RESUMABLE in field.metadata:
            return True
        if get_origin(field.annotation) in (list, dict):
            next(parts, None)  # a position or a name
        is_task = section is Config and part == "task"
        section = TASKS.get(kind) if is_task else section_type(field.annotation)
    return False


RULES = (
    requires("model.architecture", "model.tokenizer", ", as it has none of its own"),
    unread("model.matmul", "model.compute_dtype", lambda dtype: dtype != "float64"),
    excludes("optim.warmup_steps", "optim.warmup_ratio"),
    excludes("optim.min_lr", "optim.min_lr_ratio"),
    at_most("optim.min_lr", "optim.learning_rate"),
    at_most("log.profile_start", "run.max_steps"),
    unread(
        "eval.per_epoch eval.at_start eval.patience checkpoint.best_metric",
        "eval.every",
        lambda every: every != "never",
    ),
    requires("eval.patience", "checkpoint.best_metric", ', such as "eval/loss"'),
    requires("eval.per_epoch", "run.num_epochs", "; by run.max_steps, set eval.every"),
    requires("checkpoint.per_epoch", "run.num_epochs", "; by run.max_steps, set checkpoint.every"),
)
"""Conflicts of the common sections' keys."""


def find_conflicts(config: Config):
    """Yield one sentence for each impossible combination."""
    run, model, data, optim = config.run, config.model, config.data, config.optim
    if not run.max_steps and not run.num_epochs:
        yield "neither run.max_steps nor run.num_epochs is set; set one"
    streamed = [d.path for d in data.datasets if d.streaming]
    if streamed and not run.max_steps:
        yield f"data.datasets {streamed[0]!r} streams and has no length; set run.max_steps"
    if streamed and data.num_workers:
        yield "data.num_workers needs random access; set it to 0 or streaming to false"
    if bool(model.path) == bool(model.architecture):
        yield (
            "set either model.path (a Hugging Face folder or Hub id) or model.architecture (a"
            f" config.json inline); {'both are' if model.path else 'neither is'} set"
        )
    if model.matmul != "default" and config.adapter.quantize != "none":
        yield (
            f"model.matmul {model.matmul!r} needs kernels as they are, and adapter.quantize"
            f" {config.adapter.quantize!r} stores them in fewer bits; remove one"
        )
    if model.vision.train != "none" and config.adapter.kind != "none":
        targets = {"projector": '"projector"', "all": '"tower", "projector"'}
        yield (
            f"model.vision.train {model.vision.train!r} trains weights beside which adapter.kind"
            f" {config.adapter.kind!r} leaves all as they are; remove it, and name"
            f" {targets[model.vision.train]} in adapter.target"
        )
    if not data.datasets:
        yield "data.datasets is empty; add a [[data.datasets]] table with a path"
    yield from broken(RULES, config)
    for key, name, builtin in (
        ("options", optim.name, OPTIMIZERS),
        ("scheduler_options", optim.lr_scheduler, SCHEDULES),
    ):
        if getattr(optim, key) and name in builtin:
            yield f"optim.{key} are for a function from outside; {name!r} is built in: set its keys"
    yield from optim.find_conflicts()
    if data.global_batch_size and optim.gradient_accumulation_steps > 1:
        yield (
            "data.global_batch_size sets the gradient accumulation by itself; remove"
            " optim.gradient_accumulation_steps"
        )
    yield from data.find_split_conflicts()
    if run.overwrite and run.resume == "required":
        yield 'run.overwrite is true and run.resume is "required"; keep one'
    for name in ("datasets", "eval_datasets"):
        for index, dataset in enumerate(getattr(data, name)):
            if dataset.tools and not config.task.trees:
                yield (
                    f"data.{name}.{index}.tools has no effect without task.kind tree: remove it,"
                    " and give rows their tools in a column"
                )
    yield from find_size_conflicts(config)
    yield from find_parallel_conflicts(config.parallel)
    evaluates = data.eval_datasets or config.eval.sets
    if config.eval.patience and not (config.eval.every or config.eval.per_epoch):
        yield "eval.patience needs evaluations on the way; set eval.every or eval.per_epoch"
    sources = "data.validation_split, [[data.eval_datasets]] or [[eval.sets]]"
    for key in ("eval.at_start", "eval.every", "eval.per_epoch", "checkpoint.best_metric"):
        if not evaluates and value_of(config, key) not in (None, False, "never"):
            yield f"{key} has nothing to evaluate; set {sources}"
    yield from find_adapter_conflicts(config.adapter)
    yield from find_reward_conflicts(config)
    yield from find_eval_set_conflicts(config)
    yield from find_policy_problems(config)
    yield from find_unused_sections(config)
    yield from config.task.find_conflicts(config)
    generated = any(dataset.path.startswith("builtin:caterpillar") for dataset in data.datasets)
    if generated and not config.task.trees:
        yield 'data.datasets builtin:caterpillar makes trees; set task.kind to "tree"'
    yield from find_width_conflict("model", model.compute_dtype, model.param_dtype)


def find_size_conflicts(config: Config):
    """Yield one sentence for each pair of sizes that cannot go together, or is beyond any use."""
    data, optim = config.data, config.optim
    length = getattr(config.task, "max_packed_tokens", None) or data.sequence_len
    rows = data.micro_batch_size * length
    if rows > PASS_TOKENS:
        yield (
            f"data.micro_batch_size {data.micro_batch_size:,} rows of {length:,} tokens are"
            f" {rows:,} tokens in one forward pass of one device; at most {PASS_TOKENS:,}"
        )
    microsteps = optim.gradient_accumulation_steps
    step = (data.global_batch_size or data.micro_batch_size * microsteps) * length
    if step > STEP_TOKENS:
        key = "optim.gradient_accumulation_steps"
        key = "data.global_batch_size" if data.global_batch_size else key
        yield f"{key} makes a step of {step:,} tokens; at most {STEP_TOKENS:,}"
    if data.global_batch_size and data.global_batch_size % data.micro_batch_size:
        yield (
            f"data.global_batch_size {data.global_batch_size} is not a multiple of"
            f" data.micro_batch_size {data.micro_batch_size}; change one of them"
        )
    if wrong := [size for size in data.length_buckets if not 8 <= size <= TOKENS]:
        yield f"data.length_buckets holds {wrong[0]:,}; lengths of rows are 8 to {TOKENS:,}"


def find_unused_sections(config: Config):
    """Yield a sentence for each section that is set, but that neither this task nor eval.sets read
    (rewards: all of them; env: those that have none of their own)."""
    sets = config.eval.sets
    used = {"env": any(eval_set.env is None for eval_set in sets), "rewards": bool(sets)}
    for name in ("rollout", "env", "rewards"):
        section = getattr(config, name)
        changed = section if name == "rewards" else section.model_dump(exclude_defaults=True)
        if not changed or name in config.task.reads or used.get(name):
            continue
        key = "rewards" if name == "rewards" else f"{name}.{next(iter(changed))}"
        readers = " or ".join(f'"{kind}"' for kind, task in TASKS.items() if name in task.reads)
        alternative = "" if name == "rollout" else " or [[eval.sets]]"
        if name == "env" and sets:
            alternative = " or an eval set without an env of its own"
        yield f"{key} has no effect without task.kind {readers}{alternative}; remove it"
