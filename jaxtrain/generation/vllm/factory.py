"""Opens the servers of section rollout.vllm and the publisher that sends them the weights.

The name map that loads and saves a model also publishes it, so a server receives exactly what an
export would contain.
"""

import collections
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
from typing_extensions import override

from jaxtrain.adapters.peft import adapter_entries, write_gathered
from jaxtrain.config import Config
from jaxtrain.config.policies import list_trained
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.core.weights import abstract_params
from jaxtrain.distributed.feed import to_host
from jaxtrain.distributed.mesh import is_main_process
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Engine, EngineKind, SharedServers
from jaxtrain.generation.episode_engine import combine_engines
from jaxtrain.generation.publisher import Publisher
from jaxtrain.generation.ray.hosts import open_source
from jaxtrain.generation.ray.ray_cluster import join
from jaxtrain.generation.vllm.engine import VllmEngine
from jaxtrain.generation.vllm.images import PromptImages
from jaxtrain.generation.vllm.launch import FOLDER, check_python, open_launcher
from jaxtrain.generation.vllm.lora_limits import check_adapter
from jaxtrain.generation.vllm.remote import share
from jaxtrain.generation.vllm.servers import Listing, Servers
from jaxtrain.generation.vllm.sources import open_sources
from jaxtrain.generation.weight_sync.device_image import DeviceImage
from jaxtrain.generation.weight_sync.device_layout import PublishedCopy, list_pieces, list_rows
from jaxtrain.generation.weight_sync.publish_lora import LoraPublisher
from jaxtrain.generation.weight_sync.publish_weights import TensorSet, WeightPublisher
from jaxtrain.generation.weight_sync.shared_publisher import SharedPublisher
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.models.capabilities import route_shape
from jaxtrain.models.families import family
from jaxtrain.models.parameters import Params
from jaxtrain.models.saving import wide_tensors
from jaxtrain_vllm.cuda_driver import Cuda, CudaError

HEAD = "mtp."
"""Beginning of the paths of a multi-token prediction head's parameters."""


class VllmKind(EngineKind):
    """Engine kind "vllm": servers over HTTP."""

    several = True

    @override
    def check(self, config: Config, bundle: ModelBundle) -> None:
        vllm = config.rollout.vllm
        if vllm.sync == "lora":
            check_adapter(vllm, bundle)
        if vllm.launch == "local":
            if jax.process_count() > 1:
                raise UserError(
                    'rollout.vllm.launch "local" is for a trainer of one process, which may use'
                    " several GPUs; start the servers yourself and name them in"
                    " rollout.vllm.servers"
                )
            check_python(vllm.python)

    @override
    def open(
        self, config: Config, bundle: ModelBundle, log: Callable[[str], None]
    ) -> tuple[Engine | None, Publisher]:
        return open_vllm(config, bundle, log)

    @override
    def share(self, engine: VllmEngine, workers: int) -> SharedServers:
        return share(engine, workers)


def open_vllm(
    config: Config, bundle: ModelBundle, log: Callable[[str], None] = print
) -> tuple[Engine | None, Publisher]:
    """Return (engine, publisher) for the servers of section rollout.vllm.

    Only process 0 talks to the servers; the others have no engine, and their publisher takes part
    in gathering. No request is possible before the first publish, which waits for the servers, as
    `publisher.wait()` does. Raises UserError for servers that do not answer or cannot do what the
    run needs; so do these two.
    """
    vllm = config.rollout.vllm
    adapters, policies = vllm.sync == "lora", list_trained(config)
    engine = publisher = None
    options: dict[str, Any] = {}
    if is_main_process():
        with ExitStack() as stack:
            servers, options["open_engine"] = open_servers(config, bundle, log, stack)
            replay = config.rollout.router_replay
            routes = route_shape(bundle.architecture) if replay else None
            reads = getattr(getattr(bundle.tokenizer, "image_format", None), "served", False)
            never = bundle.architecture.never_drawn
            images = PromptImages(bundle.tokenizer if reads else None, never)
            engines = {
                name: VllmEngine(
                    servers,
                    adapters=adapters,
                    routes=routes,
                    group_size=config.rollout.group_size,
                    policy=name,
                )
                for name in policies or ("",)
            }
            for member in engines.values():
                member.images = images
            engine = combine_engines(engines) if policies else engines[""]
            folder = Path(vllm.adapter_dir or Path(config.run.output_dir) / "adapters")
            if adapters:
                run, base = config.run.output_dir, config.model.path
                publisher = open_lora(servers, folder, run, bundle, base, policies)
            else:
                ahead = config.rollout.mode != "sync"
                publisher = open_weights(servers, bundle, delta=vllm.sync == "delta", ahead=ahead)
            stack.pop_all()  # the publisher closes them
    # On every process: gathering is collective, and one that skipped it would block the others.
    gather_one = open_gather(bundle, vllm.weight_dtype, adapters=adapters)
    if policies:

        def gather_all(params: Any) -> dict[str, Any]:
            return {name: gather_one(params[name]) for name in policies}

        return engine, SharedPublisher(publisher, gather_all, **options)
    return engine, SharedPublisher(publisher, gather_one, **options)


