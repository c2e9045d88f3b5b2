"""The worker's side: receives weights in the background, and commits them in one short call.

    trainer          link thread of a worker        the worker itself
    stage v7  ---->  receive, check, keep aside
              <----  staged
    POST /pause, /start_weight_update, /update_weights {version: 7}   error unless v7 is staged
    POST /finish_weight_update                                        load v7 into the model
    POST /resume

Requests wait only while the model is loaded, not while bytes travel. Until the commit begins the
model keeps the old version, whatever fails. Tensors go through vLLM's own checkpoint loader, so
fused, sharded and quantized layers are loaded as from a file.
"""

import dataclasses
import socket
import threading

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from jaxtrain_vllm import wire
from jaxtrain_vllm.cuda_ipc import open_ipc_memory
from jaxtrain_vllm.pinned_memory import PinnedArray, to_torch
from jaxtrain_vllm.tensor_names import ServedNames, describe, read_shapes
from jaxtrain_vllm.weight_receiver import WeightReceiver, connect

logger = init_logger("vllm.jaxtrain")
MAPPED = ("substr", "prefix", "suffix")
"""Attributes of a WeightsMapper for the fields of `ServedNames`."""
CLOSE_SECONDS = 10.0


@dataclasses.dataclass
class LinkInfo(WeightTransferInitInfo):
    """Address at which the trainer listens."""

    host: str
    port: int
    token: str
    """Secret for the handshake (`handshake.py`)."""
    server: str
    """The trainer's name for this server."""


@dataclasses.dataclass
class CommitInfo(WeightTransferUpdateInfo):
    """Staged version to load."""

    version: int
    checksum: int


class TrainerLinkEngine(WeightTransferEngine[LinkInfo, CommitInfo]):
    """Weight-transfer backend "jaxtrain"."""

    init_info_cls, update_info_cls = LinkInfo, CommitInfo
    supports_draft_weight_update = False

    def __init__(self, config, vllm_config, device, model):
        super().__init__(config, vllm_config, device, model)
        self.shelf, self.pinned = WeightReceiver(open_ipc_memory(device)), PinnedArray()
        self.connection: socket.socket | None = None
        self.listener: threading.Thread | None = None
        self.wanted: CommitInfo | None = None

    def init_transfer_engine(self, info: LinkInfo) -> None:
        """Connect to the trainer and serve its link in a thread; closes an older link."""
        self.shutdown()
        serves = self.shelf.begin(info.token)
        if torch.device(self.device).type == "cpu" and has_experts(self.model):
            # Loaded again they give other log-probs there (0.32), by 0.6 on average.
            raise ValueError("vLLM on a CPU does not take up new weights of experts")
        held = describe_model(self.model, self.model_config)
        rank = self.parallel_config.rank
        self.connection = connect(dataclasses.asdict(info), rank, held, serves)
        self.listener = threading.Thread(target=self._listen, args=(self.connection,), daemon=True)
        self.listener.start()

    def start_weight_update(self) -> None:
        self.wanted = None

    def receive_weights(self, info: CommitInfo) -> None:
        """Check that the version is staged; raises before anything has changed."""
        self.shelf.check(info.version, info.checksum)
        self.wanted = info

    def finish_weight_update(self) -> None:
        """Load the staged version into the model."""
        if self.wanted is None:
            raise ValueError("finish_weight_update without update_weights")
        self.pinned.take(self.shelf.memory, self.device)
        self.shelf.commit(
            self.wanted.version,
            lambda tensors: load_tensors(self.model, self.model_config, self.device, tensors),
        )
        self.wanted = None

    def shutdown(self) -> None:
        self.pinned.release()
        if self.connection is not None:
            try:
                self.connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it was dead already
            self.connection.close()
            self.connection = None
        if self.listener is not None:  # it closes what the trainer lent
            self.listener.join(CLOSE_SECONDS)
            self.listener = None

    def _listen(self, link: socket.socket) -> None:
        logger.info("the trainer's link ended: %s", self.shelf.listen(link))


def load_tensors(model: torch.nn.Module, model_config, device, tensors: wire.Tensors) -> None:
    """Load whole Hugging Face tensors into a served model.

    All tensors are loaded, not only the changed ones: a fused or repacked layer must be rebuilt
    from all of its parts.
    """
    initialize_layerwise_reload(model)
    model.load_weights(
        (name, to_torch(tensor.bits, tensor.shape, tensor.dtype, device))
        for name, tensor in tensors.items()
    )
    finalize_layerwise_reload(model, model_config)
    if torch.device(device).type == "cpu":
        # On CPU a head keeps its own repacked copy, which a tied embedding does not refresh.
        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
    elif torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)  # copies out of memory that may be written afterwards


def has_experts(model: torch.nn.Module) -> bool:
    """Return True if any parameter belongs to several experts at once."""
    return any(".experts." in name for name, _ in model.named_parameters())


def describe_model(model: torch.nn.Module, model_config) -> dict[str, list[int] | None]:
    """Return {Hugging Face name: shape, or None if unknown} of everything that is served."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return describe(
        [name for name, _ in model.named_parameters()],
        getattr(model, "packed_modules_mapping", None) or {},
        read_shapes(model_config.model),
        bool(getattr(model_config.hf_config, "tie_word_embeddings", False)),
        ServedNames(*(getattr(mapper, f"orig_to_new_{part}", None) or {} for part in MAPPED)),
    )
