"""SGLang servers as the engine of a run, over their HTTP API.

    trainer   writes RUN/weights/NAME ──> every server reads it: /update_weights_from_disk
                                      or gets its tensors: /update_weights_from_tensor
    requests  /generate with input_ids ──> tokens and log-probs of meta_info

The table of servers, their watchers, retries and the order of a publish are those of vLLM's. New
weights end the requests under way; what these had drawn is kept and continued. Tested against a
scripted server by the documented protocol (docs.sglang.io, "Native APIs"), on no GPU.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from jaxtrain.config import Config
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.core.weights import abstract_params
from jaxtrain.distributed.mesh import is_main_process
from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.engine import Engine, EngineKind
from jaxtrain.generation.publisher import Publisher
from jaxtrain.generation.sglang.tensors import read_requests
from jaxtrain.generation.vllm.control import Deadline, ServerRefused, call
from jaxtrain.generation.vllm.engine import VllmEngine
from jaxtrain.generation.vllm.factory import list_published, note_head, open_gather
from jaxtrain.generation.vllm.images import PromptImages
from jaxtrain.generation.vllm.inspector import Inspector
from jaxtrain.generation.vllm.messages import SGLANG
from jaxtrain.generation.vllm.server import VllmServer
from jaxtrain.generation.vllm.servers import Listing, Servers
from jaxtrain.generation.vllm.sources import open_sources
from jaxtrain.generation.weight_sync.device_layout import list_pieces
from jaxtrain.generation.weight_sync.publish_lora import LoraPublisher
from jaxtrain.generation.weight_sync.shared_publisher import SharedPublisher
from jaxtrain.huggingface.safetensors import SafetensorsFolder, write_folder
from jaxtrain.models.parameters import Params
from jaxtrain.models.saving import wide_tensors, write_config

FOLDER = "weights"
"""Folder of a run with the versions that servers read."""


ABORT = {"abort_all_requests": True}
"""What was drawn by the old weights is returned, and continued by the new ones."""


class SglangKind(EngineKind):
    """Engine kind "sglang"."""

    @override
    def check(self, config: Config, bundle: ModelBundle) -> None:
        if bundle.adapter is not None:
            raise UserError(
                'rollout.engine "sglang" sends whole models; set adapter.kind to "none", or use'
                ' rollout.engine "vllm", which takes adapters'
            )

    @override
    def open(
        self, config: Config, bundle: ModelBundle, log: Callable[[str], None]
    ) -> tuple[Engine | None, Publisher]:
        vllm, publisher, engine = config.rollout.vllm, None, None
        if is_main_process():
            with ExitStack() as stack:
                servers = SglangServers(
                    vllm,
                    config.sampling,
                    log,
                    lambda text: bundle.tokenizer.encode(text, add_special_tokens=False),
                    open_sources(vllm),
                )
                stack.callback(servers.close)
                listing = Path(config.run.output_dir) / "servers.json"
                servers.closing.enter_context(Listing(listing, lambda: servers.all))
                servers.open()
                publisher = open_publisher(servers, config, bundle)
                engine = VllmEngine(servers, adapters=False, group_size=config.rollout.group_size)
                engine.images = PromptImages(never=bundle.architecture.never_drawn)
                stack.pop_all()  # the publisher closes them
        gather = open_gather(bundle, vllm.weight_dtype, adapters=False)
        return engine, SharedPublisher(publisher, gather)


class SglangInspector(Inspector):
    """Inspects SGLang servers: model, length, tokenizer."""

    @override
    def inspect(self, server: VllmServer) -> None:
        url = server.url
        try:
            info = call(url, "GET", "/get_model_info", timeout=30)
            model = str(info["model_path"])
            listed = call(url, "GET", "/v1/models", timeout=30)
            server.max_model_len = int(listed["data"][0].get("max_model_len") or 0)
        except (
            ServerRefused,
            AttributeError,
            IndexError,
            KeyError,
            TypeError,
            ValueError,
        ) as error:
            if isinstance(error, ServerRefused) and error.passes:
                raise
            raise UserError(
                f"{url}/get_model_info and /v1/models name no model; is this an SGLang server?"
                ' One of vLLM is for rollout.engine "vllm"'
            ) from None
        if info.get("is_generation") is False:
            raise UserError(
                f"{url} serves {model}, which does not generate; start it with a chat model"
            )
        server.route = SGLANG
        self.probe(SGLANG, url, model)
        self._compare_tokens(url, model)
        self.check_length(server, 1, self.sampling.max_new_tokens)
        server.model = model


class SglangServers(Servers):
    """A pool of SGLang servers."""

    inspector_kind = SglangInspector


@contextmanager
def explain(server: VllmServer, act: str, hint: str) -> Iterator[None]:
    """Turn refusals of new weights into errors that say what to do."""
    try:
        yield
    except ServerRefused as error:
        if error.status == 404:
            raise UserError(
                f"{server.url} has no such route for new weights ({error.message});"
                " rollout.engine sglang needs a server of SGLang that has it"
            ) from None
        if error.status != 400:
            raise
        reason = error.message
    except RefusedWeights as error:
        reason = str(error)
    else:
        return
    raise RunStopped(f"{server.url} did not {act}: {reason}; {hint}")


class RefusedWeights(Exception):
    """A server's reason for keeping its old weights."""


