"""Exact rollouts (`rollout.exact`): where they are possible, and what follows from them.

The model's side is layers/exact.py; docs/exact.md describes both.
"""

from collections.abc import Iterator
from dataclasses import replace

from jaxtrain.config import Config
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.errors import UserError
from jaxtrain.layers.exact import CPU, GPU, ExactOps, find_inexact_layers
from jaxtrain.models import build


def make_exact(config: Config, bundle: ModelBundle) -> ModelBundle:
    """Return the bundle, with `rollout.exact` of a model whose passes are exact; UserError with
    all reasons why it cannot be."""
    if not config.rollout.exact:
        return bundle
    if reasons := list(find_reasons(config, bundle)):
        listed = "".join(f"\n  - {reason}" for reason in reasons)
        raise UserError(
            "rollout.exact: the sampler's log-probs cannot be the trainer's to the bit here; change"
            f" what follows, or set it to false:{listed}"
        )
    return replace(bundle, options={**bundle.options, "exact": exact_ops(bundle)})


def exact_ops(bundle: ModelBundle) -> ExactOps:
    """Return the operations of exact passes, in the tiles of the mesh's platform."""
    return ExactOps(GPU if bundle.mesh.devices.flat[0].platform == "gpu" else CPU)


def reuses_sampled_logp(config: Config) -> bool:
    """Return True if the old policy's log-probs are the sampler's: they are those of the weights
    before the round's first update, to the bit, so that no pass need compute them again."""
    rollout = config.rollout
    # Otherwise some tokens were drawn by older weights, or meet weights of this round.
    fresh = rollout.mode == "sync" and not rollout.streaming and not rollout.replay_size
    return rollout.exact and fresh


def find_reasons(config: Config, bundle: ModelBundle) -> Iterator[str]:
    """Yield whatever keeps sampler and trainer apart."""
    rollout, model, adapter = config.rollout, config.model, config.adapter
    if rollout.engine != "local":
        yield f'rollout.engine "{rollout.engine}" has programs of its own; set it to "local"'
    platform = bundle.mesh.devices.flat[0].platform
    if platform not in ("cpu", "gpu"):
        yield f"nobody has measured it on {platform}; it holds on CPUs and NVIDIA GPUs"
    if bundle.mesh.size > 1 or rollout.devices:
        yield (
            f"{bundle.mesh.size + rollout.devices} devices share the work (section parallel,"
            " rollout.devices), whose sums have another order; start it on one device"
        )
    if layers := find_inexact_layers(build.abstract(bundle.architecture)):
        yield f"{bundle.architecture.architecture} has layers without an exact form: " + ", ".join(
            layers
        )
    if rollout.local.weights != "default":
        yield f'rollout.local.weights "{rollout.local.weights}" rounds the sampler\'s weights'
    if rollout.local.cache != "default":
        yield f'rollout.local.cache "{rollout.local.cache}" rounds the sampler\'s keys and values'
    if model.matmul != "default":
        yield f'model.matmul "{model.matmul}" scales by the largest number of a whole batch'
    for key in ("attention", "logp", "experts"):
        if (name := getattr(model, key)) not in ("auto", "xla", "reference"):
            yield f'model.{key} "{name}" names a kernel that sampling does not run'
    if adapter.kind not in ("none", "lora"):
        yield f'adapter.kind "{adapter.kind}" is not tried; "lora" and none are'
    if adapter.quantize != "none":
        yield f'adapter.quantize "{adapter.quantize}" is not tried'
    if adapter.dropout:
        yield f"adapter.dropout {adapter.dropout:g} draws in training alone"
    if model.neftune_alpha:
        yield f"model.neftune_alpha {model.neftune_alpha:g} draws in training alone"
    if rollout.router_replay:
        yield "rollout.router_replay sends tokens where exact routers send them anyway"
    if config.sampling.structured_outputs:
        yield "sampling.structured_outputs scores over allowed tokens alone, training over all"
