"""Conflicts between keys of rollout.vllm when jaxtrain starts its servers."""

from collections.abc import Iterator
from typing import Any

from jaxtrain.config.base import unread

OWN_ARGS = {
    "--model": "model.path",
    "--served-model-name": "model.path",
    "--host": "nothing: it listens where the trainer reaches it",
    "--port": "nothing: a free one is taken",
    "--api-key": "the environment variable VLLM_API_KEY",
    "--tensor-parallel-size": "rollout.vllm.gpus divided by rollout.vllm.replicas",
    "-tp": "rollout.vllm.gpus divided by rollout.vllm.replicas",
}
"""Options of a server that follow from the config: by what."""
WITHOUT_LAUNCH = unread(
    "rollout.vllm.python rollout.vllm.replicas rollout.vllm.gpus rollout.vllm.args",
    "rollout.vllm.launch",
    lambda launch: launch != "none",
    cure='set rollout.vllm.launch to "local" or remove it',
)


def find_launch_conflicts(config: Any) -> Iterator[str]:
    """Yield one sentence for each impossible combination, of a run that samples with vLLM."""
    vllm = config.rollout.vllm
    if vllm.launch == "none":
        yield from WITHOUT_LAUNCH(config)
        return
    if config.model.path is None:
        yield (
            f"rollout.vllm.launch {vllm.launch} starts servers with the model of model.path, which"
            " is not set; name a folder or Hub id there"
        )
    if vllm.launch == "ray" and vllm.sleep:
        yield (
            "rollout.vllm.sleep shares this machine's GPU with the servers, which launch ray puts"
            ' on GPUs of their own; set launch to "local" or sleep to false'
        )
    if vllm.gpus and vllm.gpus % vllm.replicas:
        yield (
            f"rollout.vllm.gpus {vllm.gpus} cannot be split evenly over rollout.vllm.replicas"
            f" {vllm.replicas}; make it a multiple"
        )
    for argument in vllm.args:
        name = argument.partition("=")[0].replace("_", "-")
        if name in OWN_ARGS:
            yield f"rollout.vllm.args {argument!r} is set by {OWN_ARGS[name]}; remove it"
