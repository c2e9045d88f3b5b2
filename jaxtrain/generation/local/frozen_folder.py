"""Frozen policies from Hugging Face folders, sampled in the training process, such as judges.

    chat.other("judge").draw() ── messages ──> FolderSpeaker.reply ─ its own template and tokens ─┐
                                                                                 LocalEngine <────┘

They receive messages, like policies behind servers, so that any family works, whatever its
vocabulary. Their weights stay unsharded on the sampling devices for the whole run; training and
evaluations on the same devices share one copy.
"""

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jaxtrain.adapters.peft_folder import CONFIG as PEFT_CONFIG
from jaxtrain.config import Config, ModelConfig, PolicyConfig, SamplingConfig
from jaxtrain.core.architecture import find_folder, find_tokenizer
from jaxtrain.core.bundle import ModelBundle, build_auxiliary_bundle
from jaxtrain.core.weights import abstract_params, open_params
from jaxtrain.data.chat.prompt import prompt_tokens
from jaxtrain.data.chat.template import TemplateFailed, decode_answer, end_of_turn_ids
from jaxtrain.distributed.mesh import Device
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import EpisodeFailed, PolicyReply
from jaxtrain.generation.local.engine import LocalEngine
from jaxtrain.generation.local.requests import Requests
from jaxtrain.generation.local.sampler import LocalSampler
from jaxtrain.generation.local.slots import unstack
from jaxtrain.generation.local.weights import make_sampler_mesh
from jaxtrain.models.parameters import Shapes
from jaxtrain.text_safety import escape_control_chars

_MODELS: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
"""Models in use in this process, by folder, dtype and devices."""


class FolderSpeaker:
    """`engine.FrozenPolicy` in the process; for one event loop at a time."""

    def __init__(self, name: str, section: PolicyConfig, tokenizer: Any, engine: LocalEngine):
        """engine: with a sampler of its own."""
        self.name, self.tokenizer, self.engine = name, tokenizer, engine
        self.sampling = SamplingConfig(
            max_new_tokens=section.max_tokens, temperature=section.temperature
        )
        self._counted = {"requests": 0, "failed": 0}

    async def reply(self, messages: Sequence[Mapping[str, Any]], index: int = 0) -> PolicyReply:
        """Reply to messages; equal (messages, index) give equal replies."""
        self._counted["requests"] += 1
        key = f"policies.{self.name}"
        try:
            tokens = prompt_tokens(self.tokenizer, [dict(message) for message in messages])
        except TemplateFailed as error:
            self._counted["failed"] += 1
            raise EpisodeFailed(
                f"{key} cannot be asked",
                cause=escape_control_chars(
                    f"{key}: its chat template refuses what it is asked: {error}"
                ),
                # The same messages would be refused again.
                again=False,
                mistake=True,
            ) from None
        try:
            # The number makes the noise, so a repeated episode gets the same replies.
            answer = await self.engine.generate(tokens, self.sampling, (), index)
        except EpisodeFailed as failure:
            self._counted["failed"] += 1
            raise EpisodeFailed(
                f"{key} does not answer", cause=f"{key}: {failure}", again=False
            ) from None
        text = decode_answer(self.tokenizer, answer.tokens)
        return PolicyReply(text, answer.finish_reason != "length")

    def counters(self) -> dict[str, float]:
        """Return the numbers of requests and failures, by name."""
        return {f"{self.name}/{name}": float(count) for name, count in self._counted.items()}

    async def close(self) -> None:
        """End the engine's own thread; waiting requests fail."""
        await self.engine.close()


@dataclasses.dataclass(frozen=True)
class FrozenFolder:
    """A loaded frozen policy."""

    name: str
    section: PolicyConfig
    tokenizer: Any
    sampler: Requests

    def speak(self, thread: ThreadPoolExecutor | None = None) -> FolderSpeaker:
        """Return a speaker for it. thread: as for LocalEngine."""
        engine = LocalEngine(self.sampler, thread)
        return FolderSpeaker(self.name, self.section, self.tokenizer, engine)


def list_folders(config: Config) -> dict[str, PolicyConfig]:
    """Return the frozen policies that are folders, by name."""
    return {
        name: section
        for name, section in config.policies.items()
        if section.path and not section.trained
    }


