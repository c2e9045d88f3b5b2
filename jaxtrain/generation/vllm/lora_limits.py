"""Limits of vLLM 0.32 for adapters, checked before a run's servers would fail.

On CPUs no mixture of experts is served with an adapter, whatever layers it targets: vLLM then runs
experts in GPU-only kernels, so that a server starts and its engine fails at the first request.
Experts that a folder stores as one tensor get one pair of matrices in PEFT
(adapters/peft_experts.py), which two of vLLM's classes read; all others want a pair per expert.
Each refuses the other's format.
"""

from collections.abc import Iterable

from jaxtrain.adapters.peft_experts import find_wrapped
from jaxtrain.adapters.spec import ROUTER, Linears, find_adaptable
from jaxtrain.config.vllm import VllmConfig
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.distributed import gpus
from jaxtrain.errors import UserError

JOINT = {"GptOssForCausalLM", "Qwen3_5MoeForConditionalGeneration"}
"""Architectures for which vLLM reads one pair for all experts (is_3d_moe_weight)."""

INSTEAD = (
    'set adapter.target to "attention", or train all weights: adapter.kind "none" with'
    ' rollout.vllm.sync "full" or "delta"'
)
UNREAD = {"Glm4ForCausalLM": ("gate_up_proj",)}
"""Modules of folders for which vLLM's class expects pairs under other names."""


def check_adapter(vllm: VllmConfig, bundle: ModelBundle) -> None:
    """Raise UserError for an adapter that vLLM would not serve, or would serve wrongly."""
    adapter = bundle.adapter
    assert adapter is not None, "the config says that there is one"
    if adapter.full or adapter.rows:
        keys = "adapter.train_embeddings and adapter.train_head to false"
        raise UserError(
            "rollout.vllm.sync lora: vLLM does not serve embeddings or heads of an adapter;"
            + (
                f" set {keys}, or train and sync in full"
                if adapter.full
                else " train the tokens that section model adds first (task.kind sft), merge, and"
                " name that folder as model.path"
            )
        )
    if len({(slot.rank, slot.alpha) for slot in adapter.slots.values()}) > 1:
        raise UserError(
            "rollout.vllm.sync lora: vLLM scales all layers by one rank and alpha; remove"
            " adapter.rank_pattern and adapter.alpha_pattern"
        )
    (architecture,) = bundle.architecture.to_hf()["architectures"]
    linears = find_adaptable(bundle.architecture)
    check_modules(architecture, linears, adapter.slots)
    if bundle.architecture.experts_per_token is None:
        return
    if vllm.launch == "local" and not gpus.find_theirs(vllm):
        raise UserError(
            f"rollout.vllm.sync lora: {architecture} is a mixture of experts, which vLLM on a CPU"
            " does not serve with an adapter, whatever adapter.target is; give the servers GPUs"
            ' (rollout.vllm.gpus), or set rollout.engine to "local"'
        )
    wrapped = find_wrapped(bundle.architecture, linears)
    experts = [path for path in adapter.slots if path in wrapped]
    joint = any(not wrapped[path].alone for path in experts)
    if experts and joint != (architecture in JOINT):
        forms = ("a pair for each expert", "one pair for all experts")
        raise UserError(
            f"rollout.vllm.sync lora: adapter.target reaches {', '.join(experts)}, of which an"
            f" adapter of this folder has {forms[joint]}, and vLLM takes {forms[not joint]} of"
            f" {architecture}; {INSTEAD}"
        )


def check_modules(architecture: str, linears: Linears, paths: Iterable[str]) -> None:
    """Raise UserError for Linears on which vLLM's class supports no adapter, or only half of
    one."""
    for path in paths:
        if path.startswith("vision."):
            raise UserError(
                f"rollout.vllm.sync lora: adapter.target reaches {path}, and vLLM leaves out the"
                " adapter of what reads images; name only Linears of the text in adapter.target, or"
                ' train all weights: adapter.kind "none" with model.vision.train and'
                ' rollout.vllm.sync "full" or "delta"'
            )
        if linears[path].preset == ROUTER:
            raise UserError(
                f"rollout.vllm.sync lora: adapter.target reaches {path}, a router, of which vLLM"
                f" takes no adapter; {INSTEAD}"
            )
        if path.endswith(".attention.k") and f"{path[:-1]}v" not in linears:
            raise UserError(
                f"rollout.vllm.sync lora: adapter.target reaches {path}, which makes the values,"
                " too, and vLLM corrects the keys alone; name the other Linears in adapter.target"
                ' (such as ["mlp", "attention.q", "attention.v", "attention.out"]), or train all'
                ' weights: adapter.kind "none" with rollout.vllm.sync "full" or "delta"'
            )
        module = linears[path].modules[0].rpartition(".")[2]
        if module in UNREAD.get(architecture, ()):
            raise UserError(
                f"rollout.vllm.sync lora: adapter.target reaches {path}, and vLLM refuses an"
                f" adapter of {architecture}'s {module}; {INSTEAD}"
            )
