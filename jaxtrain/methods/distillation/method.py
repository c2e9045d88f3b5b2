"""Distillation: a student follows a teacher's distributions, on the data or on its own answers.

    rows ─> sequences, or with on_policy_share the student's answers to their prompts
        ─> divergence between both models' distributions of each trained token (losses/)

The teacher is a role of this process, the student's own past, columns of the data, or a server.
"""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from typing_extensions import override

from jaxtrain.batch import IMAGE_SLOT, Batch
from jaxtrain.config import Config, DatasetConfig
from jaxtrain.core.architecture import find_tokenizer
from jaxtrain.core.bundle import ModelBundle, build_auxiliary_bundle, build_model_bundle
from jaxtrain.core.roles import Models, Role
from jaxtrain.core.scorer import Scorer
from jaxtrain.core.task import POLICY, Round, Task
from jaxtrain.data.packing.pack import Fields, ImagePacker
from jaxtrain.data.packing.steps import StepShape
from jaxtrain.distributed.broadcast import broadcast_or_raise
from jaxtrain.errors import UserError
from jaxtrain.generation.engines import find_engine
from jaxtrain.generation.group_player import AnswerOptions
from jaxtrain.generation.offline_answers import OfflineAnswers
from jaxtrain.generation.vllm.teacher import TeacherServer
from jaxtrain.huggingface.tokenizer import compare_vocabularies
from jaxtrain.methods.distillation.config import DistillationTask
from jaxtrain.methods.distillation.data import TeacherRecipe
from jaxtrain.methods.distillation.loss import (
    COMPONENT,
    IDS,
    LOGP,
    OWN,
    Distillation,
    distillation_loss,
)
from jaxtrain.methods.offline import OfflineData, check_packing, open_images, reads_same_images
from jaxtrain.methods.rl.advantages import AdvantageOptions
from jaxtrain.methods.rl.batch_builder import DRAWN, BatchBuilder
from jaxtrain.methods.rl.prompt_data import PromptData, RoundPlan
from jaxtrain.models.capabilities import follows_trees, require_trees

Section = DistillationTask
TEACHER = "teacher"


def open_data(config: Config, tokenizer: Any) -> "TeacherData | OnPolicyData":
    """Return sequences as for SFT, or prompts."""
    return _open(config, tokenizer, follows=True)


def _open(config: Config, tokenizer: Any, *, follows: bool) -> "TeacherData | OnPolicyData":
    task = config.task
    assert isinstance(task, DistillationTask)
    draws = task.on_policy_share > 0
    images = open_teacher_images(config, tokenizer)
    recipe = TeacherRecipe(
        config.data,
        tokenizer,
        component=COMPONENT,
        fields=Fields((COMPONENT,), read_streams(task, draws), images=images),
        trees=config.data.share_prefixes and follows,
        streams=(IDS, LOGP) if task.teacher.kind == "data" else None,
        top_k=task.top_k,
    )
    if not draws:
        return TeacherData(config, recipe)
    offline_answers = OfflineAnswers(
        config.data.datasets,
        tokenizer,
        row_tokens=config.data.sequence_len,
        drawn_share=task.on_policy_share,
        seed=config.run.seed,
    )
    plan = RoundPlan(
        make_builder=partial(read_builder, task, config, images=images),
        advantages=AdvantageOptions("none", "none"),
        updates=1,
        parts=1,
        fields=recipe.fields,
        answers=AnswerOptions(
            offline_answers if task.on_policy_share < 1 else None, need_reward=False
        ),
    )
    return OnPolicyData(config, tokenizer, plan, recipe)