def check(answer: Any) -> None:
    """Raise RefusedWeights unless an answer says that the weights were taken."""
    if not isinstance(answer, dict) or answer.get("success") is not True:
        raise RefusedWeights(answer.get("message") if isinstance(answer, dict) else answer)


def mark_last(items: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield each item and True for the last one."""
    iterator = iter(items)
    item = next(iterator)
    for following in iterator:
        yield item, False
        item = following
    yield item, True


class WholePublisher(LoraPublisher):
    """`publisher.Publisher` by folders of all weights, which servers read or are sent."""

    @override
    def _load(self, server: VllmServer, name: str, deadline: Deadline) -> None:
        server.updating = True  # it gets no requests that would be cut at once
        try:
            if self.servers.config.adapter_transport == "http":
                self._send_tensors(server, name, deadline)
                return
            path = str(self.folder / name)
            body = {"model_path": path, "weight_version": name, **ABORT, "flush_cache": True}
            with explain(
                server,
                f"read {path}",
                "the folder must be there under the same path, see rollout.vllm.adapter_dir; or set"
                " rollout.vllm.adapter_transport to http",
            ):
                limit = deadline.left()
                check(server.call("POST", "/update_weights_from_disk", body, timeout=limit))
        finally:
            server.updating = False

    def _send_tensors(self, server: VllmServer, name: str, deadline: Deadline) -> None:
        """Send all tensors of a version. The last request alone names it, so that no server with a
        part of them has its name."""
        info = server.call("GET", "/get_server_info", timeout=deadline.left(self.step_seconds))
        ranks = info.get("tp_size") if isinstance(info, dict) else None
        if not isinstance(ranks, int) or ranks < 1:
            raise UserError(
                f"{server.url}/get_server_info names no tp_size; is it an SGLang server?"
            )
        with explain(server, "take the tensors", "it must serve the model of this run"):
            for text, is_last in mark_last(read_requests(SafetensorsFolder(self.folder / name))):
                # Every rank reads all tensors, and takes its part of them.
                body = {"serialized_named_tensors": [text] * ranks, "flush_cache": is_last, **ABORT}
                body |= {"weight_version": name} if is_last else {}
                limit = deadline.left()
                check(server.call("POST", "/update_weights_from_tensor", body, timeout=limit))

    @override
    def _unload(self, server: VllmServer, name: str) -> bool:
        return True  # it has a copy


def open_publisher(servers: Servers, config: Config, bundle: ModelBundle) -> WholePublisher:
    """Return the publisher of all weights in rollout.vllm.weight_dtype."""
    note_head(bundle, servers.log)
    entries, dtype = list_published(bundle), config.rollout.vllm.weight_dtype
    wide = wide_tensors(bundle.architecture)
    shapes = abstract_params(bundle)[0]
    plan = {
        name: (shape, np.dtype("float32" if name in wide else dtype))
        for entry in entries
        for name, shape in entry.op.shapes(shapes[entry.param].shape).items()
    }
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in plan.values()) + 2**20

    def write(params: Params, folder: Path) -> None:
        write_folder(folder, plan, list_pieces(params, entries, dtype, wide=wide))
        write_config(bundle.architecture, plan, folder)

    folder = Path(config.rollout.vllm.adapter_dir or Path(config.run.output_dir) / FOLDER)
    run = os.path.abspath(config.run.output_dir)
    return WholePublisher(servers, folder, run, write, lambda params: size)