def open_servers(
    config: Config, bundle: ModelBundle, log: Callable[[str], None], stack: ExitStack
) -> tuple[Servers, Callable[[Callable[[], bool]], None]]:
    """Return (the servers of section rollout.vllm, started where the run launches them; a function
    that returns once they answer, inspected and watched, and raises Interrupted once its argument
    is true). stack: closes everything if a later step of opening fails."""
    vllm = config.rollout.vllm
    sources, launcher, hosts = open_sources(vllm), None, None
    if vllm.launch == "local":
        home = Path(config.run.output_dir) / FOLDER
        launcher = open_launcher(config, home, log, bundle.architecture.longest)
        stack.callback(launcher.close)
        launcher.start()
        sources.append(launcher)
    if vllm.launch == "ray":
        cluster = join(config.rollout.ray)
        stack.callback(cluster.close)
        hosts = open_source(config, bundle.architecture.longest, log)
        stack.callback(hosts.close)
        sources.append(hosts)
        # Servers on other machines fetch weights from an address that they can reach.
        if vllm.listen is None:
            vllm = vllm.model_copy(update={"listen": cluster.address})
    servers = Servers(
        vllm,
        config.sampling,
        log,
        lambda text: bundle.tokenizer.encode(text, add_special_tokens=False),
        sources,
    )
    stack.callback(servers.close)
    listing = Path(config.run.output_dir) / "servers.json"
    servers.closing.enter_context(Listing(listing, lambda: servers.all))
    if hosts is not None:
        servers.closing.callback(hosts.cluster.close)
        servers.closing.callback(hosts.close)
    if launcher is not None:
        servers.closing.callback(launcher.close)

    def finish(should_stop: Callable[[], bool] = lambda: False) -> None:
        servers.open(should_stop=should_stop)
        if launcher is not None:
            # Restarts begin only now: an exit before the first answer is a mistake in the setup.
            launcher.watch(servers.report_ended, servers.fail)

    # The listing is there first, so that people can see which server is awaited. A server needs
    # minutes to start, in which the run reads weights and compiles; but one on the trainer's own
    # devices measures how much of their memory is free.
    if vllm.sleep or servers.open(wait=False):
        finish()
        return servers, lambda should_stop: None
    return servers, finish


def open_gather(
    bundle: ModelBundle, dtype: str, *, adapters: bool
) -> Callable[[Params], dict[str, Any]]:
    """Return the function that every process applies to its parameters before process 0 publishes.

    Adapters are small and are gathered as they are. Of whole models process 0 assembles one slice
    after the other; the other processes only answer each of its gathers.
    """
    if adapters:
        assert bundle.adapter is not None, "the config says that there is one"
        paths = {
            entry.param: None for entry in adapter_entries(bundle.architecture, bundle.adapter)
        }
        return lambda params: {path: to_host(params[path]) for path in paths}
    if is_main_process():
        return lambda params: params
    entries = list_published(bundle)
    wide = wide_tensors(bundle.architecture)

    def take_part(params: Params) -> Params:
        # Drains the generator without keeping a piece: each step is a collective of all processes.
        collections.deque(list_pieces(params, entries, dtype, wide=wide), maxlen=0)
        return {}

    return take_part