def make(config: Config) -> Task:
    """Build the student, its teacher, and the loss between them."""
    task = config.task
    assert isinstance(task, DistillationTask)
    draws = task.on_policy_share > 0
    engine = find_engine(config) if draws else None
    bundle = build_model_bundle(config, engine.reserved(config) if engine else 0)
    if engine:
        engine.check(config, bundle)
    roles = {POLICY: Role(bundle)}
    if (role := open_teacher(task, bundle, config.data.sequence_len)) is not None:
        roles[TEACHER] = role
    check_packing(config, bundle.architecture)
    architectures = [role.bundle.architecture for role in roles.values()]
    for architecture in architectures:
        check_packing(config, architecture)
        if draws and task.share_prompts:
            option = "task.share_prompts packs answers behind one prompt"
            require_trees(architecture, option, "set task.share_prompts and data.packing to false")
    follows = all(follows_trees(architecture) for architecture in architectures)
    data = _open(config, bundle.tokenizer, follows=follows)
    return Task(
        roles=roles,
        loss=partial(distil, numbers=read_numbers(task)),
        coef={COMPONENT: 1.0},
        data=data,
        prepare=data.prepare,
        varying_microsteps=draws,
    )


def distil(models: Models, batch: Batch, numbers: Distillation):
    """Compute the loss of the student against its teacher, if that is a model of this process."""
    return distillation_loss(models[POLICY], models.get(TEACHER), batch, numbers)


def open_teacher(task: DistillationTask, bundle: ModelBundle, row_tokens: int) -> Role | None:
    """Return the teacher's role, None if it is no model of this process; raises UserError for one
    whose token ids differ in meaning from the student's."""
    teacher = task.teacher
    if teacher.kind == "self":
        adapter = bundle.adapter
        if adapter is not None and adapter.full:
            raise UserError(
                f'task.teacher.kind "self": the adapter of adapter.path trains'
                f" {', '.join(adapter.full)} in full, which stays when the adapter is off; set"
                ' task.teacher.kind to "start"'
            )
        return Role(bundle, "bare")
    if teacher.kind == "start":
        return Role(bundle, "start")
    if teacher.kind == "data":
        return None
    if teacher.path or teacher.tokenizer:
        difference = compare_vocabularies(bundle.tokenizer, find_tokenizer(teacher))
        if difference is not None:
            raise UserError(
                "task.teacher reads other tokens than the student (model), so that their"
                f" distributions cannot be compared: {difference}; choose a teacher of the"
                " student's own family"
            )
    if teacher.kind == "server":
        return None
    beside = build_auxiliary_bundle(teacher, bundle, "task.teacher")
    if row_tokens > beside.architecture.longest:
        raise UserError(
            f"data.sequence_len {row_tokens} is longer than the teacher's"
            f" {beside.architecture.longest_said}; lower the first"
        )
    return Role(beside, "own")


def read_numbers(task: DistillationTask) -> Distillation:
    """The numbers of the loss."""
    return Distillation(
        beta=task.beta,
        temperature=task.temperature,
        top_k=task.top_k,
        rest=task.rest,
        scale=task.temperature**2 if task.scale_by_temperature else 1.0,
        ce_weight=task.ce_weight,
    )


def read_streams(task: DistillationTask, draws: bool) -> dict[str, Any]:
    """Dtype of each stream that the loss reads."""
    streams: dict[str, Any] = {OWN: np.float32} if draws else {}
    if task.teacher.kind in ("data", "server"):
        streams[IDS] = np.dtype((np.int32, (task.top_k,)))
        streams[LOGP] = np.dtype((np.float32, (task.top_k,)))
    return streams


def open_teacher_images(config: Config, tokenizer: Any) -> ImagePacker | None:
    """Have the rows' images read, if the teacher reads the same ones; else they are refused, and a
    line says so."""
    task = config.task
    assert isinstance(task, DistillationTask)
    images, kind = open_images(config, tokenizer, config.data.sequence_len), task.teacher.kind
    problem = ""
    if kind == "server":
        problem = "a teacher behind a server gets tokens alone"
    elif kind == "model" and not reads_same_images(task.teacher, tokenizer):
        problem = "the teacher reads no images, or other patches and tokens of a picture"
    if images is None or not problem:
        return images
    tokenizer.image_format = None
    print(f"task.teacher: {problem}; rows with images are left out", file=sys.stderr, flush=True)
    return None


