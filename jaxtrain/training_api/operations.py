"""Operations on a model, by the name of their route; run by the device's thread."""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.text_safety import show
from jaxtrain.training_api.optimizer import read_numbers
from jaxtrain.training_api.requests import read_request
from jaxtrain.training_api.samplers import Samplers
from jaxtrain.training_api.trainer import LoRASpec, TrainedModel, draw_seed
from jaxtrain.training_api.weights_store import Saved, WeightsStore, read_name, read_ttl

MAX_RANK = 4096
MAX_UNNAMED = 8
"""Sampler weights without a name that a model keeps; older ones are deleted."""
WEIGHTS, SAMPLER_WEIGHTS = "weights", "sampler_weights"


class Operations:
    """Model of a client and the requests that it can run."""

    def __init__(self, model_id: str, name: str, store: WeightsStore, samplers: Samplers):
        """name: what clients call the base."""
        self.model_id, self.name, self.store, self.samplers = model_id, name, store, samplers
        self.folder = store.model_folder(model_id)
        self.model: TrainedModel | None = None
        self._failed = "it was not created"
        self._by_name: dict[str, Callable[[str, Any], Any]] = {
            "create_model": self._create,
            "load_weights": self._load,
            "optim_step": self._optim_step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
        }

    def run(self, operation: str, request_id: str, payload: bytes) -> Any:
        """Run a request; returns bytes in protobuf or an object. UserError."""
        if operation == "forward_backward":
            return self._open().forward_backward(read_request(payload))
        return self._by_name[operation](request_id, json.loads(payload))

    def run_again(self, operation: str, request_id: str, payload: bytes) -> None:
        """Bring the model to where a request brought it once. UserError, as then."""
        # What is saved is on disk, and may have been replaced since.
        if operation.startswith("save_"):
            return
        # An empty payload was that of a forward pass, and is dropped once it has ended.
        if operation == "forward_backward" and not (
            payload and self.adds_gradients(operation, payload)
        ):
            return
        self.run(operation, request_id, payload)

    def adds_gradients(self, operation: str, payload: bytes) -> bool:
        """Return whether the next step needs what a request computes."""
        return operation == "forward_backward" and not read_request(payload).forward_only

    def drop(self, reason: str) -> None:
        """Make the next step fail, because a part of its gradients is missing."""
        if self.model is not None:
            self.model.drop(reason)

    def forget(self) -> None:
        """Forget the model's state, which an error may have left half changed."""
        self.model = None

    @property
    def pending(self) -> bool:
        """True while there are gradients, or a failed part of them, for the next step."""
        return self.model is not None and (self.model.sums is not None or bool(self.model.failed))

    def save_snapshot(self, cursor: dict[str, Any]) -> None:
        """Write the state to begin from after a restart."""
        model = self._open()
        arrays = model.state.tree()
        self.store.save(self.folder / "snapshot", model.kind.lora, arrays, cursor, "")

    def open_snapshot(self) -> dict[str, Any] | None:
        """Begin from the newest snapshot and return its cursor; None: there is none."""
        saved = self.store.read_about(self.folder / "snapshot")
        if saved is None:
            return None
        kind = self.store.base.kind(saved.lora)
        state, cursor = self.store.read_state(saved.folder, kind)
        self.model = TrainedModel(kind, state)
        return cursor

    def _open(self) -> TrainedModel:
        if self.model is None:
            raise UserError(f"model_id {self.model_id} cannot be used: {self._failed}")
        return self.model

    def _create(self, request_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._check_base(body.get("base_model"))
            check_optimizer(body)
            config = read_object(body, "lora_config")
            lora = read_lora(config)
            seed = config.get("seed")
            if seed is not None and (type(seed) is not int or not 0 <= seed < 1 << 63):
                raise UserError(f"lora_config.seed must be a whole number, not {show(seed, 60)}")
            kind = self.store.base.kind(lora)
            seed = draw_seed(self.model_id) if seed is None else seed
            self.model = TrainedModel(kind, kind.start(seed))
        except UserError as error:
            self._failed = str(error)
            raise
        return {"model_id": self.model_id, "type": "create_model"}

    def _load(self, request_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            if body.get("base_model") is not None:
                self._check_base(body["base_model"])
            check_optimizer(body)
            saved = self.store.find(body.get("path"), WEIGHTS, "path")
            kind = self.store.base.kind(saved.lora)
            if self.model is not None and self.model.kind is not kind:
                raise UserError(f"path {show(body['path'])} trains {saved.lora}, another kind")
            state, _ = self.store.read_state(saved.folder, kind)
            dropped = self.pending
            self.model = TrainedModel(kind, state)
            if not body.get("optimizer"):
                self.model.renew_optimizer()
        except UserError as error:
            self._failed = str(error)
            raise
        answer = {"path": body["path"], "model_id": self.model_id, "type": "load_weights"}
        if dropped:
            print(
                f"{self.model_id}: load_weights drops gradients that had no step", file=sys.stderr
            )
            answer["warning"] = "gradients that had no optim_step were dropped"
        return answer

    def _check_base(self, name: Any) -> None:
        if name != self.name:
            raise UserError(f"base_model {show(name)} is not served here; {show(self.name)} is")

    def _optim_step(self, request_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        model, numbers = self._open(), read_numbers(body)
        return {"metrics": model.optim_step(numbers), "type": "optim_step"}

    def _save(self, request_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        model, (number, name) = self._open(), self._name(request_id, body)
        seconds, saved = read_ttl(body), self._find_saved(WEIGHTS, name)
        if saved is None or saved.about["request"] != request_id:
            if saved is not None and not body.get("overwrite"):
                raise UserError(f"path {show(name)}: there are such weights; set overwrite")
            cursor = {"seq_id": number}
            folder = self.folder / WEIGHTS / name
            state = model.state.tree()
            self.store.save(folder, model.kind.lora, state, cursor, request_id, seconds)
        return {"path": self._address(WEIGHTS, name), "type": "save_weights"}

    def _save_for_sampler(self, request_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        model, session = self._open(), None
        if body.get("path") is None:
            number = body.get("sampling_session_seq_id")
            if type(number) is not int or not 0 <= number < 10**9:
                raise UserError("path or sampling_session_seq_id, a whole number, is needed")
            name = f"unnamed-{number:09d}"
            session = f"{self.model_id.partition(':')[0]}:sample:{number}"
        else:
            name = read_name(body["path"], "path")
        address = self._address(SAMPLER_WEIGHTS, name)
        seconds, saved = read_ttl(body), self._find_saved(SAMPLER_WEIGHTS, name)
        if saved is not None and saved.about["request"] != request_id:
            raise UserError(f"path {show(name)}: there are such sampler weights; give a new name")
        if saved is None:
            params, folder = model.copy_params(), self.folder / SAMPLER_WEIGHTS
            self.store.save(folder / name, model.kind.lora, params, {}, request_id, seconds)
            self.samplers.keep(address, model.kind, params)
            for old in sorted(folder.glob(f"unnamed-{'[0-9]' * 9}"))[:-MAX_UNNAMED]:
                shutil.rmtree(old, ignore_errors=True)
        answer = {"path": address, "type": "save_weights_for_sampler"}
        return answer if session is None else {**answer, "sampling_session_id": session}

    def _name(self, request_id: str, body: Mapping[str, Any]) -> tuple[int, str]:
        number = int(request_id.rpartition("/")[2])
        name = body.get("path")
        return number, f"{number:06d}" if name is None else read_name(name, "path")

    def _find_saved(self, kind: str, name: str) -> Saved | None:
        return self.store.read_about(self.folder / kind / name)

    def _address(self, kind: str, name: str) -> str:
        return f"tinker://{self.model_id}/{kind}/{name}"


def read_lora(config: Mapping[str, Any]) -> LoRASpec:
    """Read lora_config; UserError. train_unembed changes nothing: heads get no adapter here."""
    rank = config.get("rank")
    if type(rank) is not int or not 0 <= rank <= MAX_RANK:
        raise UserError(f"lora_config.rank must be 0 to {MAX_RANK}, not {show(rank, 60)}")
    attention, mlp = (bool(config.get(name, True)) for name in ("train_attn", "train_mlp"))
    if rank and not (attention or mlp):
        raise UserError("lora_config: one of train_attn and train_mlp is needed; heads get none")
    return LoRASpec(rank, attention, mlp) if rank else LoRASpec(0)


def read_object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a field that holds an object, {} if there is none; UserError."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{name} must be an object, not {show(value, 60)}")
    return value or {}


def check_optimizer(body: Mapping[str, Any]) -> None:
    """Raise UserError for an optimizer that is not AdamW."""
    kind = read_object(body, "optimizer_config").get("type", "adamw")
    if kind != "adamw":
        raise UserError(f"optimizer_config.type {show(kind, 60)} is not trained here; adamw is")
