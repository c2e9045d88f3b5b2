"""Opens the local engine: chooses its devices, and how it receives the trainer's weights."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from typing_extensions import override

from jaxtrain.config import Config
from jaxtrain.config.policies import list_trained
from jaxtrain.config.task import StructuredOutputs
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.data.chat.template import end_of_turn_ids
from jaxtrain.distributed.mesh import is_main_process, split_devices
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Engine, EngineKind
from jaxtrain.generation.episode_engine import combine_engines, with_policies
from jaxtrain.generation.local.constraints import Grammars
from jaxtrain.generation.local.draft_model import check_draft, make_draft_copier, open_draft
from jaxtrain.generation.local.engine import LocalEngine
from jaxtrain.generation.local.frozen_folder import assemble_folder, list_folders, open_folders
from jaxtrain.generation.local.publishers import AdaptersPublisher, LocalPublisher
from jaxtrain.generation.local.sampler import LocalSampler
from jaxtrain.generation.local.weights import Copier, make_sampler_mesh, sampling_devices
from jaxtrain.generation.publisher import Publisher
from jaxtrain.layers.attention import store_cache
from jaxtrain.layers.kv_cache import Stored
from jaxtrain.models import build
from jaxtrain.models.capabilities import route_shape


class LocalKind(EngineKind):
    """Engine kind "local": samples in the training process, on its devices or on reserved ones."""

    several = True
    serves = False

    @override
    def reserved(self, config: Config) -> int:
        return config.rollout.devices

    @override
    def ahead(self, config: Config) -> bool:
        return config.rollout.mode != "sync" or config.rollout.streaming

    @override
    def check(self, config: Config, bundle: ModelBundle) -> None:
        if config.rollout.draft is not None:
            check_draft(config.rollout.draft, bundle, "rollout.draft")
        check_cache(config.rollout.local.cache, bundle)
        if config.sampling.structured_outputs:
            check_constraint(config.sampling.structured_outputs, bundle)
        for name, section in list_folders(config).items():
            assemble_folder(name, section, bundle)

    @override
    def open(
        self, config: Config, bundle: ModelBundle, log: Callable[[str], None]
    ) -> tuple[Engine | None, Publisher]:
        devices = split_devices(self.reserved(config))[1] or sampling_devices(bundle)
        ahead = self.ahead(config)
        if ahead and not config.rollout.devices and len(devices) > 1:
            raise UserError(
                f"rollout.mode {config.rollout.mode!r}, streaming {config.rollout.streaming}: the"
                f" local engine would sample on {len(devices)} devices that the trainer uses at the"
                " same time; set rollout.devices to how many of them sample, or rollout.mode to"
                ' "sync" and streaming to false'
            )
        mesh = make_sampler_mesh(devices, bundle.mesh)
        local = config.rollout.local
        copy = Copier(bundle, mesh, local.weights, local.cache)
        copy_draft = make_draft_copier(mesh)
        policies = list_trained(config)
        if not is_main_process():
            if policies:
                return None, AdaptersPublisher(policies, {}, copy, rests=not ahead)
            return None, LocalPublisher(None, copy, rests=not ahead, copy_draft=copy_draft)

        def make_sampler() -> LocalSampler:
            return LocalSampler(
                None,
                end_of_turn_ids(bundle.tokenizer),
                max_len=min(bundle.architecture.longest, config.data.sequence_len),
                max_batch=config.rollout.max_batch,
                to_text=bundle.tokenizer.decode,
                tokenizer=bundle.tokenizer,
                mesh=mesh,
                draft_rows=config.rollout.draft_rows,
                routes=route_shape(bundle.architecture) if config.rollout.router_replay else None,
            )

        # Whoever draws on the same devices takes turns.
        thread = ThreadPoolExecutor(1, thread_name_prefix="sampler")
        folders = open_folders(config, bundle, devices, log)
        speakers = {name: folder.speak(thread) for name, folder in folders.items()}
        if policies:
            engines = {name: LocalEngine(make_sampler(), thread) for name in policies}
            publisher = AdaptersPublisher(policies, engines, copy, rests=not ahead, thread=thread)
            return with_policies(combine_engines(engines), speakers), publisher
        engine = LocalEngine(make_sampler(), thread)
        named, open_new = config.rollout.draft, None
        if named and config.rollout.draft_refresh is None:
            open_new = partial(open_draft, named, bundle, mesh, "rollout.draft")
        publisher = LocalPublisher(
            engine, copy, rests=not ahead, open_draft=open_new, copy_draft=copy_draft, thread=thread
        )
        return with_policies(engine, speakers), publisher


def check_constraint(structured: StructuredOutputs, bundle: ModelBundle) -> None:
    """Raise UserError for what answers must match, if it cannot be compiled."""
    grammars = Grammars(bundle.tokenizer, bundle.architecture.vocab_size)
    grammars.begin(structured, sorted(end_of_turn_ids(bundle.tokenizer)))


def check_cache(cache: Stored, bundle: ModelBundle) -> None:
    """Raise UserError if no layer can store keys and values as rollout.local.cache says."""
    model = build.abstract(bundle.architecture)
    if cache != "default" and not store_cache(model, cache):
        raise UserError(
            f'rollout.local.cache "{cache}" is for attention with keys and values, and'
            f" {bundle.architecture.architecture} has none (its layers keep latents or recurrent"
            " states); remove it"
        )