def read_builder(
    task: DistillationTask, config: Config, rows: int, images: ImagePacker | None = None
) -> BatchBuilder:
    """Return how a round becomes batches with `rows` rows in a microstep; all trained tokens count
    alike. images: makes patches of the images of prompts."""
    data = config.data
    return BatchBuilder(
        StepShape(rows, None, data.sequence_len, tuple(data.length_buckets)),
        "token",
        (COMPONENT,),
        share_prompts=task.share_prompts,
        packing=data.packing,
        dtype=np.float64 if config.model.compute_dtype == "float64" else np.float32,
        images=images,
    )


class TeacherData(OfflineData):
    """`core.task.Data` of rows; a teacher behind a server is asked for each batch."""

    def __init__(self, config: Config, recipe: TeacherRecipe):
        super().__init__(config, recipe)
        self.server = open_server(config)

    def prepare(self, round: Round, scorer: Scorer) -> Round:
        """Add the teacher's log-probs to the batches; see Task.prepare."""
        return round._replace(batches=[add_teacher(batch, self.server) for batch in round.batches])


class OnPolicyData(PromptData):
    """`core.task.Data` of prompts that the student answers, some of them; held-out data are rows
    with answers, whose divergence is that of SFT data."""

    def __init__(self, config: Config, tokenizer: Any, plan: RoundPlan, recipe: TeacherRecipe):
        super().__init__(config, tokenizer, plan)
        self.recipe, self.server = recipe, open_server(config)
        self.held_out = OfflineData(config, recipe)

    @override
    def check(self) -> Iterator[str]:
        yield from super().check()
        for dataset in self.config.data.eval_datasets:
            yield str(self.recipe.probe(dataset))

    @override
    def eval_batches(self, dataset: DatasetConfig, bundle: ModelBundle) -> Iterator[Batch]:
        return self.held_out.eval_batches(dataset, bundle)

    def prepare(self, round: Round, scorer: Scorer) -> Round:
        """Add the teacher's log-probs, and keep only the stream of drawn tokens; held-out rows have
        none."""
        batches = [add_teacher(keep_drawn(batch), self.server) for batch in round.batches]
        weights = [batch.weights[COMPONENT] for batch in batches]
        total = sum(float(weight.sum()) for weight in weights)
        drawn = sum(float((b.weights[COMPONENT] * b.streams[OWN]).sum()) for b in batches)
        metrics = {"own_token_share": drawn / total} if total else {}
        return round._replace(batches=batches, metrics={**round.metrics, **metrics})


def keep_drawn(batch: Batch) -> Batch:
    """Return the batch with the stream OWN float32 [A, B, T] alone, 1 on tokens that the student
    drew, and that of images; held-out rows, which have no drawn tokens, hold 0."""
    streams = {OWN: batch.streams.get(DRAWN, np.zeros(batch.tokens.shape, np.float32))}
    if IMAGE_SLOT in batch.streams:
        streams[IMAGE_SLOT] = batch.streams[IMAGE_SLOT]
    return batch._replace(streams=streams)


def open_server(config: Config) -> TeacherServer | None:
    """Return the server of the teacher's log-probs, if there is one; sends no request yet."""
    task = config.task
    assert isinstance(task, DistillationTask)
    teacher = task.teacher
    if teacher.kind != "server":
        return None
    assert teacher.url is not None and task.top_k is not None, "the config has both"
    return TeacherServer(
        teacher.url, task.top_k, concurrency=teacher.concurrency, seconds=teacher.request_seconds
    )


def add_teacher(batch: Batch, server: TeacherServer | None) -> Batch:
    """Return the batch with the teacher's likeliest tokens, requested by process 0; unchanged
    without a server."""
    if server is None:
        return batch
    ids, logp = broadcast_or_raise(
        "the teacher's log-probs", lambda: server.score(batch, batch.weights[COMPONENT] != 0)
    )
    return batch._replace(streams={**batch.streams, IDS: ids, LOGP: logp})
