"""Section task of distillation: a student that follows a teacher's distributions."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from jaxtrain.config.limits import ROWS, SECONDS
from jaxtrain.config.model import DTYPE, ModelConfig
from jaxtrain.config.rollout import find_drawing_conflicts
from jaxtrain.config.task import TaskSection

KNOWN = ("data", "server")
"""Teachers of whom only the likeliest tokens are known."""
SAME = ("self", "start")
"""Teachers made of the student."""


class TeacherConfig(ModelConfig):
    """The teacher: with kind "model" and "server" the keys of section model say which model."""

    kind: Literal["model", "self", "start", "data", "server"] = "model"
    """model: another one in this process, frozen, sharded like the student. self: the student
    without its adapter. start: the student as it was at the start, frozen. data: columns of the
    rows hold the log-probs of its likeliest tokens. server: a vLLM server tells them."""
    param_dtype: DTYPE = "bfloat16"
    """Type of its weights, which nothing changes: one half of what a student's masters take."""
    url: str | None = None
    """server: its address, such as "http://localhost:8000"."""
    concurrency: int = Field(32, ge=1, le=ROWS)
    """server: sequences that are scored at a time."""
    request_seconds: float = Field(300.0, gt=0, le=SECONDS)
    """server: longest wait for one sequence; it is asked again at most 3 times."""


class DistillationTask(TaskSection):
    """Distillation: the divergence between a teacher's and the student's distributions of each
    trained token, on the data's answers, on the student's own, or on both (GKD)."""

    reads: ClassVar[frozenset[str]] = frozenset({"rollout", "env"})

    renamed: ClassVar[Mapping[str, str]] = {"renormalise": "renormalize"}

    kind: Literal["distillation"] = "distillation"
    """The training method."""
    teacher: TeacherConfig = TeacherConfig()
    """Who teaches."""
    beta: float = Field(0.0, ge=0, le=1)
    """0: forward KL(teacher | student). 1: reverse KL(student | teacher). Between: generalized
    Jensen-Shannon, as in GKD and TRL, whose default is 0.5. It shrinks towards both ends: at 0.1
    its numbers are about a tenth of those at 0."""
    temperature: float = Field(1.0, gt=0, le=1000)
    """Both models' logits are divided by it before they are compared. It does not touch ce_weight's
    term, nor how own answers are drawn (sampling.temperature)."""
    scale_by_temperature: bool = False
    """Multiply the divergence by temperature^2 (Hinton), which keeps its gradients alike at all
    temperatures. TRL does not."""
    top_k: int | None = Field(None, ge=1, le=4096)
    """Compare only the teacher's k likeliest tokens; unset: the whole vocabulary. Teachers of kind
    "data" and "server" need it."""
    rest: Literal["bucket", "renormalize", "teacher"] = "bucket"
    """top_k: what becomes of all other tokens. bucket: one more category on both sides.
    renormalize: both distributions are those among the k. teacher: only the teacher's is, the
    student's is that over the vocabulary (beta 0 alone; Axolotl's loss)."""
    ce_weight: float = Field(0.0, ge=0)
    """Factor of the usual negative log-likelihood of the data's tokens beside the divergence. What
    the student drew itself has no part in it."""
    on_policy_share: float = Field(0.0, ge=0, le=1)
    """Share of the prompts, chosen by run.seed, that the student answers itself,
    rollout.group_size times each, instead of training on the data's answer: GKD's and TRL's lambda.
    0: no answers are drawn, and section rollout has no effect."""
    share_prompts: bool = True
    """Compute the prompt of several own answers once, the answers as branches of a tree; false:
    flat rows."""

    @override
    def find_conflicts(self, config: Any) -> Iterator[str]:
        return find_distillation_conflicts(config)