def open_lora(
    servers: Servers,
    folder: Path,
    run: str,
    bundle: ModelBundle,
    base_name: str | None = None,
    policies: Sequence[str] = (),
) -> LoraPublisher:
    """Return the publisher of the run's adapter, or of several policies' adapters. run: the run's
    folder."""
    adapter = bundle.adapter
    assert adapter is not None, "the config says that there is one"
    entries = adapter_entries(bundle.architecture, adapter)

    def write(params: Params, target: Path) -> None:
        write_gathered(params, bundle.architecture, adapter, target, base_name)

    def measure(params: Params) -> int:
        # The header of a few hundred bytes a tensor, and adapter_config.json.
        return sum(params[entry.param].nbytes for entry in entries) + 2**20

    return LoraPublisher(servers, folder, os.path.abspath(run), write, measure, policies)


def list_published(bundle: ModelBundle) -> list[ParameterEntry]:
    """Return the entries of what servers get: not of parts for images that are not trained, nor of
    a multi-token prediction head. Servers have these from the folder, or none at all where they
    read text alone or draw without a draft."""
    entries = family(bundle.architecture).names(bundle.architecture)
    return [entry for entry in entries if not entry.param.startswith(list_unsent(bundle))]


def list_unsent(bundle: ModelBundle) -> tuple[str, ...]:
    """Return the beginnings of the paths of parameters that servers do not get."""
    return (*bundle.untrained, HEAD)


def note_head(bundle: ModelBundle, log: Callable[[str], None]) -> None:
    """Log that servers do not get the head that the run trains, if it trains one."""
    if bundle.architecture.mtp is not None:
        log(
            f"the multi-token prediction head ({bundle.architecture.mtp.form.root}*) is trained and"
            " exported, but not sent to servers: one that drafts with it has that of its folder"
        )


def open_weights(
    servers: Servers, bundle: ModelBundle, *, delta: bool, ahead: bool = False
) -> WeightPublisher:
    """Return the publisher of all weights, for runs without adapters. ahead: it delivers while the
    trainer continues."""
    entries = family(bundle.architecture).names(bundle.architecture)
    shapes, held = {}, []
    for path, shape in abstract_params(bundle)[0].items():
        entry = next(entry for entry in entries if entry.param == path)
        tensors = entry.op.shapes(shape.shape)
        if path.startswith(list_unsent(bundle)):
            held += tensors
        else:
            shapes |= tensors
    note_head(bundle, servers.log)
    if bundle.architecture.mtp is not None:
        # Also of its copies of embedding and head, which are no parameters.
        held.append(bundle.architecture.mtp.form.root)
    entries = list_published(bundle)
    dtype, device = servers.config.weight_dtype, None
    wide = wide_tensors(bundle.architecture)
    if servers.config.transport == "device":
        device = open_device_image(shapes, dtype, entries, servers.log, wide)
    published = PublishedCopy() if delta and servers.config.delta_base == "device" else None
    write = partial(list_pieces, entries=entries, dtype=dtype, published=published, wide=wide)
    return WeightPublisher(
        servers,
        write,
        TensorSet(shapes, wide, (*bundle.architecture.carries, *held)),
        delta=delta,
        ahead=ahead,
        find=published and partial(write, compare=True),
        device=device,
    )


def open_device_image(
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    entries: list[ParameterEntry],
    log: Callable[[str], None],
    wide: frozenset[str] = frozenset(),
) -> DeviceImage | None:
    """Return memory for all weights on the trainer's GPUs; None, with a log line, if that is
    impossible."""
    try:
        if jax.process_count() > 1:
            raise CudaError("the run has several processes")
        if jax.default_backend() not in ("gpu", "cuda"):
            raise CudaError(f"the run trains on {jax.default_backend()}, not on NVIDIA GPUs")
        cuda = Cuda()
    except CudaError as error:
        log(f"rollout.vllm.transport device: {error}; weights go through the host's memory")
        return None
    return DeviceImage(
        shapes,
        dtype,
        lambda params, homes: list_rows(params, entries, dtype, homes, wide),
        cuda,
        wide,
    )