def assemble_folder(name: str, section: PolicyConfig, bundle: ModelBundle) -> ModelBundle:
    """Return the bundle of a frozen policy on the trained one's mesh, with its own tokenizer.

    Reads no weights. Raises UserError unless it is a language model that answers messages.
    """
    key = f"policies.{name}.path"
    assert section.path is not None, "it is a folder"
    folder = find_folder(section.path, weights=True, key=key)
    if (folder / "checkpoints").is_dir() or (folder / PEFT_CONFIG).is_file():
        kind, verb = "a run", "export"
        if (folder / PEFT_CONFIG).is_file():
            kind, verb = "an adapter", "merge"
        raise UserError(
            f"{key} {section.path!r} is {kind}; name a model folder, such as what"
            f" `jaxtrain {verb} {section.path} --output FOLDER` writes"
        )
    check_files(folder, key)
    dtype = bundle.options["dtype"]
    model = ModelConfig(
        path=str(folder),
        param_dtype=dtype,
        compute_dtype=dtype,
        attention=bundle.options["attention_impl"],
    )
    tokenizer = find_tokenizer(model)
    if not tokenizer.chat_template:
        raise UserError(
            f"{key} {section.path!r} has no chat template, and is asked by messages; name a chat"
            " model, or write chat_template.jinja into the folder"
        )
    return build_auxiliary_bundle(model, dataclasses.replace(bundle, tokenizer=tokenizer), key)


def check_files(folder: Path, key: str) -> None:
    """Raise UserError for a folder that is no model, or has no tokenizer."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{key}: {folder} has no config.json; name a Hugging Face model folder")
    if not any(folder.glob("tokenizer*")):
        raise UserError(
            f"{key}: {folder} has no tokenizer; copy the model's tokenizer.json and"
            " tokenizer_config.json into it"
        )


def frozen_shapes(config: Config, bundle: ModelBundle) -> dict[str, Shapes]:
    """Return the shapes of each frozen policy's weights, with the sharding they will have if the
    trainer's devices sample; UserError as assemble_folder."""
    mesh = make_sampler_mesh(list(bundle.mesh.devices.flat), bundle.mesh)
    return {
        name: abstract_params(assemble_folder(name, section, bundle), mesh)[0]
        for name, section in list_folders(config).items()
    }


def open_folders(
    config: Config,
    bundle: ModelBundle,
    devices: Sequence[Device],
    log: Callable[[str], None] = print,
) -> dict[str, FrozenFolder]:
    """Load the frozen policies that are folders; UserError. devices: where they are sampled."""
    return {
        name: open_folder(name, section, bundle, make_sampler_mesh(list(devices), bundle.mesh), log)
        for name, section in list_folders(config).items()
    }


def open_folder(
    name: str,
    section: PolicyConfig,
    bundle: ModelBundle,
    mesh: jax.sharding.Mesh,
    log: Callable[[str], None],
) -> FrozenFolder:
    """Load a frozen policy on `mesh`."""
    folder_bundle = dataclasses.replace(assemble_folder(name, section, bundle), mesh=mesh)
    devices = tuple(device.id for device in mesh.devices.flat)
    key = (
        str(folder_bundle.folder),
        folder_bundle.options["dtype"],
        devices,
        tuple(mesh.shape.items()),
    )
    model = _MODELS.get(key)
    if model is None:
        with jax.set_mesh(mesh):
            model = unstack(abstract_params(folder_bundle)[1](open_params(folder_bundle, 0)))
        _MODELS[key] = model
        size = sum(x.nbytes for x in jax.tree.leaves(model) if hasattr(x, "nbytes"))
        log(f"policies.{name}: {section.path}, {size / 2**30:.3f} GiB")
    sampler = LocalSampler(
        model,
        end_of_turn_ids(folder_bundle.tokenizer),
        max_len=folder_bundle.architecture.longest,
        max_batch=section.concurrency,
        to_text=folder_bundle.tokenizer.decode,
        tokenizer=folder_bundle.tokenizer,
        mesh=mesh,
    )
    sampler.use(model, 0)
    return FrozenFolder(name, section, folder_bundle.tokenizer, sampler)