def find_distillation_conflicts(config: Any) -> Iterator[str]:
    """Yield one sentence for each impossible combination around task.kind distillation."""
    task, data, adapter = config.task, config.data, config.adapter
    yield from find_teacher_conflicts(task.teacher, adapter)
    if config.rollout.router_replay:
        yield (
            "rollout.router_replay corrects ratios of policies, which task.kind distillation has"
            " none of; remove it"
        )
    kind = task.teacher.kind
    if kind in KNOWN and task.top_k is None:
        yield (
            f'task.teacher.kind "{kind}" knows the teacher\'s likeliest tokens alone; set'
            " task.top_k to how many of them to compare, such as 20"
        )
    if task.top_k is None and task.rest != "bucket":
        yield f'task.rest "{task.rest}" is for task.top_k, which is unset; set it, or remove rest'
    if task.rest == "teacher" and task.beta != 0:
        yield (
            'task.rest "teacher" compares with tokens that the teacher never says, so that'
            f' task.beta {task.beta:g} would be infinite; set rest to "bucket" or beta to 0'
        )
    if kind in KNOWN and task.temperature != 1 and task.rest == "bucket":
        yield (
            "task.temperature changes what the teacher gives to tokens outside its top_k, which"
            f' task.teacher.kind "{kind}" does not know; set temperature to 1 or rest to'
            ' "renormalize"'
        )
    if kind in SAME and task.ce_weight == 0 and not (kind == "self" and adapter.path):
        yield (
            f'task.teacher.kind "{kind}" is the student itself at the start, so that nothing would'
            " ever change; set task.ce_weight above 0 to learn from the data beside it"
        )
    if task.ce_weight > 0 and task.on_policy_share == 1:
        yield (
            "task.ce_weight is for the data's answers, of which task.on_policy_share 1 leaves none;"
            " lower one of them"
        )
    if kind == "data" and data.too_long == "truncate":
        yield (
            'task.teacher.kind "data" counts log-probs from the end of a sequence; set'
            ' data.too_long to "drop" or "error"'
        )
    if task.on_policy_share > 0:
        if kind == "data":
            yield (
                'task.teacher.kind "data" cannot judge what the student draws; set'
                " task.on_policy_share to 0 or take another teacher"
            )
        yield from find_drawing_conflicts(config)
        if config.rollout.streaming:
            yield "rollout.streaming splits the minibatches of task.kind rl; set it to false"
    elif changed := config.rollout.model_dump(exclude_defaults=True):
        if not config.eval.sets:
            yield (
                f"rollout.{next(iter(changed))} has no effect while task.on_policy_share is 0;"
                f" raise"
                " it, or remove the key"
            )


def find_teacher_conflicts(teacher: TeacherConfig, adapter: Any) -> Iterator[str]:
    """Yield one sentence for each key of the teacher that is missing or has no effect."""
    names_model = bool(teacher.path) or bool(teacher.architecture)
    if teacher.kind == "model" and bool(teacher.path) == bool(teacher.architecture):
        set_keys = "both are" if teacher.path else "neither is"
        yield (
            "task.teacher needs either path (a Hugging Face folder or Hub id) or architecture (a"
            f' config.json inline); {set_keys} set. kind "self", "start", "data" and'
            ' "server" need none'
        )
    if teacher.kind == "model" and teacher.architecture and not teacher.tokenizer:
        yield "task.teacher.architecture has no tokenizer of its own; set task.teacher.tokenizer"
    if teacher.kind in (*SAME, "data") and names_model:
        key = "path" if teacher.path else "architecture"
        yield f'task.teacher.{key} has no effect with kind "{teacher.kind}"; remove it or the kind'
    if (teacher.kind == "server") != bool(teacher.url):
        yield (
            'task.teacher.kind "server" needs task.teacher.url, the address of a vLLM server'
            if teacher.kind == "server"
            else f'task.teacher.url is for kind "server", not "{teacher.kind}"; change one of them'
        )
    if teacher.kind == "self" and adapter.kind == "none":
        yield (
            'task.teacher.kind "self" is the model without its adapter; set adapter.kind, or take'
            ' "start"'
        )
    if teacher.kind == "self" and (adapter.train_embeddings or adapter.train_head):
        yield (
            'task.teacher.kind "self" is not the base where adapter.train_embeddings or train_head'
            ' trains a table in full; take "start"'
        )
