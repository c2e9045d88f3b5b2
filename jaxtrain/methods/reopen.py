"""Open a trained model: the newest checkpoint of a run, or a Hugging Face or PEFT folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxtrain.adapters.peft_config import TASK_SUFFIXES
from jaxtrain.adapters.peft_folder import CONFIG as PEFT_CONFIG
from jaxtrain.adapters.peft_folder import open_peft
from jaxtrain.config import Config, validate_config
from jaxtrain.config.load import apply_overrides, read_saved
from jaxtrain.config.parse import MAX_BYTES
from jaxtrain.config.policies import list_trained
from jaxtrain.config.root import OUTSIDE, find_tag
from jaxtrain.core.architecture import find_folder
from jaxtrain.core.base_model import with_saved_base
from jaxtrain.core.roles import ModelSnapshot, Roles
from jaxtrain.core.task import Task
from jaxtrain.errors import UserError
from jaxtrain.huggingface.config_checks import TASK, check_kept, check_names
from jaxtrain.huggingface.files import read_object
from jaxtrain.methods.registry import make_task
from jaxtrain.methods.reward_model.method import find_section
from jaxtrain.runs.base_record import require_same_base
from jaxtrain.runs.checkpoint import load_checkpoint
from jaxtrain.runs.checkpoint_folder import find_steps
from jaxtrain.safe_io import parse_json, read_text
from jaxtrain.text_safety import show


class Trained(NamedTuple):
    """A trained model with its config and task."""

    config: Config
    task: Task
    snapshot: ModelSnapshot
    """The models on the mesh; step 0 for a Hugging Face folder."""
    policies: Mapping[str, ModelSnapshot] = {}
    """Snapshot of each policy, with all_policies."""


def open_trained(
    name: str,
    overrides: list[str],
    step: int | None = None,
    *,
    frozen: bool = True,
    all_roles: bool = False,
    all_policies: bool = False,
    own_dtype: bool = False,
) -> Trained:
    """Open a run's output_dir, a Hugging Face or PEFT folder, or a Hub id. UserError for others.

    overrides: section.key=value on top of the run's saved config. frozen=False: of a run with
    adapters, load only the trained weights. all_roles: include the method's other models.
    all_policies: of a run that trained several, open all on one base; `snapshot` is the first.
    own_dtype: compute with a folder in the dtype that it is stored in, as vLLM and transformers do,
    instead of float32; a run always computes as it trained.
    """
    path = Path(name)
    saved = path / "config.json"
    is_run = holds_run(saved)
    table: dict[str, Any] = read_saved(saved) if is_run else {}
    if not is_run:
        if (path / "checkpoints").is_dir():
            raise UserError(f"{path} holds checkpoints but {saved} is not a run's config")
        model, adapter, task = find_weights(path, name)
        table = {
            "task": task,
            "run": {"max_steps": 1},
            "model": {"path": model, **choose_dtypes(model, overrides, own_dtype)},
            "adapter": adapter,
            "data": {"datasets": [{"path": "none"}], "sequence_len": 8},
        }
    origin = str(saved) if is_run else name
    config = alone(validate_config(apply_overrides(table, overrides), origin))
    # What is exported still names the base where it was.
    openable = with_saved_base(config, path) if is_run else config
    policies = list_trained(config) if is_run else ()
    if policies and not all_policies:
        raise UserError(
            f"{path} has trained several policies ({', '.join(policies)}); name the adapter of one,"
            f" {path / 'model' / policies[0]}, which jaxtrain export {path} writes"
        )
    task = make_task(openable)
    roles = Roles(task.roles)
    if not all_roles:
        roles = Roles({roles.trained: task.roles[roles.trained]})
    if not is_run:
        weights, base, copies = roles.open(0)
        return Trained(config, task, ModelSnapshot(roles, {**base, **copies, **weights}, 0))
    run_shapes = {"params": roles.trained_shapes, **roles.copy_shapes}
    policy_shapes = dict.fromkeys(policies, run_shapes)
    restored = load_checkpoint(
        path / "checkpoints", policy_shapes if policies else run_shapes, step
    )
    if frozen and roles.bundle.adapter is not None:
        cure = "put them back, or name their folder with model.path=FOLDER"
        require_same_base(path, roles.bundle.folder, cure)
    base = roles.open(config.run.seed, trained=False)[1] if frozen else {}

    def make_snapshot(arrays: Mapping[str, Any]) -> ModelSnapshot:
        copies = {name: value for name, value in arrays.items() if name != "params"}
        return ModelSnapshot(roles, {**base, **copies, **arrays["params"]}, restored.step)

    if not policies:
        return Trained(config, task, make_snapshot(restored.arrays))
    snapshots = {name: make_snapshot(restored.arrays[name]) for name in policies}
    first = next(iter(snapshots.values()))
    return Trained(config, task, first, snapshots)


def choose_dtypes(model: str, overrides: Sequence[str], own_dtype: bool) -> dict[str, str]:
    """Return the dtypes of section model for a folder: its own, or float32. An override of
    model.compute_dtype decides alone."""
    chosen = any(word.startswith("model.compute_dtype=") for word in overrides)
    if chosen or not own_dtype:
        return {"compute_dtype": "float32"}
    for word in overrides:
        # The base of an adapter may have moved.
        model = word.partition("=")[2] if word.startswith("model.path=") else model
    file = find_folder(model, weights=True) / "config.json"
    raw = read_object(file) if file.is_file() else {}
    parts = [part for part in (raw, raw.get("text_config")) if isinstance(part, dict)]
    dtypes = [part.get(key) for part in parts for key in ("dtype", "torch_dtype")]
    # Numbers of float16 folders may lie beyond what bfloat16 resolves.
    dtype = "bfloat16" if "bfloat16" in dtypes else "float32"
    return {"param_dtype": dtype, "compute_dtype": dtype}


def load_newer(
    name: str, snapshot: ModelSnapshot, policies: Mapping[str, ModelSnapshot]
) -> tuple[ModelSnapshot, dict[str, ModelSnapshot]] | None:
    """Return `open_trained`'s snapshots with the weights of a newer checkpoint; None if there is
    none, as of a folder. UserError for a damaged one."""
    folder = Path(name).expanduser() / "checkpoints"
    step = max(find_steps(folder), default=-1)
    if step <= snapshot.step:
        return None
    roles = snapshot.roles
    shapes = {"params": roles.trained_shapes, **roles.copy_shapes}
    restored = load_checkpoint(
        folder, dict.fromkeys(policies, shapes) if policies else shapes, step
    )

    def renew(old: ModelSnapshot, arrays: Mapping[str, Any]) -> ModelSnapshot:
        copies = {name: value for name, value in arrays.items() if name != "params"}
        return ModelSnapshot(roles, {**old.weights, **copies, **arrays["params"]}, step)

    if not policies:
        return renew(snapshot, restored.arrays), {}
    renewed = {name: renew(old, restored.arrays[name]) for name, old in policies.items()}
    return next(iter(renewed.values())), renewed


def holds_run(saved: Path) -> bool:
    """Return whether a config.json is a run's; a model's has other keys. False for one that cannot
    be read: loading the folder reports what is wrong with it."""
    try:
        saved_config = parse_json(read_text(saved, MAX_BYTES))
    except (OSError, ValueError):
        return False
    return isinstance(saved_config, dict) and {"run", "model", "optim"} <= set(saved_config)


def alone(config: Config) -> Config:
    """Return a run's config for a command that only reads the trained model: without devices set
    aside for rollouts and without a draft. What was trained exactly is read by the usual programs
    where there is no exact form."""
    devices = jax.devices()
    exact = config.rollout.exact and len(devices) == 1 and devices[0].platform in ("cpu", "gpu")
    changed = {"devices": 0, "draft": None, "draft_refresh": None, "exact": exact}
    rollout = config.rollout.model_copy(update=changed)
    return config.model_copy(update={"rollout": rollout})


def read_section(raw: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Return section task of a config.json: the exported one, or one that follows from its
    architecture. UserError for a method that is not built in: a foreign folder must not name code
    to run."""
    check_kept(raw)
    if section := raw.get(TASK):
        if find_tag(section) == OUTSIDE:
            raise UserError(
                f"{label}: {TASK} names task.kind {show(section.get('kind'))}, which is not built"
                " in; take it out, or open the run itself"
            )
        return section
    named = check_names(raw)[0] if raw else []
    return find_section(named[0]) if named else {}


def find_weights(path: Path, name: str) -> tuple[str, dict[str, str], dict[str, Any]]:
    """Return (model.path, section adapter, section task) for a name that is not a run: a PEFT
    folder names its base, a reward model the method that scores."""
    if not (path / PEFT_CONFIG).is_file():
        file = find_folder(name, weights=True) / "config.json"
        raw = read_object(file) if file.is_file() else {}
        return name, {}, read_section(raw, str(file))
    peft = open_peft(path)
    base = peft.config.get("base_model_name_or_path")
    if not base:
        raise UserError(
            f"{path / PEFT_CONFIG} names no base model: write base_model_name_or_path there, or"
            " name the base and adapter.kind=lora adapter.path=FOLDER after it"
        )
    adapter = {"kind": "dora" if peft.dora else "lora", "path": name}
    return base, adapter, find_section(TASK_SUFFIXES.get(str(peft.config.get("task_type")), ""))
